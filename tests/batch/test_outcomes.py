"""Answers that are empty, cut off or in a loop are told apart from good ones and from failures."""

import random
from dataclasses import replace

import pytest

from mmdeploy_llm.batch.job import plan_batch, run_batch
from mmdeploy_llm.batch.settings import BatchSettings
from mmdeploy_llm.data.outputs.opening.choose import open_sink
from mmdeploy_llm.data.records.item import Item
from mmdeploy_llm.data.records.making import record_of
from mmdeploy_llm.data.records.outcome import ALL_FAILED, NOTHING, OUTCOMES, Retried
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.values.outputs.request_output import CompletionOutput, Completions, ToolCall
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.prompt import PromptParts

EMPTY = {"text": " \n", "token_ids": [5]}
CUT = {"finish_reason": "length", "token_ids": [5, 6, 7, 8]}
THOUGHT = "the thinking took all of max_tokens"


def completion(**values):
    given = {"text": "a cat", "token_ids": [5, 6], "finish_reason": "stop", **values}
    return CompletionOutput(**given)


def made(fake_llm, *samples, **params):
    params = SamplingParams(**{"max_tokens": 4, **params})
    item = Item(line=1, id="i", prompt=PromptParts(text="p"), params=params)
    failed = next((each for each in samples if not each.is_ok), None)
    fault = {"error_code": failed.error_code, "error_msg": failed.error_msg} if failed else {}
    output = replace(fake_llm.answer(item.prompt), outputs=Completions(samples), **fault)
    return record_of(item, output)


@pytest.mark.parametrize(
    ("values", "outcome", "reason"),
    [
        ({}, "ok", None),
        (EMPTY, "empty", None),
        ({**EMPTY, "reasoning_content": "Hm."}, "empty", "the model ended after its thinking"),
        ({**CUT, "text": "", "reasoning_content": "Hm."}, "empty", THOUGHT),
        ({**CUT, "text": ""}, "empty", "white space or special tokens took all of max_tokens"),
        (CUT, "truncated", "max_tokens was reached"),
        ({**CUT, "token_ids": [5]}, "truncated", "max_model_len was reached"),
        ({"finish_reason": "repetition"}, "repetition", None),
        ({"finish_reason": "repetition", "text": ""}, "repetition", None),
        ({"error_code": 500, "error_msg": "x", "finish_reason": "error"}, "failed", None),
        ({**EMPTY, "is_valid": True}, "ok", None),  # the constraint allows it
        ({**CUT, "error_code": 422, "error_msg": "x", "is_valid": False}, "failed", None),
    ],
)
def test_outcomes(fake_llm, values, outcome, reason):
    record = made(fake_llm, completion(**values))
    assert (record.outcome, record.outcome_reason) == (outcome, reason)
    assert Record.from_json(record.to_json()) == record


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ([7] * 64, "the last token repeats 64 times"),
        ([7] * 63, None),
        ([*range(500), *([1, 2, 3] * 30)], "the last 3 tokens repeat 30 times"),
        ([*range(100)] * 4, "the last 100 tokens repeat 4 times"),
        ([*range(100)] * 3, None),
        ([*range(30)] * 40 + [99], None),
        ([9] * 200 + [*range(64)], None),
    ],
)
def test_a_text_that_was_cut_off_in_a_loop(fake_llm, ids, reason):
    values = {"finish_reason": "length", "token_ids": ids}
    record = made(fake_llm, completion(**values), max_tokens=len(ids))
    outcome = "truncated" if reason is None else "repetition"
    reason = reason or "max_tokens was reached"
    assert (record.outcome, record.outcome_reason) == (outcome, reason)
    assert made(fake_llm, completion(token_ids=ids)).outcome == "ok"  # it ended by itself


