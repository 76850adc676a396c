"""Measures how close one GPU comes to its limits: gpu.py [--device cuda] [--parts qwen,ernie].

Runs random weights of real configurations in less than 8 minutes and prints one table. Every part
runs in a process of its own with a time limit; a part that fails or hangs becomes a row of the
table and the others continue. The machine's own rates, measured first, are the limits.

    --device cpu --size tiny    runs everything with small models, as a test; ignore the figures
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Part -> time limit in seconds; part -> its rows, which a failed part shows as failed.
LIMITS = {"machine": 40, "qwen": 170, "transformers": 130, "start": 110, "ernie": 150}
WORKS = {
    "machine": ["machine"],
    "qwen": ["decode, 7B, batch 1", "decode, 7B, batch", "prefill", "step overhead", "vl:"],
    "transformers": ["transformers generate"],
    "start": ["start to first token"],
    "ernie": ["ERNIE-4.5-VL-28B-A3B", "decode, ERNIE"],
}
TOTAL_SECONDS = 470
COLUMNS = ("work", "measured", "limit", "share", "target", "met")
PARTS_SCRIPT = Path(__file__).with_name("gpu_parts.py")
MIN_RATIO = 4.0  # target for images per second, this engine to transformers


@dataclass
class PartResult:
    """The outcome of a part. problem: why it did not finish, or None."""

    name: str
    seconds: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)
    problem: str | None = None


def run_part(
    name: str, options: list[str], limit: float, script: Path = PARTS_SCRIPT
) -> PartResult:
    """Runs one part in a process group of its own, which is killed after `limit` seconds."""
    result, begin = PartResult(name), time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, str(script), name, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    is_late = threading.Event()

    def kill() -> None:
        is_late.set()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(limit, kill)
    timer.start()
    tail: list[str] = []
    try:
        for line in lines_of(process):
            if line.startswith("ROW "):
                result.rows.append(json.loads(line[4:]))
                print(f"[{name}] {result.rows[-1]}", flush=True)
            else:
                tail = [*tail[-30:], line]
                print(f"[{name}] {line}", flush=True)
        code = process.wait()
    finally:
        timer.cancel()
        kill_rest(process)
    result.seconds = time.perf_counter() - begin
    if is_late.is_set():
        result.problem = f"stopped after {limit:.0f} s"
    elif code != 0:
        lines = [line for line in tail if line.strip()]
        result.problem = lines[-1][:160] if lines else f"exit status {code}"
    return result


def lines_of(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None
    for line in process.stdout:
        yield line.rstrip("\n")


def kill_rest(process: subprocess.Popen[str]) -> None:
    """Kills the child processes that the part left behind."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def rows_of(results: list[PartResult]) -> list[dict[str, Any]]:
    """Returns all rows of the table, including one for each row that a failed part lacks."""
    rows = []
    for result in results:
        rows += result.rows
        found = [row["work"] for row in result.rows]
        for work in WORKS[result.name]:
            if not any(name.startswith(work) for name in found):
                problem = result.problem or "not measured"
                rows.append({"work": f"{work} ...", "measured": f"failed: {problem}", "met": False})
            else:
                found.remove(next(name for name in found if name.startswith(work)))
    return rows + ratio_rows(rows)


def ratio_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row that compares images per second with transformers, if either part ran."""
    kinds = [row["work"].partition(" ")[0] for row in rows]
    if "vl:" not in kinds and "transformers" not in kinds:
        return []
    images = {kind: row["images"] for kind, row in zip(kinds, rows, strict=True) if "images" in row}
    ours, theirs = images.get("vl:"), images.get("transformers")
    ratio = ours / theirs if ours and theirs else None
    return [
        {
            "work": "vl, to transformers generate",
            "measured": "needs both parts" if ratio is None else f"{ratio:.1f} times the images/s",
            "target_text": f"{MIN_RATIO:.0f} times",
            "met": ratio is not None and ratio >= MIN_RATIO,
        }
    ]


def cells(row: dict[str, Any]) -> list[str]:
    """Formats a row. A share meets its target from the target on, a value below it."""
    share, value, target = row.get("share"), row.get("value"), row.get("target")
    met = row.get("met")
    if share is not None and target is not None:
        met, wanted = share >= target, f"{100 * target:.0f} %"
    elif value is not None and target is not None:
        met, wanted = 0 <= value < target, f"under {target:g}"
    else:
        wanted = row.get("target_text", "runs" if row.get("done") else "")
        met = True if row.get("done") else met
    shown = "" if met is None else "yes" if met else "no"
    shared = "" if share is None else f"{100 * share:.0f} %"
    return [row["work"], row.get("measured", ""), row.get("limit", ""), shared, wanted, shown]


def table(rows: list[dict[str, Any]]) -> str:
    """Returns a Markdown table, followed by the rows' notes."""
    texts = [list(COLUMNS), *(cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in texts) for column in range(len(COLUMNS))]
    lines = [
        "| "
        + " | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True))
        + " |"
        for line in texts
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    notes = [f"{row['work']}: {row['note']}" for row in rows if row.get("note")]
    return "\n".join([*lines, "", *notes])


def main() -> int:
    """Runs the parts and prints the table; returns 1 when a part did not finish."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=("real", "tiny"), default="real")
    parser.add_argument("--parts", default=",".join(LIMITS), help="names separated by commas")
    parser.add_argument("--folder", type=Path, help="for configs and weights, 17 GB; default: /tmp")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    names = ["machine", *(name for name in args.parts.split(",") if name != "machine")]
    unknown = sorted(set(names) - set(LIMITS))
    if unknown:
        parser.error(f"unknown parts: {', '.join(unknown)}; choose from {', '.join(LIMITS)}")
    begin, results = time.perf_counter(), []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        options = ["--device", args.device, "--size", args.size, "--folder", folder]
        for name in names:
            left = TOTAL_SECONDS - (time.perf_counter() - begin)
            if left < 5:
                results.append(PartResult(name, problem="no time was left"))
                continue
            results.append(run_part(name, options, min(LIMITS[name], left)))
    rows = rows_of(results)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    times = ", ".join(f"{result.name} {result.seconds:.0f} s" for result in results)
    print(f"\n{time.perf_counter() - begin:.0f} s in all: {times}\n\n{table(rows)}", flush=True)
    return 1 if any(result.problem for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
