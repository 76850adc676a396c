"""Build steps of the guide, run by mkdocs (see mkdocs.yml).

Pages and pictures that live elsewhere in the repository are part of the site where they are: their
links are followed, a linked source file becomes a page of its own, and a link that leads nowhere
ends the build. The notebook becomes a page too.

`python docs/hooks.py` writes the tables of options and the reference of hooks anew, and copies the
code blocks and generated tables of the English pages into the Chinese ones.
"""

from __future__ import annotations

import json
import logging
import posixpath
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(Path(__file__).parent))

import chinese  # noqa: E402
import chinese_site  # noqa: E402
import option_tables  # noqa: E402
import speed_chart  # noqa: E402
import surface_pages  # noqa: E402

PAGES = {  # page of the site -> file of the repository
    "index.md": "README.md",
    "plugins.md": "plugins/mmdeploy_llm_plugins/README.md",
    "processors.md": "processors/mmdeploy_llm_processors/README.md",
    "code.md": "mmdeploy_llm/README.md",
    "benchmarks.md": "examples/benchmarks/RESULTS.md",
    "benchmark_history.md": "examples/benchmarks/HISTORY.md",
    "examples.md": "examples/README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "notebook.md": "docs/caption_demo_images.ipynb",
}
PICTURES = {".png", ".jpg", ".webp"}
LANGUAGES = {".py": "python", ".json": "json", ".toml": "toml", ".jinja": "jinja", ".cpp": "cpp"}
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
PARAGRAPH = re.compile(r"<p>.*?</p>", re.DOTALL)
CELL = re.compile(r"<td.*?</td>", re.DOTALL)
FIELD = re.compile(r"\n(?=[a-z_]+(?:, [a-z_]+)*: )")
NOTE = re.compile(r"^<!-- not run: .* -->\n", re.MULTILINE)  # for the tests of the code blocks


class Site:
    """Which file of the repository is which page or picture of the site."""

    def __init__(self) -> None:
        self.origins = {
            f"docs/{path.name}": path.name
            for path in (ROOT / "docs").glob("*.md")
            if not path.name.endswith(chinese.ENDING)
        }
        self.origins |= {origin: page for page, origin in PAGES.items()}
        for origin, page in list(self.origins.items()):
            own = chinese.chinese(origin)
            if origin.endswith(".md") and (ROOT / own).is_file():
                self.origins[own] = chinese.FOLDER + page
        todo = list(self.origins)
        while todo:
            origin = todo.pop()
            if origin.endswith((".md", ".ipynb")):
                todo += self._add_links(origin)

    def _add_links(self, origin: str) -> list[str]:
        """Adds the files that a page links to. Returns the new ones."""
        found = []
        for part in FENCE.split(read(origin))[::2]:
            for match in LINK.finditer(part):
                target = resolve(origin, match[2])
                if target is not None and target not in self.origins:
                    is_page = Path(target).suffix not in PICTURES
                    self.origins[target] = f"source/{target}.md" if is_page else f"files/{target}"
                    found.append(target)
        return found

    def relink(self, markdown: str, page: str) -> str:
        """Points the links of a page at the pages and files of the site."""
        origin = next(name for name, uri in self.origins.items() if uri == page)

        def replace(match: re.Match[str]) -> str:
            target = resolve(origin, match[2])
            if target is None:
                return match[0]
            uri = posixpath.relpath(self.origins[target], posixpath.dirname(page))
            link = f"{match[1]}{uri}{match[3] or ''}{match[4]}"
            leaves = page.startswith(chinese.FOLDER) and not uri.startswith("../source/")
            return link + chinese.MARK if leaves and uri.endswith(".md") and uri[0] == "." else link

        parts = FENCE.split(markdown)
        return "".join(
            part if index % 2 else LINK.sub(replace, NOTE.sub("", part))
            for index, part in enumerate(parts)
        )


