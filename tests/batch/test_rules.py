"""Answers that begin as they must not, or are too long, are asked again, and counted."""

import json

import pytest

from mmdeploy_llm.batch.answers.rules import Avoid, Limit, TextRules
from mmdeploy_llm.batch.job import plan_batch, run_batch
from mmdeploy_llm.batch.options import output_settings
from mmdeploy_llm.batch.settings import BatchSettings
from mmdeploy_llm.data.outputs.scan import read_records
from mmdeploy_llm.engine.desk.outcome import Answer
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.values.outputs.request_output import (
    CompletionOutput,
    Completions,
    RequestMetrics,
    RequestOutput,
)
from mmdeploy_llm.values.params import SamplingParams

OPENINGS = ("This image", "Here's", "这张图片", "- ", "C'est ", "caf\u00e9")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("This image shows a cat", "This image"),
        ("this  IMAGE\nshows", "This image"),
        ('  "This image', "This image"),
        ("**This image** shows", "This image"),
        ("This image.", "This image"),
        ("This imagery is vivid", None),
        ("This images", None),
        ("A cat. This image", None),
        ("Here\u2019s a cat", "Here's"),
        ("这张图片展示了一只猫", "这张图片"),
        ("- a cat", "- "),
        ("-a cat", "- "),
        ("c\u2019est un chat", "C'est "),
        ("Cafe\u0301 Noir", "caf\u00e9"),
        ("\u201cThis image\u201d", "This image"),
        ("", None),
        ("***", None),
        ("_This image_", "This image"),
    ],
)
def test_openings(text, found):
    words = Avoid(OPENINGS).violation(text)
    assert words == (None if found is None else f"it begins with {found!r}")


@pytest.mark.parametrize(
    ("unit", "text", "number"),
    [
        ("words", " a  b\nc ", 3),
        ("characters", "猫が好き", 4),
        ("words", "", 0),
        ("characters", "", 0),
    ],
)
def test_lengths(unit, text, number):
    assert Limit("most", max(number, 1), unit).violation(text) is None
    if number > 1:
        words = Limit("most", number - 1, unit).violation(text)
        assert words == f"it has {number} {unit}, at most {number - 1} are allowed"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((["", "a"], None, None), "avoid must be openings"),
        ((" ", None, None), "avoid must be openings"),
        (([3], None, None), "avoid must be openings"),
        ((None, 0, None), "max_words must be at least 1"),
        ((None, None, -1), "max_chars must be at least 1"),
    ],
)
def test_rules_that_are_none(given, words):
    with pytest.raises(ConfigError, match=words):
        TextRules.given(*given)


def test_options_become_rules():
    rules = output_settings({"avoid": "This image", "max_words": 20})["rules"]
    assert rules == TextRules(avoid=("This image",), max_words=20)
    assert [check.name for check in rules.checks()] == ["avoid", "max_words"]
    assert rules.values() == {"avoid": ["This image"], "max_words": 20}
    assert output_settings({})["rules"].checks() == []


class Drawing:
    """Answers with the texts of a prompt, one after the other, then with the last again."""

    def __init__(self):
        self.asked = []

    def answer_each(self, asks):
        for ask in asks:
            self.asked.append(ask)
            texts = ask.prompt.text.split("|")
            text = texts[min(ask.num_retries, len(texts) - 1)]
            sample = CompletionOutput(text=text, token_ids=[1], finish_reason="stop")
            output = RequestOutput(
                request_id="r",
                prompt=None,
                outputs=Completions([sample]),
                finished=True,
                metrics=RequestMetrics(arrival_time=1.0),
            )
            yield Answer(ask=ask, output=output)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@pytest.fixture
def run(tmp_path):
    def make(*prompts, mode="new", **rules):
        source, llm = tmp_path / "in.jsonl", Drawing()
        lines = (json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
        source.write_text("".join(lines))
        settings = BatchSettings(
            mode=mode,
            rules=TextRules(**rules),
            sampling_params=SamplingParams(temperature=0),
            use_tqdm=False,
        )
        job = plan_batch(source, tmp_path / "out.jsonl", settings)
        summary = run_batch(job, lambda: llm)
        return summary, {each.line: each for each in read_records(tmp_path / "out.jsonl")}, llm

    return make


def test_a_text_that_breaks_a_rule_is_asked_again_and_counted(run):
    prompts = ("This image|A cat", "A dog", "This image|This image", "a b c d|This image a|x")
    summary, records, llm = run(*prompts, avoid=("This image",), max_words=3)
    assert [records[line].text for line in (1, 2, 3, 4)] == ["A cat", "A dog", "This image", "x"]
    assert summary.run.asked_again == {"avoid": 4, "max_words": 1}
    assert (summary.outcomes, summary.failures) == (
        {"ok": 3, "failed": 1},
        {"422 InvalidAnswerError": 1},
    )
    words = "the answer breaks avoid, also after 2 retries: it begins with 'This image'"
    assert (records[3].outcome, records[3].error.message) == ("failed", words)
    assert {ask.params.temperature for ask in llm.asked if ask.num_retries} == {0.7}


def test_rules_belong_to_the_configuration_of_an_output(run):
    run("a", max_chars=5)
    assert run("a", mode="resume", max_chars=5)[2].asked == []
    with pytest.raises(ConfigError, match="max_chars is 4, was 5"):
        run("a", mode="resume", max_chars=4)
