"""Several questions about each item: how they are given, what a line may say, which record they
become."""

import json

import pytest

from mmdeploy_llm.batch.job import plan_batch, run_batch
from mmdeploy_llm.batch.questions.asks import Asks, questions_about
from mmdeploy_llm.batch.settings import BatchSettings
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.data.rows.names import BUILT_IN_KINDS
from mmdeploy_llm.engine.intake.prompts import PromptReader
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.values.outputs.request_output import Completions
from mmdeploy_llm.values.prompt import PromptParts, TextPart
from tests.batch.conftest import Loaded

TWO = {"caption": "Describe.", "tags": "List tags."}


class Asked(Loaded):
    """Answers with the question, in the reverse order; one with "bad" in it fails."""

    def __init__(self, fake):
        self.fake, self.groups, self.prompts = fake, [], []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def answer_each(self, asks):
        from dataclasses import replace

        from mmdeploy_llm.engine.desk.outcome import Answer

        for ask in reversed(list(asks)):
            self.groups.append(ask.group)
            self.prompts.append(ask.prompt)
            question = ask.prompt.messages[-1].parts[-1].text
            output = self.fake.answer(PromptParts(text="bad" if "bad" in question else question))
            if output.is_ok:
                own = replace(output.outputs[0], text=f"To {question}", reasoning_content=None)
                output = replace(output, outputs=Completions([own]))
            yield Answer(ask=ask, output=output, error=None)


@pytest.fixture
def run(fake_llm, tmp_path):
    """Runs a batch; returns its records by id, its summary and the LLM."""

    def run(given, **settings):
        llm = Asked(fake_llm)
        given = given if isinstance(given, list) else str(given)
        job = plan_batch(given, tmp_path / "out.jsonl", BatchSettings(**settings))
        summary = run_batch(job, lambda: llm)
        lines = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
        return {line["id"] or line["line"]: line for line in lines}, summary, llm

    return run


def test_an_item_has_one_record_with_all_answers(run, pictures):
    found, summary, llm = run(pictures / "sub", asks=Asks.given(TWO))
    (record,) = found.values()
    assert record["answers"] == {"caption": "To Describe.", "tags": "To List tags."}
    assert record["text"] == "To Describe."
    assert record["num_prompt_tokens"] == 40
    assert record["num_output_tokens"] == 6
    assert record["num_cached_tokens"] == 8
    assert record["num_image_tokens"] == 16
    assert "outputs" not in record
    assert summary.run.num_items == 1
    assert summary.run.answers == {"caption": 1, "tags": 1}
    assert llm.groups == [1, 1]
    picture, text = llm.prompts[0].messages[0].content
    assert (picture.item.kind, type(text)) == ("image", TextPart)


def test_a_failed_question_is_named_and_the_others_are_kept(run, pictures):
    asks = Asks.given({"caption": "Describe.", "nsfw": "bad?", "worse": "bad!"})
    (record,) = run(pictures / "sub", asks=asks)[0].values()
    assert record["answers"] == {"caption": "To Describe."}
    assert record["error"]["code"] == 400
    assert record["outcome"] == "failed"
    assert record["finish_reason"] == "error"
    for words in ("question 'nsfw': cannot read bad", "question 'worse': cannot read bad"):
        assert words in record["error"]["message"]
    assert Record.from_values(record).answers == record["answers"]


@pytest.mark.full
def test_resume_asks_all_questions_of_a_failed_item_again(run, pictures):
    run(pictures, asks=Asks.given({"caption": "Describe.", "tags": "bad"}))
    again = {"asks": Asks.given(TWO), "mode": "resume"}
    found, summary, llm = run(pictures, **again)
    assert {len(record["answers"]) for record in found.values()} == {2}
    assert len(llm.prompts) == 2 * summary.run.num_items == 10
    assert not run(pictures, **again)[2].prompts
    with pytest.raises(ConfigError, match=r"ask\.tags is 'Tags\?', was 'List tags\.'"):
        run(pictures, asks=Asks.given({**TWO, "tags": "Tags?"}), mode="resume")


