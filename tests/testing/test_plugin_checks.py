"""Each broken plugin fails its check, whose message says what to do."""

import sys
from itertools import takewhile
from textwrap import dedent

import pytest

from mmdeploy_llm.errors import PluginLoadError
from mmdeploy_llm.hooks.registry import PluginRegistry
from mmdeploy_llm.hooks.validation import PROVIDED
from mmdeploy_llm.testing import check_plugin
from mmdeploy_llm.testing.plugins.arguments import example_arguments
from mmdeploy_llm.testing.plugins.plugin_subject import PluginSubject
from mmdeploy_llm.testing.plugins.plugins import CHECKS

NAMES = [check.__name__ for check in CHECKS]
IMPORTS = """
from mmdeploy_llm.hooks import (
    MediaProcessorSpec, ModelSpec, ReasoningParserSpec, hookimpl,
)
"""
PARSER = """
@hookimpl
def provide_reasoning_parsers():
    return [ReasoningParserSpec(name={name!r}, factory={factory!r})]
"""
FAKE = "mmdeploy_llm.testing.fakes:FakeReasoningParser"
GOOD = PARSER.format(name="kit-made-up", factory=FAKE)

BROKEN = [
    # source, failing checks, regex for the message of the first
    (
        "import no_such_module",
        {"imports_in_a_fresh_process", "*"},
        "ModuleNotFoundError: No module named 'no_such_module'; a plugin must be importable",
    ),
    ("raise SystemExit(3)", {"imports_in_a_fresh_process", "*"}, "exit status 3; a plugin must"),
    (
        GOOD.replace("    return", "    raise RuntimeError('no licence')\n    return"),
        {"imports_in_a_fresh_process", "*"},
        "RuntimeError: no licence",
    ),
    (
        GOOD.replace("    return", "    import torch\n    return"),
        {"lists_without_torch"},
        "listing imports torch .at .*:8.; move the code that needs it into another module",
    ),
    (
        f"import time; time.sleep(0.4)\n{GOOD}",
        {"imports_quickly"},
        r"took \d+.\d s, 0.3 s are allowed, most of it for kit_module_.* .\d+.\d s.; do nothing",
    ),
    (
        GOOD.replace("provide_reasoning_parsers", "provide_parsers"),
        {"hooks_are_valid", "*"},
        "there is no hook 'provide_parsers'.*page on plugins",
    ),
    (
        GOOD.replace("factory=", "model="),
        {"imports_in_a_fresh_process", "*"},
        "unexpected keyword argument 'model'",
    ),
    (
        GOOD.replace("name='kit-made-up'", "name=''"),
        {"hooks_are_valid", "*"},
        "name must be a text that is not empty",
    ),
    (
        "import itertools\nnumbers = itertools.count()\n"
        + GOOD.replace("name='kit-made-up'", "name=f'kit-{next(numbers)}'"),
        {"provides_the_same_twice"},
        "returned reasoning parser kit-0, then reasoning parser kit-1; return the same specs",
    ),
    (
        PARSER.format(name="kit-made-up", factory="mmdeploy_llm.testing.fakes:NoSuchParser"),
        {"factories_can_be_imported"},
        "NoSuchParser.*cannot be imported.*; correct the spec's `factory`",
    ),
    (
        f"MMDEPLOY_LLM_API = (99, 0)\n{GOOD}",
        {"fits_the_installed_version"},
        "was written for version 99.0 of the plugin API",
    ),
    (
        "@hookimpl\ndef on_step(stats):\n    print(stats.no_such_count)",
        {"hooks_take_what_is_documented"},
        "on_step.stats. raised AttributeError: .*; let the hook accept any valid argument",
    ),
    (
        "@hookimpl\ndef fetch_media(ref, limits):\n    return ref.uri",
        {"hooks_take_what_is_documented"},
        "fetch_media returns a str; return bytes, or None to pass",
    ),
    (
        "@hookimpl\ndef on_engine_stop(info):\n    return info",
        {"hooks_take_what_is_documented"},
        "on_engine_stop returns a EngineInfo; return nothing",
    ),
    (
        "@hookimpl\ndef extend_cli(app):\n    app.add_command('hello')",
        {"hooks_take_what_is_documented"},
        "extend_cli.app. raised AttributeError",
    ),
]


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Returns a function that writes a module which any process can import."""
    names = []

    def write(source):
        names.append(f"kit_module_{len(names)}_{tmp_path.name}".replace("-", "_"))
        (tmp_path / f"{names[-1]}.py").write_text(IMPORTS + dedent(source))
        return names[-1]

    monkeypatch.syspath_prepend(str(tmp_path))
    yield write
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("source", "checks", "message"),
    [*BROKEN[:2], *(pytest.param(*broken, marks=pytest.mark.full) for broken in BROKEN[2:])],
)
def test_a_broken_plugin_fails(module, failures, demand_failures, source, checks, message):
    bound = 0.3 if "sleep" in source else 30.0
    found = failures(CHECKS, PluginSubject.of(module(source), max_import_seconds=bound))
    demand_failures(found, CHECKS, checks, message)


def test_a_good_plugin_passes(module, failures):
    source = GOOD + "\n@hookimpl\ndef fetch_media(ref):\n    return None\n"
    assert failures(CHECKS, PluginSubject.of(module(source), max_import_seconds=30.0)) == {}


def test_every_check_has_a_broken_plugin():
    covered = {next(name for name in NAMES if name in checks) for _, checks, _ in BROKEN}
    assert covered | {"names_are_unique", "the_name_is_its_own"} == set(NAMES)


@pytest.fixture
def install(tmp_path, monkeypatch, load_file):
    """install(name, source, package=...): a package, found beside the installed ones."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    site = load_file("hooks/conftest.py").Site(folder)
    yield site.install
    for name in site.modules:
        sys.modules.pop(name, None)


