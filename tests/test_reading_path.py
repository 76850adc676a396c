"""The code that one request runs on the reference backend can be read in an evening: its lines are
counted."""

import ast
import re
import sys
import threading
from pathlib import Path

import pytest

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.testing.tiny import write_tiny
from tests.tree import HOMES, ROOT

MAP = ROOT / "mmdeploy_llm/README.md"
OURS = [home / package for package, home in HOMES.items()]
MAX_LINES = 2750  # of the files that are read in order, without their imports
MAX_RUN_LINES = 3560  # of the functions that one request runs, in all threads; more where they wait
OPTIONS = {
    "attention_backend": "reference",
    "native_kernels": False,
    "use_warmup": False,
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def run_lines(tmp_path_factory):
    """File -> first lines of the functions that one text request runs, in all threads."""
    folder = tmp_path_factory.mktemp("model")
    write_tiny("llama", folder)
    found: dict[Path, set[int]] = {}

    def note(frame, event, arg):
        path, code = Path(frame.f_code.co_filename), frame.f_code
        if code.co_name == "__getattr__":  # of a module: names that no test has imported before
            return
        if event == "call" and any(map(path.is_relative_to, OURS)):
            found.setdefault(path, set()).add(code.co_firstlineno)

    with LLM(str(folder), **OPTIONS) as llm:
        before = sys.getprofile()
        threading.setprofile(note)
        sys.setprofile(note)
        llm._desk._post(lambda: sys.setprofile(note))
        try:
            (output,) = llm.generate("the cat", SamplingParams(max_tokens=5), use_tqdm=False)
        finally:
            sys.setprofile(before)
            threading.setprofile(None)
            llm._desk._post(lambda: sys.setprofile(None))
    assert output.is_ok
    return found


def lines_of_functions(path, first_lines):
    """The lines of the functions that begin there, decorators and docstrings included."""
    lines = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            begin = min([node.lineno, *(item.lineno for item in node.decorator_list)])
            if begin in first_lines or node.lineno in first_lines:
                lines |= set(range(begin, node.end_lineno + 1))
    return len(lines)


def reading_order():
    text = MAP.read_text(encoding="utf-8")
    listed = re.search(r"path of a request: begin -->\n```text\n(.*?)```", text, re.DOTALL)
    return [ROOT / line.split()[0] for line in listed[1].splitlines()]


def num_lines_to_read(path):
    """The lines of a file without the imports at its top."""
    text = path.read_text(encoding="utf-8")
    imports = [
        node.end_lineno - node.lineno + 1
        for node in ast.parse(text).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]
    return text.count("\n") - sum(imports)


def test_what_one_request_runs_is_short(run_lines):
    num_lines = {path.name: lines_of_functions(path, run_lines[path]) for path in run_lines}
    assert sum(num_lines.values()) <= MAX_RUN_LINES, num_lines


def test_the_reading_order_is_short_and_is_what_runs(run_lines):
    files = reading_order()
    assert len(files) > 8
    assert [path for path in files if path not in run_lines] == []
    assert sum(num_lines_to_read(path) for path in files) <= MAX_LINES
