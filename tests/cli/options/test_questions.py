"""Options of the questions: what each accepts, and mistakes that end the program at once."""

import pytest
from typer.testing import CliRunner

from mmdeploy_llm.cli.options.question import named_questions
from mmdeploy_llm.cli.program import app


def test_questions_by_name_may_be_in_files(tmp_path):
    (tmp_path / "q.txt").write_text("Is it safe?")
    chosen = named_questions(["a=Describe {x}.", f"b=@{tmp_path}/q.txt", "c=@@home=x"])
    found = {"a": "Describe {x}.", "b": "Is it safe?", "c": "@home=x"}
    assert chosen == found


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ask", "tags"], "must be NAME=TEXT"),
        (["--ask", "a=x", "--ask", "a=y"], "a name twice"),
        (["--ask", "a=@missing.txt"], "cannot be read"),
        (["--ask", "a b=x"], "has the name 'a b'"),
        (["--ask", "a=x", "-p", "y"], "give one of them"),
        (["--ask", "a=Is it {title}?"], "no column fills {title}"),
    ],
)
def test_mistakes_end_the_program_before_a_model_is_loaded(tmp_path, png, words, message):
    (tmp_path / "a.png").write_bytes(png)
    done = CliRunner().invoke(app, ["caption", str(tmp_path), "-o", f"{tmp_path}/o.jsonl", *words])
    assert done.exit_code == 2
    assert message in done.output.replace("\n", " ")
