"""check_plugin on installed packages: all verdicts, without input from an author."""

import itertools
import sys

import pytest

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.testing import Verdict, check_plugin, write_tiny

FAKES = "mmdeploy_llm.testing.fakes"
ALL_KINDS = f"""
@hookimpl
def provide_models():
    return [
        ModelSpec(name="acme", architectures=("Qwen2ForCausalLM",), priority=5,
                  factory="{{model}}"),
        ModelSpec(name="new", architectures=("AcmeForCausalLM",), factory="{FAKES}:FakeModel"),
    ]

@hookimpl
def provide_reasoning_parsers():
    return [ReasoningParserSpec(name="acme", factory="{{parser}}")]

@hookimpl
def provide_media_processors():
    return [
        MediaProcessorSpec(name="acme", kind="image", models=("acme",), factory="{{processor}}"),
        MediaProcessorSpec(name="picky", kind="image", models=("other",),
                           factory=__name__ + ":Picky"),
    ]

class Picky:
    def __init__(self, checkpoint, options):
        raise ValueError("no preprocessor_config.json")
"""
GOOD = {
    "model": "mmdeploy_llm_plugins.qwen.text:Qwen2ForCausalLM",
    "parser": f"{FAKES}:FakeReasoningParser",
    "processor": f"{FAKES}:FakeMediaProcessor",
}
BAD_PARSER = """
class Parser(ReasoningParser):
    def feed(self, text):
        return []
    def finish(self):
        return []
"""


@pytest.fixture
def install(tmp_path, monkeypatch, load_file):
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    site = load_file("hooks/conftest.py").Site(folder)
    yield site.install
    for module in site.modules:
        sys.modules.pop(module, None)


def outcomes(verdicts):
    """Returns (subject, check) -> (outcome, message)."""
    verdicts = list(verdicts)
    assert all(isinstance(verdict, Verdict) and verdict.seconds >= 0 for verdict in verdicts)
    return {(v.subject, v.check): (v.outcome, v.message) for v in verdicts}


def test_a_plugin_of_all_kinds(install):
    install("acme", ALL_KINDS.format(**GOOD))
    found = outcomes(check_plugin("Acme"))
    assert [key for key, (outcome, _) in found.items() if outcome == "fail"] == []
    subjects = {subject for subject, _ in found}
    assert subjects == {
        "",
        "reasoning parser acme",
        "image processor acme",
        "image processor picky",
        "model acme",
        "model new",
        "model acme (Qwen2ForCausalLM)",
        "model new (AcmeForCausalLM)",
    }
    for name in ("acme", "new"):
        assert found[f"model {name}", "tiny_equals_the_reference"] == (
            "skip",
            "no logits were compared: the spec has no `tiny`; give it one, or a model folder",
        )
    assert found["", "lists_without_torch"] == ("pass", "")
    assert found["reasoning parser acme", "any_split_equals_the_whole"][0] == "pass"
    assert found["image processor acme", "corrupt_bytes_are_media_errors"][0] == "pass"
    assert found["image processor acme", "samples_are_processed"] == (
        "skip",
        "no samples were given; add some to `samples`",
    )
    outcome, message = found["image processor picky", "builds"]
    assert (outcome, "give a model folder" in message) == ("skip", True)
    assert found["model acme (Qwen2ForCausalLM)", "builds_on_meta"][0] == "pass"
    assert (
        "has no config for AcmeForCausalLM"
        in found["model new (AcmeForCausalLM)", "builds_on_meta"][1]
    )


@pytest.mark.full  # seconds: transformers' model
def test_logits_of_a_tiny_checkpoint_are_compared(install):
    source = """
@hookimpl
def provide_models():
    return [ModelSpec(name="acme", architectures=("AcmeForCausalLM",), factory="{factory}",
                      tiny="mmdeploy_llm_plugins.qwen.tiny:{tiny}")]
"""
    found = {}
    for name, family in (("good", "Qwen2"), ("bad", "Qwen3")):
        factory = "mmdeploy_llm_plugins.qwen.text:Qwen2ForCausalLM"
        install(name, source.format(factory=factory, tiny=family.upper()))
        found[name] = outcomes(check_plugin(name))["model acme", "tiny_equals_the_reference"]
    assert found["good"] == ("pass", "")
    assert found["bad"][0] == "fail"
    assert found["bad"][1].startswith("since API 1.2; your package declares no version")