LOOPS = {
    "From leftred " + "red " * 12 + "blue.": "'red' repeats 8 times or more",
    "A cat. " + "Red, red and blue. " * 8: "'red red and blue' repeats 8 times or more",
    "the the the the the the the the": "'the' repeats 8 times or more",
    "一只猫" + "红" * 16: "'红' repeats without a break",
    "Aaa" + "ha" * 16: "'ah' repeats without a break",
}
FAULTS = {
    "A red circle.</think>A circle.": "the text holds </think> without its beginning",
    "<think>A red circle. It is red.": "the text holds <think> without its end",
    "<think>Hm.</answer> A circle.": "the text holds </answer> without its beginning",
    "A circle.<|im_start|>user": "the text holds <|im_start|>",
    "A red circle. Under it a blue squ": "the text ends within a sentence",
    "A red circle. A square is under it,": "the text ends within a sentence",
    'He says "never." Then he': "the text ends within a sentence",
    "From left to right: a horse. Below:": "the text ends within a sentence",
}
SOUND = [
    "a red circle",
    "A red circle at the top.",
    "A very, very, very big cat.",
    "Row, row, row your boat. Gently down the stream.",
    "| 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 |\n|---|---|---|---|---|---|---|---|",
    "1 1 1 1 1 1 1 1 1 1 1 1 1 1",
    "| Yes | Yes | Yes | Yes | Yes | Yes | Yes | Yes | Yes |",
    "0000000000000000000000000000 ------------------------------",
    "It sells:\n- apples. They are red\n- pears",
    "<think>Hm. It is red.</think> A circle.",
    "<table><tr><td>A. B</td></tr></table>",
    '{"caption": "A cat. It sleeps"}',
    "A sign that says STOP. It is red!",
    "An e.g. short text",
    "a photo of Mr. Brown and Dr. Smith",
    "He said (twice) that it rains. Then it did …",
    "一只红色的圆。",
    "def f(x):\n    return x | 1. Then g",
    "a < b and b > c. Done.",
    "A small blue star. 小さい星。",
]


@pytest.mark.parametrize(("text", "reason"), LOOPS.items())
def test_a_text_with_a_phrase_that_repeats(fake_llm, text, reason):
    record = made(fake_llm, completion(text=text))
    assert (record.outcome, record.outcome_reason) == ("repetition", reason)
    assert made(fake_llm, completion(text=text, is_valid=True)).outcome == "ok"  # as asked


@pytest.mark.parametrize(("text", "reason"), FAULTS.items())
def test_a_text_that_is_no_whole_answer(fake_llm, text, reason):
    record = made(fake_llm, completion(text=text))
    assert (record.outcome, record.outcome_reason) == ("malformed", reason)


@pytest.mark.parametrize("text", SOUND)
def test_a_sound_text_has_no_fault(fake_llm, text):
    assert made(fake_llm, completion(text=text)).outcome == "ok"


