"""The tutorials for plugins, step by step in a fresh environment, as a reader does them."""

import ast
import re
import shutil
from pathlib import Path

import pytest

from mmdeploy_llm.testing.scaffold.package import package_names, render

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {  # with the section after the tutorial
    "Write a parser": (DOCS / "write_a_parser.md", "Write a logits processor"),
    "Write a logits processor": (DOCS / "write_a_parser.md", None),
    "Write a model": (DOCS / "write_a_model.md", "Read GGUF files of your family"),
    "Write a model that reads images": (DOCS / "write_a_vision_model.md", None),
}
PROCESSORS = ROOT / "processors/mmdeploy_llm_processors" / "README.md"
BLOCK = re.compile(r"(.*?)^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"`((?:src|tests)/[\w/]+\.py)`")


def section(page, title, after=""):
    """Returns a section, up to the next one or the one called `after`; None: to the end."""
    text = page.read_text()
    start = text.index(f"# {title}\n")
    return text[start:] if after is None else text[start : text.index(f"\n## {after}", start)]


def tutorial(title):
    page, after = PAGES[title]
    return section(page, title, after)


def steps(text):
    """Returns (text before the block, language, code) of each block."""
    return [match.groups() for match in BLOCK.finditer(text)]


class Reader:
    """Follows a tutorial: runs its shell blocks, writes its files, runs its programs."""

    def __init__(self, environment, replaced=()):
        self._environment = environment
        self._replaced = dict(replaced)
        self.folder = environment.folder / "work"
        self.folder.mkdir()
        self.printed = []

    def read(self, text):
        for words, language, code in steps(text):
            for written, real in self._replaced.items():
                code = code.replace(written, real)
            if language == "bash":
                self._shell(code)
            elif language == "python":
                self._python(words, code)

    def _shell(self, code):
        done = self._environment.run(f"{code}\npwd > {self._environment.folder}/place", self.folder)
        self.folder = Path((self._environment.folder / "place").read_text().strip())
        self.printed.append(done.stdout)

    def _python(self, words, code):
        files = FILE.findall(words)
        if files:
            path = self.folder / files[-1]
            before = f"{path.read_text()}\n\n" if "at the end of" in words else ""
            path.write_text(before + code)
            return
        (self.folder / "use.py").write_text(code)
        self.printed.append(self._environment.run("python use.py", self.folder).stdout)


@pytest.fixture
def new_reader(new_environment):
    return lambda **replaced: Reader(new_environment(), **replaced)


@pytest.mark.parametrize(
    ("title", "kind", "name"),
    [
        ("Write a parser", "reasoning-parser", "acme"),
        ("Write a logits processor", "logits-processor", "acme-calm"),
        ("Write a model", "model", "acme-seed"),
        ("Write a model that reads images", "vision-model", "acme-eyes"),
    ],
)
def test_what_is_shown_is_what_is_written(title, kind, name):
    written = render(kind, package_names(name))
    for words, language, code in steps(tutorial(title)):
        files = FILE.findall(words)
        if language == "python" and files and "Replace" not in words:
            assert code == written[files[-1]], files[-1]
        if language == "toml":
            assert code in written["pyproject.toml"]


@pytest.mark.long
def test_the_parser(new_reader):
    reader = new_reader()
    reader.read(tutorial("Write a parser"))
    assert " passed" in reader.printed[0]
    assert " passed" in reader.printed[1]
    assert " 0 failed" in reader.printed[1]
    answer = [line.partition("  # ")[2] for line in tutorial("Write a parser").splitlines()]
    assert reader.printed[2].splitlines() == [line for line in answer if line.endswith(".")]


@pytest.mark.long
def test_the_logits_processor(new_reader):
    reader = new_reader()
    reader.read(tutorial("Write a logits processor"))
    assert " passed" in reader.printed[0]
    assert reader.printed[1].splitlines() == ["False"]


@pytest.mark.long
def test_the_processor(new_reader, load_file, tmp_path):
    file = ROOT / "examples" / "plugin_minimal" / "tests" / "tiny.py"
    copy = tmp_path / "REPOSITORY"
    (copy / "examples").mkdir(parents=True)
    replaced = {
        "REPOSITORY/examples/plugin_minimal": str(copy / "examples" / "plugin_minimal"),
        "checkpoints/llava-1.5-7b-hf": str(load_file(file).write_tiny_llava(tmp_path / "llava")),
    }
    shutil.copytree(file.parents[1], copy / "examples" / "plugin_minimal")
    reader = new_reader(replaced=replaced)
    reader.read(section(PROCESSORS, "Write a processor"))
    assert " passed" in reader.printed[0]
    assert " passed" in reader.printed[2]
    assert " 0 failed" in reader.printed[2]
    assert len(reader.printed) == 4  # the last one is an answer, of random weights


@pytest.mark.long
def test_the_model(new_reader):
    reader = new_reader()
    reader.read(tutorial("Write a model"))
    assert " passed" in reader.printed[0]
    assert len(ast.literal_eval(reader.printed[1])) == 8


@pytest.mark.long
def test_the_model_that_reads_images(new_reader):
    reader = new_reader()
    reader.read(tutorial("Write a model that reads images"))
    assert " passed" in reader.printed[0]
    assert reader.printed[1].splitlines()[-1] == "16 True"
