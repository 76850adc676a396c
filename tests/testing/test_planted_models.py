"""Mutation tests of the kit: bugs planted in the built-in models and parsers.

Each must be found by the check that the table names, on what an author gives anyway: a tiny
checkpoint, and one plain example of a parser.
"""

import pytest
from mmdeploy_llm_plugins.reasoning import provide_reasoning_parsers
from mmdeploy_llm_plugins.tools import provide_tool_parsers

from mmdeploy_llm.hooks import PluginManager
from mmdeploy_llm.testing.models import equalities, models, variants
from mmdeploy_llm.testing.models.base import CheckFailed, CheckSkipped
from mmdeploy_llm.testing.models.models import ModelSubject
from mmdeploy_llm.testing.models.prompts import make_prompt
from mmdeploy_llm.testing.plugins import parsers, tools
from mmdeploy_llm.weights.folder import read_checkpoint

from .planted_models import MODELS, REASONING, TOOLS

BY_NAME = {check.__name__: check for check in models.CHECKS + equalities.CHECKS + variants.CHECKS}
PARSERS = {spec.name: spec for spec in provide_reasoning_parsers()}
TOOL_PARSERS = {spec.name: spec for spec in provide_tool_parsers()}
CALL = '<tool_call>\n{"name": "f", "arguments": {"city": "Oslo"}}\n</tool_call>'
XML = "<function=f>\n<parameter=city>\nOslo\n</parameter>\n</function>"
OSLO = ("f", {"city": "Oslo"})
EXAMPLES = {
    "hermes": (
        tools.ToolParserExample(text=CALL, calls=(OSLO,)),
        tools.ToolParserExample(text=f"{CALL}\n{CALL}", calls=(OSLO, OSLO)),
    ),
    "qwen3-coder": (
        tools.ToolParserExample(text=f"<tool_call>\n{XML}\n</tool_call>", calls=(OSLO,)),
    ),
}


@pytest.fixture(scope="module")
def subject_for(tiny_folder, transformers_of):
    """subject_for(family) -> a new subject with the family's tiny checkpoint."""
    specs = {spec.name: spec for spec in PluginManager.load().models}

    def make(family):
        folder, spec = tiny_folder(family), specs[family]
        cases = {"text": (), "other text": ()}
        if spec.media:
            cases = {"two images": ((1, 4, 6), (1, 4, 6)), "text": ()}
        return ModelSubject(
            spec=spec,
            folder=folder,
            config=read_checkpoint(folder).config,
            cases=cases,
            tolerance=1e-4,
            make_prompt=make_prompt,
            make_reference=transformers_of,
        )

    return make


def message_of(check, subject):
    try:
        check(subject)
    except CheckFailed as failure:
        return str(failure)
    except CheckSkipped:
        return None
    return None


@pytest.mark.one_is_quick
@pytest.mark.parametrize("name", MODELS)
def test_a_planted_bug_of_a_model_is_found(subject_for, monkeypatch, name):
    family, plant, check = MODELS[name]
    subject = subject_for(family)
    with monkeypatch.context() as patched:
        plant(patched.setattr)
        message = message_of(BY_NAME[check], subject)
    assert message is not None
    print(f"{name}: {check}: {message}")


@pytest.mark.parametrize("name", REASONING)
def test_a_planted_bug_of_a_reasoning_parser_is_found(monkeypatch, name):
    parser, plant, check = REASONING[name]
    plant(monkeypatch.setattr)
    subject = parsers.ParserSubject(spec=PARSERS[parser])
    message = message_of({one.__name__: one for one in parsers.CHECKS}[check], subject)
    assert message is not None
    print(f"{name}: {check}: {message}")


@pytest.mark.parametrize("name", TOOLS)
def test_a_planted_bug_of_a_tool_parser_is_found(monkeypatch, name):
    parser, plant, check = TOOLS[name]
    plant(monkeypatch.setattr)
    subject = tools.ToolParserSubject(spec=TOOL_PARSERS[parser], examples=EXAMPLES[parser])
    message = message_of({one.__name__: one for one in tools.CHECKS}[check], subject)
    assert message is not None
    print(f"{name}: {check}: {message}")


@pytest.mark.one_is_quick
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_pass_without_a_bug(name):
    subject = tools.ToolParserSubject(spec=TOOL_PARSERS[name], examples=EXAMPLES[name])
    assert [message_of(check, subject) for check in tools.CHECKS] == [None] * len(tools.CHECKS)
