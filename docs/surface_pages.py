"""Writes the reference of plugins: the hooks, and what plugins may import, both of signatures and
docstrings."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parent.parent
SURFACE = ROOT / "tests" / "hooks" / "surface.json"
PART = re.compile(r"(<!-- the surface: begin -->\n).*?(<!-- the surface: end -->)", re.DOTALL)
HOOKS = re.compile(r"(<!-- the hooks: begin -->\n).*?(<!-- the hooks: end -->)", re.DOTALL)
GUIDES = ("write_a_plugin.md", "write_for_the_engine.md")  # with an example of each hook
SINCE = re.compile(r"\n*\.\. versionadded:: (\S+)\s*\Z")


def fill_hooks(markdown: str) -> str:
    """Writes the hooks between their markers; other pages stay as they are."""
    if not HOOKS.search(markdown):
        return markdown
    return HOOKS.sub(lambda match: f"{match[1]}\n{hooks()}\n{match[2]}", markdown)


def hooks() -> str:
    """Returns a section for each hook: its signature, its docstring, and where its example is."""
    from mmdeploy_llm.hooks import specs

    marked = [each for each in vars(specs).values() if hasattr(each, f"{specs.PROJECT}_spec")]
    places, sections = examples(), []
    for hook in marked:
        text = inspect.getdoc(hook) or ""
        since, text = SINCE.search(text), SINCE.sub("", text)
        signature = f"{hook.__name__}{inspect.signature(hook)}".replace("'", "")
        told = f"Since {since[1]}. " if since else ""
        sections.append(
            f"### `{signature}`\n\n{text}\n\n{told}[Example]({places[hook.__name__]})\n"
        )
    return "\n".join(sections)


def examples() -> dict[str, str]:
    """Returns hook -> the link to the section of a guide that begins with its name."""
    found = {}
    for guide in GUIDES:
        text = (ROOT / "docs" / guide).read_text(encoding="utf-8")
        for title, line in re.findall(r"^## (.*)\n\n(`\w+`.* gives? .*)$", text, re.MULTILINE):
            anchor = title.lower().replace(" ", "-")
            for name in re.findall(r"`(\w+)`", line.partition(" give")[0]):
                found.setdefault(name, f"{guide}#{anchor}")
    return found


def fill(markdown: str) -> str:
    """Writes the reference between its markers; other pages stay as they are."""
    if not PART.search(markdown):
        return markdown
    return PART.sub(lambda match: f"{match[1]}\n{reference()}\n{match[2]}", markdown)


def reference() -> str:
    """Returns a section for each module, with an entry for each public name."""
    recorded: Mapping[str, str] = json.loads(SURFACE.read_text(encoding="utf-8"))
    sections: dict[str, list[str]] = {}
    for name, about in recorded.items():
        module, public = _home(name)
        if "." not in public:
            found, note = _found(module, public)
            members = {
                each.removeprefix(f"{name}."): text
                for each, text in recorded.items()
                if each.startswith(f"{name}.")
            }
            entry = note or _entry(public, about, found, members)
            sections.setdefault(module, []).append(entry)
    return "\n".join(
        f"### {module}\n\n" + "\n".join(entries) for module, entries in sections.items()
    )


def _home(name: str) -> tuple[str, str]:
    """Returns the module of a recorded name, and the rest of the name."""
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:count])
        try:
            found = importlib.import_module(module)
        except ImportError:
            continue
        if isinstance(found, ModuleType):
            return module, ".".join(parts[count:])
    raise ValueError(f"{name} is in no module")


def _found(module: str, public: str) -> tuple[Any, str]:
    """Returns what a name means, and the whole entry of a deprecated one."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = getattr(importlib.import_module(module), public)
    if not any(issubclass(each.category, DeprecationWarning) for each in told):
        return found, ""
    return found, f"#### {public}\n\nDeprecated: {str(told[-1].message).replace('<', '&lt;')}.\n"


def _entry(name: str, about: str, found: Any, members: Mapping[str, str]) -> str:
    """Returns the signature, the docstring, and a row for each member."""
    signature = f"class {name}" if about == "class" else f"{name}{about}"
    if not about.startswith("(") and about != "class":
        signature = f"{name}: {about}"
    lines = [f"#### {name}", "", "```python", signature.replace("'", ""), "```", ""]
    if about == "class" or callable(found):
        lines += [*_paragraphs(inspect.getdoc(found) or ""), ""]
    if members:
        lines += ["| member | type or signature | |", "|---|---|---|"]
        lines += [
            f"| `{each}` | {_cell(text)} | {_first(found, each)} |"
            for each, text in members.items()
        ]
        lines.append("")
    return "\n".join(lines)


def _paragraphs(text: str) -> Iterator[str]:
    """Yields the lines of a docstring; "name: meaning" begins a paragraph of its own."""
    for line in text.replace("<", "&lt;").splitlines():
        if re.match(r"[a-z_]+(?:, [a-z_]+)*: ", line):
            yield ""
        yield line.strip()


def _cell(text: str) -> str:
    return "`" + text.replace("'", "").replace("|", "\\|") + "`"


def _first(found: Any, member: str) -> str:
    """Returns the first sentence of a method's docstring."""
    method = getattr(found, member, None)
    if not callable(method) and not isinstance(method, property):
        return ""
    text = " ".join((inspect.getdoc(method) or "").split("\n\n")[0].split())
    return text.split(". ")[0].replace("|", "\\|").replace("<", "&lt;")