def test_a_line_has_questions_of_its_own(run):
    image = {"type": "image", "image": "a.png"}
    user = {"role": "user", "content": [image]}
    lines = [
        {"id": "a", "messages": [user], "ask": TWO},
        {"id": "b", "messages": [{"role": "user", "content": "A text."}], "ask": {"x": "Why?"}},
        {"id": "c", "image": "b.png", "ask": TWO},
        {"id": "d", "messages": [user], "ask": "caption"},
        {"id": "e", "prompt": "x", "ask": TWO},
        {"id": "f", "messages": [user], "ask": {"../x": "?"}},
        {"id": "g", "messages": [user], "ask": {"x": ["?"]}},
        {"id": "h", "messages": [{"role": "assistant", "content": "?"}], "ask": TWO},
        {"id": "i", "messages": [user], "ask": {f"q{i}": "?" for i in range(65)}},
    ]
    found, _, llm = run([line for line in lines if line["id"] != "c"])
    assert found["a"]["answers"] == {"caption": "To Describe.", "tags": "To List tags."}
    assert found["b"]["answers"] == {"x": "To Why?"}
    assert {found[name]["error"]["code"] for name in "defghi"} == {400}
    assert "by name" in found["d"]["error"]["message"]
    assert "the user's" in found["e"]["error"]["message"]
    assert "'../x'" in found["f"]["error"]["message"]
    assert len(llm.prompts) == 3


def test_rows_fill_their_columns_into_each_question(run, jsonl):
    path = jsonl(
        {"id": "a", "image": "a.png", "title": "A cat"},
        {"id": "b", "image": "b.png", "title": None},
        {"id": "c", "image": "b.png", "title": "x", "messages": [{"role": "user"}]},
    )
    asks = Asks.given({"check": "Is it {title}?", "tags": "List."})
    from mmdeploy_llm.batch.corpus.columns import ColumnOptions

    found, *_ = run(path, asks=asks, columns=ColumnOptions(image="image"))
    assert found["a"]["answers"] == {"check": "To Is it A cat?", "tags": "To List."}
    faults = [line["error"]["message"] for line in found.values() if line["error"]]
    assert len(faults) == 2
    assert "'title' is empty" in faults[0]


def test_the_input_has_changed_when_a_column_of_a_later_question_has(run, jsonl):
    from mmdeploy_llm.batch.corpus.columns import ColumnOptions

    asks = Asks.given({"tags": "List.", "check": "Is it {title}?"})
    options = {"asks": asks, "columns": ColumnOptions(image="image")}
    run(jsonl({"id": "a", "image": "a.png", "title": "x"}), **options)
    again = jsonl({"id": "a", "image": "a.png", "title": "y"})
    found, *_ = run(again, **options, mode="resume")
    assert found["a"]["answers"]["check"] == "To Is it y?"


def test_a_system_message_begins_each_conversation(run, pictures):
    _, _, llm = run(pictures / "sub", asks=Asks.given(TWO), system="Be brief.")
    assert [prompt.messages[0].content for prompt in llm.prompts] == ["Be brief."] * 2


def test_reasoning_of_every_question_is_kept(fake_llm):
    from mmdeploy_llm.data.records.several import joined

    one, two = (Record(id="a", text=t, reasoning=r) for t, r in (("x", "I."), ("y", "II.")))
    record = joined({"one": one, "two": two})
    assert [(own["question"], own["reasoning"]) for own in record.outputs] == [
        ("one", "I."),
        ("two", "II."),
    ]
    assert record.outcome == "ok"
    cut = Record(id="a", text="z", outcome="truncated", outcome_reason="max_tokens was reached")
    worst = joined({"one": one, "cut": cut})
    assert (worst.outcome, worst.outcome_reason) == ("truncated", "cut: max_tokens was reached")


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        ("tags=List.", "by name"),
        (["tags"], "by name"),
        ({}, "by name"),
        ({"": "x"}, "name ''"),
        ({"a b": "x"}, "name 'a b'"),
        ({"a": " "}, "must be a question"),
        (7, "by name"),
    ],
)
def test_wrong_questions_are_errors_before_anything_is_loaded(ask, words):
    with pytest.raises(ConfigError, match=words):
        Asks.given(ask)


def test_one_question_or_several():
    with pytest.raises(ConfigError, match="give one of them"):
        BatchSettings(question="Describe.", asks=Asks.given(TWO))


def test_files_have_no_columns(pictures, run):
    with pytest.raises(ConfigError, match=r"no column fills \{title\}"):
        run(pictures, asks=Asks.given({"a": "x", "b": "Is it {title}?"}))


def test_a_question_is_the_last_part():
    parts = ({"type": "image", "image": "a"}, {"type": "text", "text": "Before."})
    prompt = PromptReader.of_kinds(BUILT_IN_KINDS).read([{"role": "user", "content": parts}])
    (found,) = questions_about(prompt, {"a": "Now?"})
    picture, *texts = found.prompt.messages[0].content
    assert (picture.item.kind, [own.text for own in texts]) == ("image", ["Before.", "Now?"])