@pytest.mark.full
def test_a_model_folder(install, tmp_path):
    """The model that serves the folder gets all checks; other models are skipped."""
    install("acme", ALL_KINDS.format(**GOOD))
    found = outcomes(check_plugin("acme", model_folder=write_tiny("qwen2", tmp_path / "model")))
    of_model = {
        check: outcome
        for (subject, check), (outcome, _) in found.items()
        if subject == "model acme"
    }
    assert {check for check, outcome in of_model.items() if outcome == "fail"} == set()
    for check in ("logits_equal_the_reference", "paged_equals_dense", "loads_the_checkpoint"):
        assert of_model[check] == "pass"
    assert found["model new", "builds_on_meta"] == ("skip", "the folder is of another architecture")
    assert found["image processor picky", "builds"] == (
        "skip",
        "the processor is for other models than the folder's",
    )
    with pytest.raises(CheckpointError):
        check_plugin("acme", model_folder=tmp_path / "site")


@pytest.mark.full
def test_verdicts_of_a_broken_plugin(install):
    """A failed check stops neither the other checks of its subject nor those of other subjects."""
    bad = {
        "parser": "site_acme_llm:Parser",
        "model": "no_such_module:Model",
        "processor": "json:load",
    }
    install("acme", BAD_PARSER + ALL_KINDS.format(**bad))
    found = outcomes(check_plugin("acme"))
    assert found["reasoning parser acme", "plain_text_is_kept"][0] == "fail"
    assert found["reasoning parser acme", "no_state_is_shared"][0] == "pass"
    outcome, message = found["", "factories_can_be_imported"]
    assert (outcome, "no_such_module" in message) == ("fail", True)
    assert found["model acme (Qwen2ForCausalLM)", "builds_on_meta"][0] == "fail"


@pytest.mark.full
@pytest.mark.parametrize(
    ("source", "failing", "message"),
    [
        ("raise SystemExit(4)", 2, "importing 'site_acme_llm' raised SystemExit: 4"),
        ("@hookimpl\ndef provide_model():\n    return []", 1, "no hook 'provide_model'"),
        ("@hookimpl\ndef provide_models():\n    return 1 / 0", 2, "provide: ZeroDivisionError"),
    ],
)
def test_what_keeps_a_plugin_from_loading_is_reported_once(install, source, failing, message):
    install("acme", source)
    found = outcomes(check_plugin("acme"))
    assert {subject for subject, _ in found} == {""}
    failed = [check for (_, check), (outcome, _) in found.items() if outcome == "fail"]
    assert failed == ["imports_in_a_fresh_process", "hooks_are_valid"][-failing:]
    said = found["", "hooks_are_valid"][1]
    assert message in said
    assert "registered in process" not in said
    for check in ("provides_the_same_twice", "factories_can_be_imported", "names_are_unique"):
        reason = "the plugin does not load, as an earlier check has reported"
        assert found["", check] == ("skip", reason)


@pytest.mark.full
def test_an_in_tree_processor_with_a_folder(tmp_path):
    folder = write_tiny("qwen2_5_vl", tmp_path)
    verdicts = check_plugin("qwen", model_folder=folder)
    # Models come last: they have tests of their own.
    found = outcomes(itertools.takewhile(lambda v: not v.subject.startswith("model "), verdicts))
    assert found["image processor qwen-image", "samples_are_processed"] == ("pass", "")
    assert found["image processor qwen3-image", "builds"][0] == "skip"
    assert [key for key, (outcome, _) in found.items() if outcome == "fail"] == []
