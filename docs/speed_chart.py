"""The chart of speeds on the front page, an SVG made of the tables in RESULTS.md: one table for
each kind of machine."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "examples/benchmarks/RESULTS.md"
CHART = ROOT / "examples/speed.svg"
MACHINES = {"Zen 3": "#9db4c8", "Zen 4": "#5b87ad", "Zen 5": "#23527c"}
ENGINES = ("OpenVINO", "llama.cpp")
WORKS = ("32 texts at once", "one text alone", "first token of 1,024", "16 images")
WEIGHTS = "8 bits"
Ratios = dict[tuple[str, str, str, str], str]  # machine, work, weights, engine -> ratio
LEFT, TOP, UNIT, BAR, GAP = 190, 44, 104, 12, 10  # pixels; UNIT is that of a ratio of 1


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
            for engine in ENGINES:
                found[machine, cells["work"], cells["weights"], engine] = cells[engine]
    return found


def chart(ratios: Ratios) -> str:
    """Returns the chart: a group of bars for each work and engine, a bar for each machine."""
    parts, y = [_legend()], TOP
    for work in WORKS:
        for engine in ENGINES:
            own = {name: ratios.get((name, work, WEIGHTS, engine), "") for name in MACHINES}
            if not any(own.values()):
                continue
            parts.append(_text(LEFT - 8, y + 2.2 * BAR, f"{work}, {engine}", anchor="end"))
            for machine, ratio in own.items():
                if ratio:
                    parts += _bar(y, float(ratio), ratio, MACHINES[machine])
                y += BAR
            y += GAP
    x = LEFT + UNIT
    parts.append(f'<path d="M{x} {TOP - 6}V{y}" stroke="#c0392b" stroke-dasharray="3 3"/>')
    parts.append(_text(x, y + 12, "1: as fast as the other", anchor="middle"))
    width, height = LEFT + 5 * UNIT + 40, y + 20
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">\n'
        f'<rect width="{width}" height="{height}" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _legend() -> str:
    parts = [_text(8, 16, f"mmdeploy_llm, times the speed of the other, weights in {WEIGHTS}")]
    for number, (machine, colour) in enumerate(MACHINES.items()):
        x = LEFT + number * 70
        parts.append(f'<rect x="{x}" y="22" width="10" height="10" fill="{colour}"/>')
        parts.append(_text(x + 14, 31, machine))
    return "\n".join(parts)


def _bar(y: float, ratio: float, label: str, colour: str) -> list[str]:
    width = round(ratio * UNIT)
    return [
        f'<rect x="{LEFT}" y="{y}" width="{width}" height="{BAR - 1}" fill="{colour}"/>',
        _text(LEFT + width + 4, y + BAR - 3, label),
    ]


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{words}</text>'