def resolve(origin: str, link: str) -> str | None:
    """Returns the file of the repository that a link of the file `origin` names; None: not a file.
    Raises FileNotFoundError for one that is missing."""
    if "://" in link or link.startswith("mailto:"):
        return None
    target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))
    if (ROOT / target / "README.md").is_file():
        target = posixpath.join(target, "README.md")
    if not (ROOT / target).is_file():
        raise FileNotFoundError(f"{origin} links to {link}, which does not exist")
    return target


def read(origin: str) -> str:
    """Returns a file of the repository as Markdown: a notebook cell by cell, code in a fence."""
    text = (ROOT / origin).read_text(encoding="utf-8")
    suffix = Path(origin).suffix
    if suffix == ".md":
        return text
    if suffix == ".ipynb":
        return "\n\n".join(cell_markdown(cell) for cell in json.loads(text)["cells"])
    return f"# {origin}\n\n```{LANGUAGES.get(suffix, 'text')}\n{text.rstrip()}\n```\n"


def cell_markdown(cell: dict[str, Any]) -> str:
    """Returns a cell of a notebook, with the text that it printed."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    printed = "".join("".join(output.get("text", ())) for output in cell["outputs"])
    code = f"```python\n{source}\n```"
    return f"{code}\n\n```{{.text .printed}}\n{printed.rstrip()}\n```" if printed else code


def on_files(files: Any, config: Any) -> Any:
    """Adds everything that lies outside docs/."""
    from mkdocs.structure.files import File

    logging.getLogger("jieba").setLevel(
        logging.WARNING
    )  # it cuts Chinese into words for the search
    config.extra["site"] = site = Site()
    for origin, uri in site.origins.items():
        if origin == f"docs/{uri}":
            continue
        if uri.endswith(".md"):
            files.append(File.generated(config, uri, content=read(origin)))
        else:
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / origin)))
    return files


def on_nav(nav: Any, config: Any, files: Any) -> Any:
    """Makes the navigation of the Chinese pages beside that of the English ones."""
    config.extra["chinese_nav"] = chinese_site.navigation(nav, files, config)
    config.extra["files"] = files
    return nav


def on_page_context(context: Any, page: Any, config: Any, nav: Any) -> Any:
    """Gives a page the language that it is written in."""
    chinese_site.switch(page, config.extra["files"], config)
    if page.file.src_uri.startswith(chinese.FOLDER):
        context["nav"] = config.extra["chinese_nav"]
    return context


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Fills the tables of options and mends the links."""
    filled = surface_pages.fill(option_tables.fill(markdown))
    relinked: str = config.extra["site"].relink(filled, page.file.src_uri)
    return relinked


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Starts a new line before each "name: meaning" that begins a line of a docstring; shows what a
    cell of a table has escaped for Markdown."""
    html = CELL.sub(lambda match: match[0].replace("\\|", "|"), html)
    if page.file.src_uri != "api.md":
        return html
    return PARAGRAPH.sub(lambda match: FIELD.sub("<br>\n", match[0]), html)


def write() -> None:
    """Writes the tables of options, the hooks and the chart of speeds anew, and code blocks and
    tables of the Chinese pages."""
    for page in option_tables.PAGES:
        rewrite(ROOT / "docs" / page, option_tables.fill)
    rewrite(ROOT / "docs" / "plugin_reference.md", surface_pages.fill_hooks)
    ratios = speed_chart.read_ratios(speed_chart.RESULTS.read_text(encoding="utf-8"))
    speed_chart.CHART.write_text(speed_chart.chart(ratios), encoding="utf-8")
    for origin in Site().origins:
        if origin.endswith(chinese.ENDING):
            original = (ROOT / chinese.english(origin)).read_text(encoding="utf-8")
            rewrite(ROOT / origin, lambda text, by=original: chinese.copy_blocks(text, by))


def rewrite(path: Path, change: Callable[[str], str]) -> None:
    """Changes the text of a file."""
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    write()
