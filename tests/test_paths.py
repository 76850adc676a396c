"""No sentence names a place that is gone: paths and dotted names in pages, docstrings and comments
lead to files of this repository.

A path is read relative to the folder of its file, the folders around that, mmdeploy_llm/ and the
root. What a sentence of code calls by its bare name lies in one of these, or is the only file of
that name in the package. Names that nobody could look up are left alone: those of the reader's own
files (`my_plugin.py`, `src/acme_llm/model.py`, `photos/`) and what .gitignore keeps out.
"""

import ast
import inspect
import io
import posixpath
import re
import tokenize
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.tree import HOMES, ROOT

FOLDERS = ("mmdeploy_llm", "plugins", "processors", "tests", "examples", "docs", "findings", ".ci")
TEMPLATES = "mmdeploy_llm/testing/scaffold/templates/"  # what `plugins new` writes for authors
CODE = (".py", ".h", ".cpp")
READ = (*CODE, ".md", ".toml", ".yml", ".tmpl", "Makefile", ".ci/run")
# Pages about the code: a bare name there is a file of mmdeploy_llm/, `x/` one of its folders.
MAPS = ("mmdeploy_llm/README.md", "CONTRIBUTING.md", "docs/how_it_works.md")
# They tell of the past.
HISTORY = ("CHANGELOG.md", "examples/benchmarks/HISTORY.md")

NOT_AFTER, NOT_BEFORE = r"(?<![\w./:$<>{}@*~-])", r"(?![\w*{<$/-])"
FILE = re.compile(
    rf"{NOT_AFTER}(?:\./|\{{\w+\}}/)*-*((?:[\w.-]+/)*[\w-]+\.(?:py|h|cpp|md|toml)){NOT_BEFORE}"
)
FOLDER = re.compile(rf"{NOT_AFTER}((?:[\w-]+/)+)(?![\w*{{<$-]|\.[\w.])")
DOTTED = re.compile(
    rf"{NOT_AFTER}(mmdeploy_llm(?:_plugins|_processors)?(?:\.[A-Za-z_]\w*)+){NOT_BEFORE}"
)
# `weights.map.WeightMap`: what plugins' authors read without the package's name.
SHORT = re.compile(r"`([a-z]+(?:\.[a-z]\w*)+\.\w+|[a-z]+\.[A-Z]\w*)`")
# The reader's own files, and projects that are called as files are.
MADE_UP = re.compile(
    r"^(?:src/(?!mmdeploy)|acme|my_|lora/|\.\.\./|[A-Z]+\.)|(?:[A-Z]+\.py|FAMILY/|llama.cpp|whisper.cpp)$"
)


@dataclass(frozen=True, kw_only=True)
class Text:
    """A page, a docstring or a comment. line: where it begins in its file."""

    origin: str
    line: int
    text: str

    @property
    def is_code(self):
        return self.origin.endswith(CODE)

    def line_of(self, match):
        """The line of the text that a match is in."""
        start = self.text.rfind("\n", 0, match.start()) + 1
        return self.text[start:].partition("\n")[0]


class Tree:
    """The files of a repository, by their paths."""

    def __init__(self, files):
        """files: path -> content."""
        self.files = files
        self.places = {str(each) for name in files for each in Path(name).parents} | set(files)
        self.made = tuple(line.strip("/") for line in files.get(".gitignore", "").splitlines())
        self.by_name = {}
        for file in files:
            self.by_name.setdefault(file.rpartition("/")[2], []).append(file)

    @classmethod
    def here(cls):
        paths = [*ROOT.iterdir(), *(path for name in FOLDERS for path in (ROOT / name).rglob("*"))]
        names = {
            path.relative_to(ROOT).as_posix(): path
            for path in paths
            if path.is_file() and "__pycache__" not in path.parts
        }
        files = {}
        for name, path in names.items():
            is_read = name.endswith((*READ, ".gitignore"))
            files[name] = path.read_text(encoding="utf-8") if is_read else ""
        return cls(files)

    def has(self, origin, name):
        """Whether a path leads somewhere for who reads it in a file."""
        around = [each.as_posix() for each in Path(origin).parents]
        places = [*around, "mmdeploy_llm", "plugins", "processors"]
        return any(posixpath.normpath(f"{place}/{name}") in self.places for place in places)

    def leads_somewhere(self, origin, name):
        """Whether a path or a bare name leads to one file."""
        if self.has(origin, name):
            return True
        if "/" in name:  # plugins/ and others have tests like those that `plugins new` writes
            return any(file.startswith(TEMPLATES) for file in self._ending(f"{name}.tmpl"))
        found = [file for file in self.by_name.get(name, ()) if file.startswith(package(origin))]
        return len(found) == 1 or bool(found and origin.startswith(("tests/", "examples/")))

    def _ending(self, name):
        same = self.by_name.get(name.rpartition("/")[2], ())
        return [file for file in same if file.endswith(f"/{name}")]

    def knows(self, dotted):
        """Whether a dotted name is a module of ours, or stands in one."""
        first, *rest = dotted.split(".")
        place = (HOMES[first] / first).relative_to(ROOT).as_posix()
        for name in rest:
            if f"{place}/{name}.py" not in self.files and f"{place}/{name}" not in self.places:
                module = self.files.get(f"{place}.py") or self.files.get(f"{place}/__init__.py", "")
                return name.startswith("__") or re.search(rf"\b{name}\b", module) is not None
            place = f"{place}/{name}"
        return True


