"""The tests that CI leaves out: those whose code has not changed, and it says so."""

from types import SimpleNamespace

import pytest

from tests.changed import GROUPS, base_commit, changed_files, chosen, imported

RAY, LANCE, CENSUS = "client/ray/test_blocks.py", "data/rows/test_tables.py", "test_census.py"
TEXTS = {
    "mmdeploy_llm/client/ray/blocks.py": "from .rows import row\nfrom ...values import params\n",
    "mmdeploy_llm/client/ray/rows.py": "import mmdeploy_llm.errors\n",
    "mmdeploy_llm/values/params.py": "from mmdeploy_llm.hooks import specs\n",
    "mmdeploy_llm/hooks/specs.py": "",
    "mmdeploy_llm/errors.py": "",
    "plugins/mmdeploy_llm_plugins/transformers_any/__init__.py": "from . import model\n",
    "plugins/mmdeploy_llm_plugins/transformers_any/model.py": "",
}
ITEMS = [
    SimpleNamespace(nodeid=f"tests/{name}", keywords={})
    for name in (
        f"{RAY}::test_rows",
        f"{LANCE}::test_kinds[lance]",
        f"{LANCE}::test_kinds[parquet]",
        f"{LANCE}::test_balance",
        f"plugins/transformers_any/{CENSUS}::test_all",
        "kernels/cuda/test_rows.py::test_rows",
    )
]


def left_out(*files):
    kept, told = chosen(ITEMS, set(files), TEXTS)
    assert len(kept) + sum(told.values()) == len(ITEMS)
    return set(told)


def test_all_groups_are_left_out_where_nothing_of_them_differs():
    every = {"Ray", "Lance", "census", "emulated CUDA"}
    assert left_out() == left_out("docs/usage.md", "mmdeploy_llm/engine/engine.py") == every
    kept, told = chosen(ITEMS, set(), TEXTS)
    assert [item.nodeid.partition("::")[2] for item in kept] == [
        "test_kinds[parquet]",
        "test_balance",
    ]
    assert told["Lance"] == 1


@pytest.mark.parametrize(
    "file",
    [
        "tests/client/ray/test_blocks.py",
        "tests/client/ray/conftest.py",
        "mmdeploy_llm/client/ray/new.py",
        "mmdeploy_llm/client/ray/rows.py",
        "mmdeploy_llm/values/params.py",
        "mmdeploy_llm/errors.py",
    ],
)
def test_a_group_runs_when_its_tests_its_code_or_what_that_imports_differ(file):
    assert left_out(file) == {"Lance", "census", "emulated CUDA"}


def test_what_is_imported_further_on_is_not_watched():
    assert "Ray" in left_out("mmdeploy_llm/hooks/specs.py")
    assert imported(["plugins/mmdeploy_llm_plugins/transformers_any/__init__.py"], TEXTS) == {
        "plugins/mmdeploy_llm_plugins/transformers_any/__init__.py",
        "plugins/mmdeploy_llm_plugins/transformers_any/model.py",
    }


@pytest.mark.parametrize(
    "file",
    ["pyproject.toml", ".ci/run", "tests/conftest.py", "tests/warm.py", "tests/data/conftest.py"],
)
def test_all_run_when_shared_code_differs(file):
    assert left_out(file) == set()


def test_all_run_without_a_base():
    assert chosen(ITEMS, None, TEXTS) == (ITEMS, {})
    assert changed_files(None) is None


@pytest.mark.parametrize(
    ("answers", "environment", "base"),
    [
        ({("merge-base", "HEAD", "origin/HEAD"): "a", ("rev-parse", "HEAD"): "b"}, {}, "a"),
        ({("merge-base", "HEAD", "origin/HEAD"): "b", ("rev-parse", "HEAD"): "b"}, {}, None),
        ({("rev-parse", "HEAD"): "b"}, {}, None),  # no remote
        ({("merge-base", "HEAD", "v1"): "c", ("rev-parse", "HEAD"): "b"}, {"BASE": "v1"}, "c"),
        ({("rev-parse", "HEAD"): "b"}, {"BASE": "unknown"}, None),
    ],
)
def test_the_base_is_given_or_where_the_branch_began(answers, environment, base):
    assert base_commit(environment, lambda *words: answers.get(words)) == base


def test_new_files_differ_and_failures_of_git_are_no_empty_set():
    answers = {
        ("diff", "--name-only", "--no-renames", "a"): "x.py\ny.py",
        ("ls-files", "--others", "--exclude-standard"): "z.py",
    }
    assert changed_files("a", lambda *words: answers.get(words)) == {"x.py", "y.py", "z.py"}
    assert changed_files("b", lambda *words: answers.get(words)) is None


def test_groups_name_code_that_is_there():
    from tests.tree import ROOT

    assert all((ROOT / path).is_dir() for group in GROUPS for path in group.code)