def test_broken_captions_are_told_from_good_ones(fake_llm):
    """500 good captions, of one sentence and of several; 50 broken as models break them."""
    chance = random.Random(0)
    colours, shapes = ("red", "blue", "green", "a dark grey"), ("circle", "square", "star", "dog")

    def sentence():
        parts = [
            f"{chance.choice(colours)} {chance.choice(shapes)}" for _ in range(chance.randint(1, 6))
        ]
        return f"From left to right: {', '.join(parts)}."

    good = [" ".join(sentence() for _ in range(chance.randint(1, 4))) for _ in range(500)]
    assert {made(fake_llm, completion(text=text)).outcome for text in good} == {"ok"}
    broken = []
    for text in good[:50]:
        cut = text[: chance.randint(len(text) // 2, len(text) - 2)]
        word = chance.choice(colours)
        ways = (
            f"{cut}</think>{text}",
            f"{cut} {f'{word} ' * 12}",
            f"{text} {cut}",
            f"{cut}<|end|>",
        )
        broken.append(chance.choice(ways))
    found = [made(fake_llm, completion(text=text)).outcome for text in broken]
    assert 50 - found.count("ok") >= 45


def test_a_call_of_a_tool_is_an_answer(fake_llm):
    call = ToolCall(id="1", name="f", arguments="{}")
    assert made(fake_llm, completion(text="", tool_calls=(call,))).outcome == "ok"
    assert made(fake_llm, completion(text="")).outcome == "empty"


def test_the_length_that_was_asked_for_is_no_cut(fake_llm):
    assert made(fake_llm, completion(**CUT), ignore_eos=True).outcome == "ok"
    assert made(fake_llm, completion(**CUT, reasoning_content="x")).outcome == "truncated"


@pytest.mark.parametrize("first", OUTCOMES)
@pytest.mark.parametrize("second", OUTCOMES)
def test_of_several_samples_the_worst_counts(fake_llm, first, second):
    kinds = {
        "failed": {"error_code": 500, "error_msg": "x", "finish_reason": "error"},
        "empty": EMPTY,
        "repetition": {"finish_reason": "repetition"},
        "malformed": {"text": "A.</think>"},
        "truncated": CUT,
        "ok": {},
    }
    samples = [completion(index=i, **kinds[name]) for i, name in enumerate((first, second))]
    record = made(fake_llm, *samples, n=2)
    assert record.outcome == min(first, second, key=OUTCOMES.index)


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        (True, "failed-400 failed-408"),
        ("all", "failed-400 failed-408"),
        ("failed", "failed-400 failed-408"),
        (False, ""),
        ([408], "failed-408"),
        ("408, empty", "failed-408 empty"),
        (["truncated", 400], "failed-400 truncated"),
        ("all,repetition", "failed-400 failed-408 repetition"),
    ],
)
def test_which_items_are_retried(given, taken):
    records = [
        ("failed-400", "failed", 400),
        ("failed-408", "failed", 408),
        *((name, name, None) for name in ("empty", "truncated", "repetition", "ok")),
    ]
    retried = Retried.parse(given)
    found = [name for name, outcome, code in records if retried.takes(outcome, code)]
    assert found == taken.split()
    assert (Retried.parse(True), Retried.parse(False)) == (ALL_FAILED, NOTHING)


@pytest.mark.parametrize(
    "given", ["", "emty", "ok", "empty,,408", [], [200], [600], [None], "4.5", [[]], [{}]]
)
def test_what_names_no_outcome_and_no_code_is_refused(given):
    with pytest.raises(ConfigError, match="empty,truncated,408"):
        Retried.parse(given)


@pytest.fixture
def lacking(fake_llm, monkeypatch):
    """A model whose answer depends on the prompt's first word."""
    usual = fake_llm.answer

    def answer(prompt, n=1):
        kind = prompt.text.split()[0]
        values = {
            "empty": EMPTY,
            "cut": CUT,
            "thought": {**CUT, "text": "", "reasoning_content": "H"},
        }
        output = usual(prompt, n)
        if kind not in values:
            return output
        return replace(output, outputs=Completions([completion(**values[kind])]))

    monkeypatch.setattr(fake_llm, "answer", answer)
    return fake_llm


@pytest.mark.one_is_quick
@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet", "out.tar"])
def test_a_run_counts_them_and_does_again_what_it_is_told(lacking, tmp_path, name):
    rows = [
        {"prompt": f"{kind} {i}"}
        for i, kind in enumerate(("good", "bad", "empty", "cut", "thought"))
    ]
    settings = BatchSettings(sampling_params=SamplingParams(max_tokens=4))
    out = tmp_path / name
    summary = run_batch(plan_batch(rows, out, settings), lambda: lacking)
    assert summary.outcomes == {"ok": 1, "failed": 1, "empty": 2, "truncated": 1}
    assert (summary.run.num_done, summary.run.num_failed, summary.run.num_items) == (1, 1, 5)
    assert summary.run.lacking == "1 failed, 2 empty, 1 truncated"
    assert summary.lacks == {
        "empty": 1,
        f"empty: {THOUGHT}": 1,
        "truncated: max_tokens was reached": 1,
    }
    again = {"mode": "resume", "retried": Retried.parse("empty")}
    lacking.prompts.clear()
    done = run_batch(plan_batch(rows, out, replace(settings, **again)), lambda: lacking)
    assert [prompt.text for prompt in lacking.prompts] == ["empty 2", "thought 4"]
    assert done.outcomes == summary.outcomes
    assert len(list(open_sink(out).entries())) == 5
    assert [record.outcome for record in done.records(most=1)] != ["ok"]
