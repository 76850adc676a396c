"""Writes the figures of the real models into examples/benchmarks/QUALITY.md.

    python -m tests.real.table [SECTION]...  [--windows 8]

A section is what stands between two marks of the page; those that are not named stay as they are.
It measures by the same functions as the tests do, over more text: `--windows 40` are 20,440
positions, and take most of an hour on two cores.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path

from tests.real import speech
from tests.real.answers import QUESTIONS, answers, kept
from tests.real.closeness import FEW, MANY, ROWS, Reference, measure_row
from tests.real.vectors import TEXTS, vectors

PAGE = Path(__file__).parents[2] / "examples" / "benchmarks" / "QUALITY.md"
OF_QWEN = ("float32", "bfloat16", "int8wo", "int8", "int4wo", "int4", "KV int8", "KV int4")


def closeness(model: str, names: tuple[str, ...], windows: int) -> Iterator[str]:
    """Yields a line for each number format; SmolLM2 is asked the twenty questions too."""
    has_answers, reference = model == "smollm2", Reference(model, windows)
    yield "| format | KL | the same best token | perplexity |" + " answers |" * has_answers
    yield "|---|---|---|---|" + "---|" * has_answers
    for name in names:
        found = measure_row(reference, ROWS[name])
        line = f"| {name} | {max(found.kl, 0):.2g} | {found.top:.1%} | {found.perplexity:.2f} |"
        if has_answers:
            line += f" {kept(answers(ROWS[name]))} of {len(QUESTIONS)} |"
        yield line
        print(line, flush=True)
    yield f"\n{found.positions:,} positions; float32: perplexity {found.reference_perplexity:.2f}."


def smollm2(windows: int) -> Iterator[str]:
    yield from closeness("smollm2", tuple(ROWS), windows)


def qwen(windows: int) -> Iterator[str]:
    names = (*OF_QWEN, *(name for name in ROWS if name.startswith("the file")))
    yield from closeness("qwen", names, min(windows, FEW))


def of_vectors(_: int) -> Iterator[str]:
    yield f"| dtype | largest difference of {TEXTS} vectors | smallest cosine |"
    yield "|---|---|---|"
    for dtype in ("float32", "bfloat16"):
        found = vectors(dtype=dtype)
        yield f"| {dtype} | {found.largest_difference:.1e} | {found.smallest_cosine:.6f} |"


def of_speech(_: int) -> Iterator[str]:
    long = speech.recording()
    seconds, number = len(long.samples) / speech.RATE, len(speech.words(long.text))
    yield f"| model | wrong words of {number} in {seconds:.0f} s | faster-whisper, one beam |"
    yield "|---|---|---|"
    for model in speech.MODELS:
        both = speech.transcribed, speech.transcribed_by_faster_whisper
        texts = [speech.text_of_lines(by(model, long)) for by in both]
        ours, theirs = (speech.word_errors(text, long.text) for text in texts)
        yield f"| {model} | {ours} | {theirs} |"


SECTIONS: dict[str, Callable[[int], Iterator[str]]] = {
    "smollm2": smollm2,
    "qwen": qwen,
    "vectors": of_vectors,
    "speech": of_speech,
}


def machine() -> str:
    """Returns the name of the processor, with its number of cores, and the day."""
    import torch

    (name,) = set(re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()))
    level = torch.backends.cpu.get_cpu_capability()
    return f"{name}, {torch.get_num_threads()} threads, {level}; {date.today().isoformat()}"


def write(name: str, lines: list[str]) -> None:
    """Replaces what stands between the marks of a section."""
    page = PAGE.read_text("utf-8")
    begin, end = (f"<!-- {name}: {side} -->" for side in ("begin", "end"))
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    text = "\n".join([begin, *lines, "", machine(), end])
    PAGE.write_text(f"{before}{text}{after}", "utf-8")


def main() -> None:
    """Measures the sections that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", metavar="SECTION")
    parser.add_argument("--windows", type=int, default=MANY)
    args = parser.parse_args()
    for name in args.sections or SECTIONS:
        write(name, list(SECTIONS[name](args.windows)))


if __name__ == "__main__":
    main()
