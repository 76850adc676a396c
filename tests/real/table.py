"""Writes the figures of the real models into examples/benchmarks/QUALITY.md.

    python -m tests.real.table [SECTION]...  [--windows 8]
    python -m tests.real.table smollm2 --windows 8 --rows bfloat16 "KV int8"

A section is what stands between two marks of the page; those that are not named stay as they are,
and so do the lines of a section that --rows does not name, which must have the same windows.
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
from tests.real.closeness import MANY, ROWS, Reference, measure, measure_row
from tests.real.gguf_types import MODEL, TYPES, own_weights, quantized
from tests.real.vectors import TEXTS, vectors

PAGE = Path(__file__).parents[2] / "examples" / "benchmarks" / "QUALITY.md"
OF_QWEN = (
    *("float32", "bfloat16", "int8wo", "int8a8", "int8", "int4wo, groups of 32", "int4wo"),
    *("KV int8", "KV int4", "the file as it is", "the file, int8"),
)
FEW_OF_GGUF = 1  # window for each type
WINDOWS_OF_QWEN = 2  # at most: one takes half a minute of two cores


def closeness(model: str, names: tuple[str, ...], windows: int, rows: list[str]) -> Iterator[str]:
    """Yields a line for each number format; SmolLM2 is asked the twenty questions too.

    rows: those that are measured, none for all; lines of others are those of the page, if any.
    """
    has_answers, reference = model == "smollm2", Reference(model, windows)
    yield "| format | KL | the same best token | perplexity |" + " answers |" * has_answers
    yield "|---|---|---|---|" + "---|" * has_answers
    for name in names:
        if rows and name not in rows:
            yield from re.findall(rf"^\| {re.escape(name)} \|.*", section(model), re.MULTILINE)
            continue
        found = measure_row(reference, ROWS[name])
        line = f"| {name} | {max(found.kl, 0):.2g} | {found.top:.1%} | {found.perplexity:.2f} |"
        if has_answers:
            line += f" {kept(answers(ROWS[name]))} of {len(QUESTIONS)} |"
        yield line
        print(line, flush=True)
    yield f"\n{found.positions:,} positions; float32: perplexity {found.reference_perplexity:.2f}."


def smollm2(windows: int, rows: list[str]) -> Iterator[str]:
    yield from closeness("smollm2", tuple(ROWS), windows, rows)


def qwen(windows: int, rows: list[str]) -> Iterator[str]:
    yield from closeness("qwen", OF_QWEN, min(windows, WINDOWS_OF_QWEN), rows)


def of_gguf(*_: object) -> Iterator[str]:
    yield "| type | MB | KL of its own weights | with rounded activations | the same best token |"
    yield "|---|---|---|---|---|"
    for name in TYPES:
        file = quantized(name)
        with own_weights(name, FEW_OF_GGUF) as own:
            kls = [measure(own, options, file).kl for options in ({}, {"quantization": "int8"})]
        same = measure(Reference(MODEL, FEW_OF_GGUF), {}, file).top
        size = file.stat().st_size / 1e6
        line = f"| {name} | {size:.0f} | {kls[0]:.2g} | {kls[1]:.2g} | {same:.1%} |"
        yield line
        print(line, flush=True)


def of_vectors(*_: object) -> Iterator[str]:
    yield f"| dtype | largest difference of {TEXTS} vectors | smallest cosine |"
    yield "|---|---|---|"
    for dtype in ("float32", "bfloat16"):
        found = vectors(dtype=dtype)
        yield f"| {dtype} | {found.largest_difference:.1e} | {found.smallest_cosine:.6f} |"


def of_speech(*_: object) -> Iterator[str]:
    long = speech.recording()
    seconds, number = len(long.samples) / speech.RATE, len(speech.words(long.text))
    yield f"| model | wrong words of {number} in {seconds:.0f} s | faster-whisper, one beam |"
    yield "|---|---|---|"
    for model in speech.MODELS:
        both = speech.transcribed, speech.transcribed_by_faster_whisper
        texts = [speech.text_of_lines(by(model, long)) for by in both]
        ours, theirs = (speech.word_errors(text, long.text) for text in texts)
        yield f"| {model} | {ours} | {theirs} |"


SECTIONS: dict[str, Callable[[int, list[str]], Iterator[str]]] = {
    "smollm2": smollm2,
    "qwen": qwen,
    "gguf": of_gguf,
    "vectors": of_vectors,
    "speech": of_speech,
}


def machine() -> str:
    """Returns the name of the processor, the level of its instructions, and the day."""
    import torch

    (name,) = set(re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()))
    level = torch.backends.cpu.get_cpu_capability()
    return f"{name}, {level}; {date.today().isoformat()}"


def section(name: str) -> str:
    """Returns a section of the page with its marks."""
    marks = (f"<!-- {name}: {side} -->" for side in ("begin", "end"))
    return re.search(".*".join(marks), PAGE.read_text("utf-8"), re.DOTALL)[0]


def write(name: str, lines: list[str]) -> None:
    """Replaces what stands between the marks of a section."""
    old = section(name)
    begin, *_, end = old.splitlines()
    new = "\n".join([begin, *lines, "", machine(), end])
    PAGE.write_text(PAGE.read_text("utf-8").replace(old, new), "utf-8")


def main() -> None:
    """Measures the sections that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", metavar="SECTION")
    parser.add_argument("--windows", type=int, default=MANY)
    parser.add_argument("--rows", nargs="*", default=[], choices=ROWS, metavar="ROW")
    args = parser.parse_args()
    for name in args.sections or SECTIONS:
        write(name, list(SECTIONS[name](args.windows, args.rows)))


if __name__ == "__main__":
    main()
