"""Compares this engine with other engines on the same workloads on this machine.

    python examples/benchmarks/compare.py MODELS [--openvino PYTHON] [--vllm PYTHON]
        [--dashinfer PYTHON] [--transformers PYTHON] [--llamacpp PROGRAM] [--level avx2]
        [--rounds 3] [--only WORDS] [--write HISTORY.md] [--machine WORDS]

MODELS: the folder that `checkpoints.py MODELS` writes (qwen05, ernie03, qwen25vl), and for OpenVINO
its exports of these models (qwen05-ov, qwen05-ov-int8, qwen25vl-ov, qwen25vl-ov-int8). Each peer
option is the Python interpreter of the environment that has the peer installed, --llamacpp the
program llama-batched-bench (see peers/README.md); a peer that is not given or does not start is
left out with a message.

--level avx2 holds all engines to AVX2, as far as each can be: ours and llama.cpp by what was
compiled, torch and OpenVINO by environment variables of oneDNN and ATen. On a machine that has no
more the variables are left out.

Each engine loads a model once, in a process of its own, and warms up; then the engines take turns
at each workload, `rounds` times. While one runs, the processes of the others are stopped, so that
busy waiting takes no core. Rates are medians of the rounds, ratios medians of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sessions import LEVELS, PEERS, SESSIONS, UNITS, Level, Session, level_here

HERE = Path(__file__).parent
MARK = "RESULT "
OURS = "mmdeploy_llm"
ALONE_TOKENS = 128
TIMES = ("alone", "first")  # works whose figures are times, not rates


class RunnerError(Exception):
    """An engine did not start or failed, for the reason in the message."""


def end_when_told() -> None:
    """Has SIGTERM end the program as Ctrl-C does, which closes its runners: their processes would
    stay, stopped."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


