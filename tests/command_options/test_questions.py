"""Options of the questions: what each accepts, and mistakes that end the program at once."""

import json

import pytest
from typer.testing import CliRunner

from mmdeploy_llm.cli.program import app
from mmdeploy_llm.command_options.question import QuestionOptions
from mmdeploy_llm.command_options.values import named_values
from mmdeploy_llm.errors import ConfigError


def test_questions_by_name_and_a_system_message(tmp_path):
    (tmp_path / "q.txt").write_text("Is it safe?")
    chosen = QuestionOptions(ask=["a=Describe {x}.", f"b=@{tmp_path}/q.txt"], system="Be brief.")
    asks = chosen.to_settings()["asks"]
    assert dict(asks.questions) == {"a": "Describe {x}.", "b": "Is it safe?"}
    assert asks.system == "Be brief."
    for one in (
        QuestionOptions(prompt=f"@{tmp_path}/q.txt"),
        QuestionOptions(prompt="Is it safe?"),
    ):
        assert one.to_settings()["question"] == "Is it safe?"
    assert (
        QuestionOptions(prompt_file=tmp_path / "q.txt").to_settings()["question"] == "Is it safe?"
    )


def test_sampling_parameters_of_an_object_or_a_file(tmp_path):
    (tmp_path / "s.json").write_text(json.dumps({"top_p": 0.9, "seed": 1}))
    for text in (str(tmp_path / "s.json"), '{"top_p": 0.9, "seed": 1}'):
        assert named_values("--sampling", text, "x=1") == {"top_p": 0.9, "seed": 1}
    assert named_values("--sampling", 'stop=["="]', "x=1") == {"stop": ["="]}


@pytest.mark.parametrize("text", ["top_p", "{", "[1]", "missing.json", "/dev/null", "1=2"])
def test_sampling_that_is_none(text):
    with pytest.raises(ConfigError, match="--sampling"):
        named_values("--sampling", text, "top_p=0.9")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ask", "tags"], "must be NAME=QUESTION"),
        (["--ask", "a=x", "--ask", "a=y"], "given twice"),
        (["--ask", "a=x", "-p", "y"], "give one of them"),
        (["-p", "@missing.txt"], "cannot be read"),
        (["-p", "x", "--prompt-file", "y"], "give one of them"),
        (["--system", "@missing.txt"], "cannot be read"),
        (["--ask", "a=Is it {title}?"], "no column fills {title}"),
    ],
)
def test_mistakes_end_the_program_before_a_model_is_loaded(tmp_path, png, words, message):
    (tmp_path / "a.png").write_bytes(png)
    done = CliRunner().invoke(app, ["caption", str(tmp_path), "-o", f"{tmp_path}/o.jsonl", *words])
    assert done.exit_code == 2
    assert message in done.output.replace("\n", " ")
