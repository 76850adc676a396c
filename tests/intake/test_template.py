"""Where chat templates come from, and that they are rendered in a sandbox."""

import json

import pytest

from mmdeploy_llm.errors import CheckpointError, ConfigError, RequestError
from mmdeploy_llm.intake.template import checkpoint_template, load_template, render


@pytest.fixture
def say(raw_tokenizer):
    def rendered(template, **variables):
        messages = [{"role": "user", "content": "hello"}]
        return render(raw_tokenizer, template, messages, variables)

    return rendered


def test_the_processors_template_wins_over_the_tokenizers(tmp_path, raw_tokenizer):
    assert checkpoint_template(tmp_path, raw_tokenizer) == raw_tokenizer.chat_template
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert checkpoint_template(tmp_path, raw_tokenizer) == "from json"
    (tmp_path / "chat_template.jinja").write_text("from jinja")
    assert checkpoint_template(tmp_path, raw_tokenizer) == "from jinja"


def test_named_templates_and_none(tmp_path):
    class Bare:
        chat_template = None

    assert checkpoint_template(tmp_path, Bare) is None
    Bare.chat_template = {"default": "a", "tool_use": "b"}
    assert checkpoint_template(tmp_path, Bare) == "a"
    (tmp_path / "chat_template.json").write_text("{broken")
    with pytest.raises(CheckpointError, match=r"chat_template.json"):
        checkpoint_template(tmp_path, Bare)


def test_a_template_is_a_file_or_a_text(tmp_path):
    path = tmp_path / "a{1}.jinja"
    path.write_text("in the file")
    assert load_template(str(path)) == "in the file"
    assert load_template("{{ messages }}") == "{{ messages }}"
    assert load_template("two\nlines") == "two\nlines"
    assert load_template("{{ 1 }}" * 5000) == "{{ 1 }}" * 5000
    for text in ("template.jinja", "chatml", str(tmp_path), "a\0b"):
        with pytest.raises(ConfigError, match="looks like a file path"):
            load_template(text)


def test_variables_reach_the_template(say):
    assert (
        say("{{ messages[0].content }}{{ mood }}{{ add_generation_prompt }}", mood="!")
        == "hello!True"
    )
    assert (
        say("{{ bos_token }}{{ add_generation_prompt }}", add_generation_prompt=False) == "<s>False"
    )


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('Unsupported role') }}", "Unsupported role"),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ messages[0].content + 5 }}", "TypeError"),
        ("{{ nothing.at.all }}", "UndefinedError"),
    ],
)
def test_errors_of_templates_are_request_errors(template, message, say):
    with pytest.raises(RequestError, match=message):
        say(template)


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% set _ = messages.append(1) %}",
    ],
)
def test_cve_2026_5760_templates_are_sandboxed(attack, say):
    with pytest.raises(RequestError, match=r"SecurityError|UndefinedError"):
        say(attack)
