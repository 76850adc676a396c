"""The README and the guide do what they say: their code blocks run in order, in a folder with
`examples/`, photos and prompts, and the site is built. A block that cannot run here says why in a
comment before it: <!-- not run: ... -->. The TUTORIALS for plugins have tests/packages and
tests/hooks; Chinese pages have the same blocks (tests/test_chinese.py)."""

import contextlib
import importlib.util
import io
import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mmdeploy_llm.cli import app

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
TUTORIALS = {
    "plugin_objects.md",
    "write_a_model.md",
    "write_a_parser.md",
    "write_a_vision_model.md",
}
GUIDE = [page for page in PAGES if not page.name.endswith(".zh.md")]
DOCUMENTS = [ROOT / "README.md", *(page for page in GUIDE if page.name not in TUTORIALS)]
NOTEBOOK = ROOT / "docs" / "caption_demo_images.ipynb"
BLOCK = re.compile(r"(?:^<!-- not run: ([^\n]+) -->\n)?^```(python|bash)\n(.*?)^```$", re.M | re.S)
PHOTOS = {"a.png": "picture-1.png", "b.png": "picture-5.png", "c.jpg": "picture-6.jpg"}


def blocks(document):
    """Returns (language, code) of each block that is run."""
    found = BLOCK.findall(document.read_text(encoding="utf-8"))
    return [(language, code) for reason, language, code in found if not reason]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Makes a reader's folder: examples/ as in a clone, photos, prompts."""
    images = ROOT / "examples" / "images"
    (tmp_path / "examples").symlink_to(images.parent)
    (tmp_path / "photos").mkdir()
    for name, source in PHOTOS.items():
        shutil.copy(images / source, tmp_path / "photos" / name)
    content = [{"type": "image", "image": "photos/a.png"}, {"type": "text", "text": "What?"}]
    rows = [{"id": "a", "messages": [{"role": "user", "content": content}]}]
    rows.append({**rows[0], "id": "b"})
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_shell(code):
    """Runs lines of the program in this process, and writes files that `cat` writes."""
    lines = iter(code.replace("\\\n", " ").splitlines())
    for line in lines:
        if written := re.fullmatch(r"cat > ([\w.]+) <<'(\w+)'", line):
            content = itertools.takewhile(lambda own: own != written[2], lines)
            Path(written[1]).write_text("\n".join(content) + "\n")
            continue
        program, *arguments = shlex.split(line, comments=True)
        assert program == "mmdeploy-llm", f"not run by this test: {line}"
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, f"{line}\n{done.output}"


def write_parquet(folder):
    """Writes the rows of prompts.jsonl as columns."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    rows = map(json.loads, (folder / "prompts.jsonl").read_text().splitlines())
    columns = [{**row, "messages": json.dumps(row["messages"])} for row in rows]
    parquet.write_table(sys.modules["pyarrow"].Table.from_pylist(columns), "prompts.parquet")


@pytest.mark.full
@pytest.mark.parametrize(
    "document",
    [
        pytest.param(each, marks=[pytest.mark.full] * (each.stem != "README"))
        for each in DOCUMENTS
        if blocks(each)
    ],
    ids=lambda path: path.stem,
)
def test_code_blocks_run(document, folder):
    if "prompts.parquet" in document.read_text():
        write_parquet(folder)
    for language, code in blocks(document):
        if language == "bash":
            run_shell(code)
        else:
            exec(compile(code, str(document), "exec"), {"__name__": "__main__"})


@pytest.mark.full
def test_the_notebook_prints_what_it_shows(folder):
    names = {"__name__": "__main__"}
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if cell["cell_type"] == "code":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile("".join(cell["source"]), NOTEBOOK.name, "exec"), names)
            shown = "".join("".join(output["text"]) for output in cell["outputs"])
            assert num_words(printed.getvalue()) == num_words(shown)
    assert "truncated-on-purpose.jpg" in names["captions"]
    assert names["captions"]["picture-6.jpg"] == "A small pink diamond."


def num_words(text):
    """Counts the words of each line: another processor may lead to another colour, but not to
    another form."""
    return [len(line.split()) for line in text.splitlines()]


@pytest.fixture
def site(tmp_path):
    """The site that `make docs` has built of these very files, or a new one."""
    built = ROOT / "site"
    sources = [
        path
        for name in ("docs", "examples", "mmdeploy_llm", "plugins", "processors")
        for path in (ROOT / name).rglob("*")
    ]
    sources += [*ROOT.glob("*.md"), ROOT / "mkdocs.yml", ROOT / "pyproject.toml"]
    files = [path for path in sources if path.is_file() and path.suffix != ".pyc"]
    index = built / "index.html"
    if index.exists() and index.stat().st_mtime > max(path.stat().st_mtime for path in files):
        return built
    for name in ("mkdocs", "material", "mkdocstrings"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed; run: pip install -e '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir"]
    done = subprocess.run(
        [*command, tmp_path / "site"], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return tmp_path / "site"


@pytest.mark.full
def test_the_guide_loads_nothing_from_the_network(site):
    assert (site / "options.html").is_file()
    chinese = (site / "zh/quickstart.html").read_text()
    assert '<html lang="zh"' in chinese
    for link in ("../quickstart.html", "quickstart.html"):
        assert f'<a href="{link}" hreflang=' in chinese, "no switch of languages"
    assert 'class="english" href="../examples.html"' in chinese
    assert '<html lang="en"' in (site / "options.html").read_text()
    loaded = re.compile(r'(?:src=|<link [^>]*href=)"?(https?:)?//')
    for page in site.rglob("*.html"):
        assert not loaded.search(page.read_text()), page