def verdicts(name, *checks):
    """Returns outcome and message of checks of an installed plugin as a whole, which come first."""
    of_the_whole = takewhile(lambda verdict: not verdict.subject, check_plugin(name))
    found = {verdict.check: verdict for verdict in of_the_whole}
    return [(found[check].outcome, found[check].message) for check in checks]


def test_what_is_always_loaded_is_none_of_the_plugin(install):
    """Backends of the core were told as served by the plugin, and its hooks looked for there."""
    install("zeta", f"{GOOD}\n@hookimpl\ndef on_engine_stop(info): pass")
    subject = PluginSubject.of("zeta")
    assert [spec.name for spec in subject.specs] == ["kit-made-up"]
    assert subject.has_hook("on_engine_stop")


def test_what_two_packages_claim_is_told(install):
    install("one", GOOD, package="one-llm")
    install("two", GOOD, package="two-llm")
    ((outcome, message),) = verdicts("one", "names_are_unique")
    assert outcome == "fail"
    assert "claims reasoning parser kit-made-up at priority 0, as the installed plugin 'two'" in (
        message
    )


@pytest.mark.full  # a fresh process imports each
def test_what_is_built_in_too_is_no_fault(install):
    """The kit says who serves, to the author of either."""
    install("acme", PARSER.format(name="Qwen3", factory=FAKE))
    told = "reasoning parser qwen3 is served by 'acme', not by 'reasoning'"
    for name in ("acme", "reasoning"):
        ((outcome, message),) = verdicts(name, "names_are_unique")
        assert outcome == "pass"
        assert told in message
        assert "(--use)" in message


@pytest.mark.full  # a fresh process imports each
def test_which_of_two_packages_is_checked(install):
    """The one that serves the name; what it hides is told."""
    install("same", GOOD, package="b-package")
    install("same", GOOD, package="a-package")
    ((outcome, message),) = verdicts("same", "the_name_is_its_own")
    assert outcome == "fail"
    assert "plugin 'same' (a-package 1.0) is checked; the one of b-package has the same" in message
    install("reasoning", GOOD, package="acme-llm")
    ((outcome, message),) = verdicts("reasoning", "the_name_is_its_own")
    assert outcome == "pass"
    assert "(acme-llm 1.0) is checked; mmdeploy-llm:reasoning names the other" in message


def test_a_module_that_no_other_process_has(failures):
    """A module that exists only in this process skips the checks that need a fresh process."""
    code = compile(IMPORTS + GOOD, "made up", "exec")
    made = type(sys)("kit_in_memory")
    exec(code, vars(made))
    assert failures(CHECKS, PluginSubject.of(made)) == {}


def test_every_hook_is_checked():
    """A new hook needs an example of its arguments."""
    assert set(example_arguments()) | set(PROVIDED) == set(PluginRegistry().hooks)


def test_check_plugin_names_the_installed_ones():
    with pytest.raises(PluginLoadError, match=r"'reasonin'; did you mean 'reasoning'.*installed: "):
        check_plugin("reasonin")