def package(origin):
    """The folder in which a bare name is looked up: one of the fourteen, or a whole folder of the
    root; for a page it is mmdeploy_llm/."""
    parts = origin.split("/")
    if not origin.endswith(CODE):
        return "mmdeploy_llm/"
    if parts[0] in ("tests", "examples"):
        return ""
    return "/".join(parts[: 2 if parts[0] == "mmdeploy_llm" else 3][: len(parts) - 1]) + "/"


def texts(origin, content):
    """Yields what people read of a file: docstrings and comments of code, all of other files."""
    if origin.endswith(".py"):
        yield from _python(origin, content)
    elif origin.endswith(CODE):
        for number, line in enumerate(content.splitlines(), 1):
            if "//" in line:
                yield Text(origin=origin, line=number, text=line.partition("//")[2])
    else:
        yield Text(origin=origin, line=1, text=content)


def _python(origin, content):
    for token in tokenize.generate_tokens(io.StringIO(content).readline):
        if token.type == tokenize.COMMENT:
            yield Text(origin=origin, line=token.start[0], text=token.string)
    for node in ast.walk(ast.parse(content)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                text = inspect.cleandoc(str(first.value.value))
                yield Text(origin=origin, line=first.lineno, text=text)


def gone(tree, text):
    """Yields the match of each name that leads nowhere."""
    for match in FILE.finditer(text.text):
        if is_file(text, match[1]) and not tree.leads_somewhere(text.origin, match[1]):
            yield match
    for match in FOLDER.finditer(text.text):
        if is_folder(tree, text, match) and not tree.has(text.origin, match[1]):
            yield match
    for match in DOTTED.finditer(text.text):
        if not match[1].endswith(CODE) and not tree.knows(match[1]):
            yield match
    for match in SHORT.finditer(text.text):
        is_ours = tree.has("mmdeploy_llm/x", match[1].partition(".")[0])
        if is_ours and not match[1].endswith(CODE) and not tree.knows(f"mmdeploy_llm.{match[1]}"):
            yield match


def is_file(text, name):
    """Whether a name with a suffix means a file of this repository."""
    if MADE_UP.search(name):
        return False
    is_ours = name.split("/")[0] in FOLDERS or "mmdeploy_llm" in name
    if is_ours or name.endswith((".md", ".toml")):
        return is_ours
    return text.is_code or "/" in name or text.origin in MAPS


def is_folder(tree, text, match):
    """Whether a name with a slash at its end means a folder of this repository: one of several
    parts by its first, any in a sentence about the code. Drawings and commands are indented."""
    first, _, rest = match[1].partition("/")
    if MADE_UP.search(match[1]) or match[1].strip("/") in tree.made:
        return False
    if rest:
        return first in FOLDERS or tree.has("mmdeploy_llm/x", first)
    if text.origin in MAPS:
        return match[0] in re.findall(r"(?<=`)[^`]+(?=`)", text.line_of(match))
    is_sentence = not text.line_of(match).startswith("    ")
    return text.is_code and is_sentence and text.origin.startswith(FOLDERS[:3])


def problems(tree):
    """Says where each name stands that leads nowhere."""
    found = []
    for origin, content in tree.files.items():
        whole = Text(origin=origin, line=1, text=re.sub(r"(?m)^ +", "", content))
        if origin in HISTORY or not origin.endswith(READ) or not any(gone(tree, whole)):
            continue  # which is quick; only then is the file taken apart
        for text in texts(origin, content):
            for match in gone(tree, text):
                line = text.line + text.text.count("\n", 0, match.start())
                found.append(f"{origin}:{line}: {match[1]}")
    return found


def test_no_sentence_names_a_place_that_is_gone():
    assert problems(Tree.here()) == []


def test_the_note_on_what_moved_names_the_new_places():
    """Its first column alone names what is gone. A name that begins with a dot is one of ours."""
    tree = Tree.here()
    rows = re.search(r"before \| now \|\n(.*?)\n\n", tree.files["CHANGELOG.md"], re.DOTALL)[1]
    cells = [row.split("|")[2] for row in rows.splitlines()]
    names = re.findall(r"`(?:python -m )?(?:mmdeploy_llm)?(\.[a-z_.]+)`", "".join(cells))
    assert len(names) > 20
    assert [name for name in names if not tree.knows(f"mmdeploy_llm{name}")] == []


SMALL = {
    ".gitignore": "/site/\n__pycache__/\n",
    "mmdeploy_llm/README.md": "",
    "mmdeploy_llm/engine/__init__.py": "",
    "mmdeploy_llm/engine/engine.py": "class Engine: ...\n",
    "mmdeploy_llm/engine/schedule/blocks.py": "",
    "mmdeploy_llm/kernels/cpp/products/dot.h": "",
    "mmdeploy_llm/kernels/cpu/build.py": "",
    "mmdeploy_llm/kernels/one/rows.py": "",
    "mmdeploy_llm/kernels/two/rows.py": "",
    TEMPLATES + "model/tests/test_model.py.tmpl": "",
    "plugins/mmdeploy_llm_plugins/qwen/text.py": "",
    "tests/engine/test_engine.py": "",
    "docs/media.md": "",
}


def found(origin, content):
    """Finds what leads nowhere in a file of a small repository."""
    return [problem.rpartition(" ")[2] for problem in problems(Tree({**SMALL, origin: content}))]


@pytest.mark.parametrize(
    ("origin", "text", "name"),
    [
        ("README.md", "See [it](src/mmdeploy_llm/README.md).", "src/mmdeploy_llm/README.md"),
        ("README.md", "`schedule/blocks.py` holds them.", "schedule/blocks.py"),
        ("docs/media.md", "```bash\npytest tests/test_engine.py\n```", "tests/test_engine.py"),
        ("docs/media.md", "It is in `mmdeploy_llm/schedule/`.", "mmdeploy_llm/schedule/"),
        ("docs/media.md", "It is in `engine/rooms/`.", "engine/rooms/"),
        ("docs/media.md", "Import `mmdeploy_llm.schedule`.", "mmdeploy_llm.schedule"),
        ("docs/media.md", "`engine.engine.Motor` steps.", "engine.engine.Motor"),
        ("docs/media.md", "`mmdeploy_llm.engine.engine.Motor`", "mmdeploy_llm.engine.engine.Motor"),
        ("mmdeploy_llm/README.md", "| `plan.py` | plans |", "plan.py"),
        ("mmdeploy_llm/README.md", "| `schedule/` | plans |", "schedule/"),
        ("mmdeploy_llm/engine/plan.py", '"""Plans, see steps.py."""', "steps.py"),
        ("mmdeploy_llm/engine/plan.py", "LIMIT = 3  # as in dot.h", "dot.h"),
        ("mmdeploy_llm/engine/plan.py", "def f():\n    # as in rooms/\n    return", "rooms/"),
        ("mmdeploy_llm/kernels/cpu/a.h", "// see cpp_products/dot.h", "cpp_products/dot.h"),
        ("mmdeploy_llm/kernels/base.py", "# see rows.py", "rows.py"),  # which of the two?
        ("pyproject.toml", 'test = "mmdeploy_llm.gone:Test"', "mmdeploy_llm.gone"),
        ("pyproject.toml", "python {project}/tests/gone.py", "tests/gone.py"),
        (TEMPLATES + "a.py.tmpl", "from mmdeploy_llm.plan import Plan", "mmdeploy_llm.plan"),
    ],
)
def test_a_place_that_is_gone_is_found(origin, text, name):
    assert found(origin, text) == [name]


@pytest.mark.parametrize(
    ("origin", "text"),
    [
        (
            "README.md",
            "`mmdeploy_llm/engine/engine.py` and `engine/schedule/`; [map](mmdeploy_llm/README.md)",
        ),
        ("docs/media.md", "[map](../mmdeploy_llm/README.md), `mmdeploy_llm_plugins.qwen.text`"),
        ("docs/media.md", "`mmdeploy-llm caption photos/ -o captions.jsonl --plugin my_plugin.py`"),
        (
            "docs/media.md",
            "Write `src/acme_llm/parser.py` and `tests/test_model.py`, see llama.cpp.",
        ),
        (
            "docs/media.md",
            "`job.toml`, `shop.py`, `https://example.com/docs/gone.md`, `llm.engine`",
        ),
        ("mmdeploy_llm/README.md", "`engine.py` steps; `make docs` writes `site/`."),
        ("mmdeploy_llm/engine/plan.py", '"""See blocks.py, engine/schedule/ and Engine."""'),
        ("mmdeploy_llm/engine/plan.py", '"""Ids.\n\n    photos/a.png   the picture\n"""'),
        ("mmdeploy_llm/engine/plan.py", 'NAME = "tests/gone.py"  # a string, not a sentence'),
        ("mmdeploy_llm/kernels/cpu/a.py", "ROWS = 3  # as in dot.h"),
        ("CHANGELOG.md", "`mmdeploy_llm/gone.py` is gone."),
    ],
)
def test_other_names_are_left_alone(origin, text):
    assert found(origin, text) == []