class Runner:
    """One engine with one model in a child process, which is stopped (SIGSTOP) unless it works."""

    def __init__(
        self,
        python: str,
        script: str,
        arguments: Sequence[str],
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Starts the engine with these environment variables besides the present ones. Raises
        RunnerError when it does not start."""
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the runner
        command = [python, str(HERE / "peers" / script), *arguments]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                start_new_session=True,
                env={**os.environ, **variables},
            )
        except OSError as error:
            self._errors.close()
            raise RunnerError(str(error)) from error
        try:
            ready = self._answer()
        except BaseException:
            self.close()
            raise
        self.name = str(ready["engine"])
        self.load_seconds = float(ready["load"])
        self._signal(signal.SIGSTOP)

    def ask(self, **work: Any) -> Mapping[str, float]:
        """Runs one workload and returns its figures. Raises RunnerError."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps(work) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        self._signal(signal.SIGSTOP)
        return answer

    def close(self) -> None:
        """Kills the process and its children; a second call does nothing."""
        if self._errors.closed:
            return
        self._signal(signal.SIGKILL)
        self._process.communicate()
        self._errors.close()

    def _answer(self) -> Mapping[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                answer: Mapping[str, Any] = json.loads(line.removeprefix(MARK))
                return answer
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        self.close()
        raise RunnerError(lines[-1] if lines else "its process ended without a message")

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The result of one workload for this engine and a peer. ratios: one per round; above 1 this
    engine is faster."""

    work: str
    model: str
    precision: str
    ours: float
    peer: str
    theirs: float
    ratios: tuple[float, ...]
    target: float | None
    load_ours: float
    load_theirs: float

    @property
    def ratio(self) -> float:
        """The median of the rounds' ratios."""
        return statistics.median(self.ratios)


def measure(runner: Runner, work: str, seed: int) -> float:
    """Runs a workload and returns its figure in the unit of UNITS.

    For "alone", the time per token is (time of 128 tokens - time of the first) / 127.
    """
    if work == "alone":
        first = runner.ask(work="alone", num=1, seed=seed)["seconds"]
        whole = runner.ask(work="alone", num=ALONE_TOKENS, seed=seed)
        assert whole["num_tokens"] == ALONE_TOKENS, f"{whole} tokens"
        return 1000 * (whole["seconds"] - first) / (ALONE_TOKENS - 1)
    if work == "first":
        return 1000 * runner.ask(work="first", num=1, seed=seed)["seconds"]
    if work == "vl":
        done = runner.ask(work="images", num=16, seed=seed)
        return 16 / done["seconds"]
    done = runner.ask(work="text", num=32, seed=0)
    return done["num_tokens"] / done["seconds"]


def warm_up(runner: Runner, session: Session) -> None:
    """Runs a few requests of each workload."""
    if session.has_images:
        runner.ask(work="images", num=2, seed=999)
    else:
        runner.ask(work="text", num=4, seed=999)
        runner.ask(work="alone", num=8, seed=999)


def run_session(
    session: Session, pythons: Mapping[str, str], models: Path, rounds: int, level: Level
) -> list[Row]:
    """Runs all rounds of a session; returns [] when there is no peer to compare with."""
    with contextlib.ExitStack() as stack:
        runners = dict(start_all(session, pythons, models, level, stack))
        if OURS not in runners or len(runners) < 2:
            say(f"{session.title}: nothing to compare")
            return []
        found: dict[tuple[str, str], list[float]] = {}
        for number in range(rounds):
            for work in session.works:
                for name, runner in runners.items():
                    value = measure(runner, work, number)
                    found.setdefault((work, name), []).append(value)
                    say(f"round {number + 1}  {work:5} {runner.name:40} {value:8.3f} {UNITS[work]}")
        return [
            make_row(session, work, name, runners, found, level)
            for work in session.works
            for name in runners
            if name != OURS
        ]


def start_all(
    session: Session,
    pythons: Mapping[str, str],
    models: Path,
    level: Level,
    stack: contextlib.ExitStack,
) -> Iterator[tuple[str, Runner]]:
    """Yields the engines that start, warmed up; prints a line for each that does not."""
    say(f"== {session.title}")
    for name in (OURS, *session.peers):
        if name not in pythons:
            say(f"{name}: left out, no --{name} was given")
            continue
        folder = models / f"{session.model}{session.suffix(name)}"
        if not folder.is_dir():
            say(f"{name}: left out, there is no folder {folder}")
            continue
        python, arguments = pythons[name], ["--model", str(folder)]
        arguments += ["--precision", session.precision, *(["--images"] * session.has_images)]
        if name == "llamacpp":
            python, arguments = sys.executable, [*arguments, "--program", python]
        if name == OURS:
            arguments += level.arguments
        try:
            runner = Runner(python, f"run_{name}.py", arguments, level.variables)
            stack.callback(runner.close)
            warm_up(runner, session)
        except RunnerError as error:
            say(f"{name}: left out, {error}")
            continue
        say(f"{runner.name}: loaded in {runner.load_seconds:.1f} s")
        yield name, runner


def make_row(
    session: Session,
    work: str,
    name: str,
    runners: Mapping[str, Runner],
    found: Mapping[tuple[str, str], Sequence[float]],
    level: Level,
) -> Row:
    """Returns the comparison of this engine with one peer."""
    ours, theirs = found[work, OURS], found[work, name]
    ratios = tuple(mine / its for mine, its in zip(ours, theirs, strict=True))
    if work in TIMES:
        ratios = tuple(1 / ratio for ratio in ratios)
    return Row(
        work=work,
        model=session.model,
        precision=session.precision,
        ours=statistics.median(ours),
        peer=runners[name].name,
        theirs=statistics.median(theirs),
        ratios=ratios,
        target=level.target(session, work, name),
        load_ours=runners[OURS].load_seconds,
        load_theirs=runners[name].load_seconds,
    )


def table(rows: Sequence[Row]) -> str:
    """Returns a Markdown table."""
    lines = [
        "| work | precision | mmdeploy_llm | peer | peer's | ratio (of each round) | target |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        digits = 3 if row.work == "vl" else 1
        each = ", ".join(f"{ratio:.2f}" for ratio in row.ratios)
        target = "" if row.target is None else f"{row.target:.2f}"
        lines.append(
            f"| {row.work}, {row.model} | {row.precision} | {row.ours:.{digits}f} "
            f"{UNITS[row.work]} | {row.peer} | {row.theirs:.{digits}f} {UNITS[row.work]} | "
            f"**{row.ratio:.2f}** ({each}) | {target} |"
        )
    return "\n".join(lines)


def loads(rows: Sequence[Row]) -> str:
    """Returns a sentence with the seconds from process start until each engine is ready."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        engines = found.setdefault(f"{row.model} {row.precision}", {OURS: row.load_ours})
        engines[row.peer] = row.load_theirs
    parts = [
        f"{model}: " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in engines.items())
        for model, engines in found.items()
    ]
    return "Seconds to load, imports included: " + "; ".join(parts) + "."


def section(rows: Sequence[Row], machine: str, rounds: int, level: Level) -> str:
    """Returns the text between the markers."""
    today = datetime.date.today().isoformat()
    return (
        f"{machine}, {today}; `python compare.py{level.option}`, {rounds} rounds, engines in turn. "
        "text: 32 requests, 4,197 tokens in and 1,997 out. vl: 16 images of 448 x 448, 64 tokens "
        "out each. alone: one request, 128 tokens in, 128 out, time of a token after the first. "
        "first: time to the first token of 1,024 prompt tokens. Greedy, end-of-sequence ignored, "
        "no prefix cache. llama.cpp: all texts of the mean length. int8: weights in 8 bits; "
        "mmdeploy_llm rounds "
        f"activations to 8 bits too.\n\n{table(rows)}\n\n{loads(rows)}{level.note}"
    )


def write(path: Path, text: str, level: Level) -> None:
    """Replaces the text between the level's markers. Raises SystemExit without markers."""
    begin, end = level.markers
    old = path.read_text()
    if begin not in old or end not in old:
        sys.exit(f"{path} has no lines {begin} and {end}; the section was printed only")
    before, rest = old.split(begin, 1)
    path.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end, 1)[1]}")


def say(text: str) -> None:
    """Prints a progress message to standard error."""
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Parses the command line and runs the sessions."""
    end_when_told()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", type=Path)
    for name in PEERS:
        parser.add_argument(
            f"--{name}", metavar="PROGRAM", help=f"interpreter of the environment with {name}"
        )
    parser.add_argument("--level", choices=sorted(LEVELS), default="best")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help='sessions to run, such as "qwen05 bf16"')
    parser.add_argument("--write", type=Path, metavar="FILE", help="Markdown file to update")
    parser.add_argument(
        "--machine", default=f"{os.cpu_count()} cores", help="description for the result"
    )
    args = parser.parse_args()
    pythons = {name: getattr(args, name) for name in PEERS if getattr(args, name)}
    level = level_here(args.level)
    pythons[OURS] = sys.executable
    rows: list[Row] = []
    for session in SESSIONS:
        if all(word in session.title for word in args.only.split()):
            rows += run_session(session, pythons, args.models.resolve(), args.rounds, level)
    if not rows:
        sys.exit("nothing was compared")
    text = section(rows, args.machine, args.rounds, level)
    print(text)
    if args.write:
        write(args.write, text, level)


if __name__ == "__main__":
    main()
