"""The table of speeds on the front page, in both languages, made of those in RESULTS.md: one for
each kind of machine."""

from __future__ import annotations

import re
from pathlib import Path

RESULTS = Path(__file__).parent.parent / "examples/benchmarks/RESULTS.md"
TABLE = re.compile(r"(<!-- speed(?: in (\w+))? -->\n).*?(<!-- end of speed -->)", re.DOTALL)
MACHINES = ("Zen 3", "Zen 4", "Zen 5")
WORKS = ("32 texts at once", "one text alone", "first token of 1,024", "16 images")
CHINESE = {
    "work": "任务",
    "weights": "权重",
    "32 texts at once": "32 条文本同时推理",
    "one text alone": "单条文本，每个 token",
    "first token of 1,024": "首 token（1,024 个 token 的提示词）",
    "16 images": "16 张图片",
    "8 bits": "8 位",
    "4 bits": "4 位",
}
PEERS = dict.fromkeys(MACHINES, ("OpenVINO", "llama.cpp"))
PEERS["Zen 5"] += ("vLLM",)
Ratios = dict[tuple[str, str, str, str], str]  # machine, work, weights, engine -> ratio


def fill(markdown: str) -> str:
    """Writes the table between its markers."""
    ratios = read_ratios(RESULTS.read_text(encoding="utf-8"))
    return TABLE.sub(lambda match: f"{match[1]}\n{table(ratios, match[2])}\n{match[3]}", markdown)


def read_ratios(results: str) -> Ratios:
    """Reads the tables of RESULTS.md. A cell of an engine is a ratio or empty."""
    found: Ratios = {}
    for section in results.split("\n## ")[1:]:
        machine = next((own for own in MACHINES if own in section.partition("\n")[0]), None)
        rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:1] == "|"]
        if machine is None:
            continue
        names = [name.strip() for name in rows[0]]
        for row in rows[2:]:
            cells = dict(zip(names, (cell.strip() for cell in row), strict=True))
            for engine in PEERS[machine]:
                found[machine, cells["work"], cells["weights"], engine] = cells[engine]
    return found


def table(ratios: Ratios, language: str | None) -> str:
    """Returns the table. language: "Chinese"; None: English."""

    def word(text: str) -> str:
        return CHINESE.get(text, text) if language == "Chinese" else text

    columns = [(machine, engine) for machine in MACHINES for engine in PEERS[machine]]
    heads = [word("work"), word("weights"), *(f"{machine}, {own}" for machine, own in columns)]
    lines = []
    for work in WORKS:
        for weights in ("bf16", "8 bits", "4 bits"):
            own = [ratios.get((machine, work, weights, engine), "") for machine, engine in columns]
            if any(own):
                lines.append([word(work), word(weights), *own])
    text = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    return f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}\n{text}"
