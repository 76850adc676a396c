"""Captions photos as people have them: a folder of JPEG files of 12 megapixels to a file of JSON
lines, everything included, by this engine and by others.

    photos.py MODELS --photos FOLDER [--num 200] [--models qwen25vl] [--weights bf16 int8 int4]
        [--image-tokens 1024] [--llamacpp PROGRAM] [--openvino PYTHON] [--vllm PYTHON]
        [--rounds 1] [--parts]

MODELS: the folder that `checkpoints.py MODELS` writes; for the peers also MODELS/NAME-gguf and
MODELS/NAME-ov, -ov-int8 and -ov-int4, see peers/README.md. FOLDER: where `camera.py` writes the
photos; those that are missing are written first. --num 12 for a quick look. --llamacpp: the program
llama-server. --openvino, --vllm: the Python that has openvino_genai, vLLM (bf16 alone).

Each run is a process of its own: it loads the model, captions the photos with --tokens tokens each,
end-of-sequence ignored, and ends; engines take turns. The figures of a run:

total     seconds from the start of the process to its end
images/s  photos for each second of that
later     photos for each second after the model was loaded
first     seconds until the first record is in the file, loading included
CPU       seconds of the processor, of children too

--parts says where they went in this engine, see peers/photo_meter.py, and how many seconds of the
clock the engine had nothing to compute. --image-tokens full, --width and --height: the default of
`LLM` on smaller pictures, of this engine alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from camera import HEIGHT, WIDTH, write_photos

HERE = Path(__file__).parent
MARK = "RESULT "
POLL_SECONDS = 0.1
OURS = "mmdeploy_llm"
PARTS = ("decode", "resize", "tower", "prefill", "decoding", "rest")


class RunError(Exception):
    """An engine failed, for the reason in the message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a run took, in seconds. parts: see peers/photo_meter.py, with "load"; without --parts
    none."""

    engine: str
    num: int
    total: float
    ready: float
    first: float
    cpu: float
    num_prompt_tokens: int | None
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def images(self) -> float:
        """Photos a second, everything included."""
        return self.num / self.total

    @property
    def later(self) -> float:
        """Photos a second once the model is loaded."""
        return self.num / (self.total - self.ready)


class Watch(threading.Thread):
    """Notes when the first whole line is in a file."""

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        self.seen: float | None = None
        self._path, self._is_done = path, threading.Event()

    def run(self) -> None:
        """Looks until there is one, or `stop`."""
        while self.seen is None and not self._is_done.wait(POLL_SECONDS):
            if self._path.is_file() and b"\n" in self._path.read_bytes():
                self.seen = time.perf_counter()

    def stop(self) -> None:
        """Ends the thread."""
        self._is_done.set()
        self.join()


def run(command: Sequence[str], output: Path, num: int, tokens: int) -> Figures:
    """Runs one engine. Raises RunError when it fails, or did less than was asked for."""
    watch, begin = Watch(output), time.perf_counter()
    watch.start()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        said = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        total = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        watch.stop()
        errors.seek(0)
        lines = errors.read().strip().splitlines()
    found = next((line for line in said.splitlines() if line.startswith(MARK)), None)
    if process.returncode or found is None:
        raise RunError(lines[-1] if lines else f"it ended with {process.returncode}")
    answer: dict[str, Any] = json.loads(found.removeprefix(MARK))
    num_lines = len(output.read_bytes().splitlines())
    if (num_lines, answer["num_tokens"]) != (num, num * tokens) or watch.seen is None:
        done = f"{num_lines} records and {answer['num_tokens']} tokens of {num} photos"
        raise RunError(": ".join([done, *lines[-1:]]))  # maybe of an engine that was started again
    parts = dict(answer.get("parts") or {})
    if parts:
        parts["load"] = answer["load_cpu"]
    return Figures(
        engine=answer["engine"],
        num=num,
        total=total,
        ready=answer["ready"],
        first=watch.seen - begin,
        cpu=usage.ru_utime + usage.ru_stime,
        num_prompt_tokens=answer.get("num_prompt_tokens"),
        parts=parts,
    )


def commands(args: argparse.Namespace, model: str, weights: str) -> Iterator[tuple[str, list[str]]]:
    """Yields the engines that were asked for, with the start of their commands."""
    suffix = "" if weights == "bf16" else f"-{weights}"
    engines = {
        OURS: (sys.executable, "", [*["--meter"] * args.parts]),
        "llamacpp": (sys.executable, "-gguf", ["--program", args.llamacpp or ""]),
        "openvino": (args.openvino, f"-ov{suffix}", []),
        "vllm": (args.vllm, "", []),
    }
    if weights != "bf16":
        del engines["vllm"]
    for name, (python, ending, extra) in engines.items():
        folder = args.folder / f"{model}{ending}"
        if name != OURS and getattr(args, name) is None:
            continue
        if not folder.is_dir():
            print(f"{name}: left out, there is no folder {folder}", flush=True)
            continue
        script = str(HERE / "peers" / f"photos_{name}.py")
        command = [python, script, "--model", str(folder), "--precision", weights, *extra]
        yield name, command + common(args)


def common(args: argparse.Namespace) -> list[str]:
    """Returns the arguments that all engines have."""
    found = ["--tokens", str(args.tokens), "--image-tokens", args.image_tokens]
    for name in ("parallel", "threads"):
        if getattr(args, name) is not None:
            found += [f"--{name}", str(getattr(args, name))]
    return found


def session(args: argparse.Namespace, model: str, weights: str, photos: Sequence[Path]) -> bool:
    """Runs all engines in turn with one model and prints their table; returns whether any ran."""
    done: dict[str, list[Figures]] = {}
    for number in range(args.rounds):
        for name, command in commands(args, model, weights):
            with tempfile.TemporaryDirectory(dir=photos[0].parent.parent) as place:
                folder, output = Path(place, "photos"), Path(place, "captions.jsonl")
                folder.mkdir()
                for path in photos:
                    os.link(path, folder / path.name)
                files = ["--photos", str(folder), "--output", str(output)]
                try:
                    figures = run([*command, *files], output, len(photos), args.tokens)
                except RunError as error:
                    print(f"{name}: {error}", flush=True)
                    continue
            done.setdefault(name, []).append(figures)
            print(f"round {number + 1}: {shown(figures)}", flush=True)
    if done:
        table(model, weights, done)
    return bool(done)


def shown(figures: Figures) -> str:
    """Returns a line about a run, with its parts."""
    tokens = figures.num_prompt_tokens
    line = (
        f"{figures.engine}: {figures.total:.1f} s, {figures.images:.3f} images/s, "
        f"{figures.later:.3f} later, first {figures.first:.1f} s, CPU {figures.cpu:.1f} s"
        + ("" if tokens is None else f", {tokens / figures.num:.0f} prompt tokens")
    )
    parts = figures.parts
    if parts:
        each = ", ".join(f"{part} {parts[part]:.1f}" for part in (*PARTS, "load"))
        waiting = parts["waiting"] / parts["wall"]
        line += f"\n    CPU: {each}; waiting {parts['waiting']:.1f} s, {waiting:.1%} of the clock"
    return line


def table(model: str, weights: str, done: Mapping[str, Sequence[Figures]]) -> None:
    """Prints medians, and how much faster this engine is in the same rounds."""
    print(f"\n{model}, {weights}\n\n| engine | images/s | later | first | CPU | ratio |")
    print("|---|---|---|---|---|---|")
    ours = done.get(OURS, ())
    for runs in done.values():
        pairs = zip(ours, runs, strict=False)
        ratios = [one.images / other.images for one, other in pairs] or [float("nan")]
        middle = {
            name: statistics.median(getattr(one, name) for one in runs)
            for name in ("images", "later", "first", "cpu")
        }
        print(
            f"| {runs[0].engine} | {middle['images']:.3f} | {middle['later']:.3f} | "
            f"{middle['first']:.1f} s | {middle['cpu']:.0f} s | {statistics.median(ratios):.2f} |"
        )
    print(flush=True)


def main() -> None:
    """Runs what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="MODELS")
    parser.add_argument("--photos", type=Path, required=True)
    parser.add_argument("--num", type=int, default=200)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--height", type=int, default=HEIGHT)
    parser.add_argument("--models", nargs="+", default=["qwen25vl"])
    parser.add_argument("--weights", nargs="+", default=["bf16", "int8", "int4"])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--image-tokens", default="1024")
    parser.add_argument("--parallel", type=int, help="requests at once, for all engines")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--llamacpp")
    parser.add_argument("--openvino")
    parser.add_argument("--vllm")
    args = parser.parse_args()
    photos = write_photos(args.photos, args.num, args.width, args.height)
    pairs = itertools.product(args.models, args.weights)
    if not any([session(args, *pair, photos) for pair in pairs]):
        sys.exit("nothing was measured")


if __name__ == "__main__":
    main()
