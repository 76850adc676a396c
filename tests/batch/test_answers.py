"""Answers that are asked again: by a schema, and after the death of an engine."""

import json
from contextlib import nullcontext
from dataclasses import replace

import pytest

from mmdeploy_llm.batch.answers.checker import Checker, TooExpensiveError
from mmdeploy_llm.batch.answers.restarts import Restarting
from mmdeploy_llm.batch.answers.rounds import Rounds
from mmdeploy_llm.batch.answers.schemas import AnswerSchema, read_schema
from mmdeploy_llm.batch.answers.validated import Validated
from mmdeploy_llm.batch.job import plan_batch, run_batch
from mmdeploy_llm.batch.settings import BatchSettings
from mmdeploy_llm.data.outputs.scan import read_records
from mmdeploy_llm.data.records.outcome import NOTHING
from mmdeploy_llm.engine.desk.ask import Ask
from mmdeploy_llm.engine.desk.outcome import Answer
from mmdeploy_llm.errors import ConfigError, EngineError, InvalidAnswerError, WorkerDiedError
from mmdeploy_llm.values.outputs.request_output import (
    CompletionOutput,
    Completions,
    RequestMetrics,
    RequestOutput,
)
from mmdeploy_llm.values.params import SamplingParams
from tests.batch.conftest import Loaded

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
GREEDY = SamplingParams(temperature=0)


def output(text="", message=None, code=200):
    fault = {"error_code": code, "error_msg": message}
    sample = CompletionOutput(text=text, finish_reason="stop", **fault)
    return RequestOutput(
        request_id="r",
        prompt=None,
        outputs=Completions([sample]),
        finished=True,
        metrics=RequestMetrics(arrival_time=1.0),
        **fault,
    )


class DyingLLM(Loaded):
    """Computes `width` prompts at once, and dies of those with "poison" in them: what is in flight
    ends with the engine's error."""

    def __init__(self, width=4):
        self.width = width
        self.death = None
        self.num_restarts = 0
        self.num_dead = 0
        self.computed = []
        self.calls = []

    def restart(self):
        assert self.death is not None
        self.death = None
        self.num_restarts += 1

    def text_of(self, ask):
        return ask.prompt

    def answer_each(self, asks):
        assert self.death is None
        source, taken = iter(asks), []
        while batch := [each for each, _ in zip(source, range(self.width), strict=False)]:
            taken += map(self.text_of, batch)
            if any("poison" in self.text_of(ask) for ask in batch):
                self.death = WorkerDiedError("killed")
                for ask in batch:
                    error = output(message="killed", code=500)
                    yield Answer(ask=ask, output=error, error=self.death)
                break
            for ask in reversed(batch):
                self.computed.append(self.text_of(ask))
                yield Answer(ask=ask, output=output(f"answer to {self.text_of(ask)}"))
        self.calls.append(taken)
        if self.death is not None:
            raise self.death


def asks_of(*prompts):
    return [Ask(prompt=prompt, item=n, params=GREEDY) for n, prompt in enumerate(prompts)]


def by_index(answers):
    return {answer.ask.item: answer for answer in answers}


def test_nothing_is_lost_with_an_engine_and_the_item_that_ends_it_is_found():
    llm = DyingLLM()
    prompts = [*"abcde", "poison", *"ghijklm"]
    found = by_index(Restarting(llm, 2).answer_each(asks_of(*prompts)))
    assert sorted(found) == list(range(13))
    assert sorted(llm.computed) == sorted(set(prompts) - {"poison"})  # each once
    guilty = found.pop(5)
    assert guilty.output.error_msg.startswith("the engine died 3 times while it computed this item")
    assert isinstance(guilty.error, WorkerDiedError)
    texts = {n: answer.output.outputs.text for n, answer in found.items()}
    assert texts == {n: f"answer to {prompts[n]}" for n in texts}
    assert llm.num_restarts == 3
    assert ["poison"] in llm.calls


def test_many_poisonous_items_do_not_use_up_the_restarts():
    llm = DyingLLM()
    prompts = [f"poison {n}" if n % 7 == 0 else f"good {n}" for n in range(40)]
    found = by_index(Restarting(llm, 2).answer_each(asks_of(*prompts)))
    assert len(found) == 40
    assert [n for n in range(40) if not found[n].output.is_ok] == list(range(0, 40, 7))


def test_an_engine_that_dies_again_and_again_ends_the_run():
    class Hopeless(DyingLLM):
        def text_of(self, ask):
            return f"poison {ask.prompt}"

    llm = Hopeless()
    answers = Restarting(llm, 1).answer_each(asks_of(*"abcdefgh"))
    found = [next(answers).output.error_msg for _ in range(4)]
    assert found == ["killed"] * 4
    with pytest.raises(WorkerDiedError, match="killed"):
        next(answers)
    assert llm.num_restarts == 1


def test_other_errors_are_not_a_death():
    class Failing(DyingLLM):
        def answer_each(self, asks):
            for ask in asks:
                yield Answer(ask=ask, output=output(message="one step failed", code=500))

    found = list(Restarting(Failing(), 2).answer_each(asks_of(*"abc")))
    assert [answer.output.error_msg for answer in found] == ["one step failed"] * 3

    class Closed(DyingLLM):
        def answer_each(self, asks):
            yield from ()
            raise EngineError("closed meanwhile")

    with pytest.raises(EngineError, match="closed meanwhile"):
        list(Restarting(Closed(), 2).answer_each(asks_of("a")))


def test_a_restart_that_fails_raises_what_loading_raises():
    class Gone(DyingLLM):
        def restart(self):
            raise ConfigError("the weights are gone")

    with pytest.raises(ConfigError, match="the weights are gone"):
        list(Restarting(Gone(), 2).answer_each(asks_of("poison")))


@pytest.mark.parametrize("is_possible", [True, False])
def test_one_of_several_engines_is_started_again_meanwhile(is_possible, caplog):
    class Several(DyingLLM):
        num_revived = 0

        def revive(self):
            self.num_revived += 1
            if not is_possible:
                raise ConfigError("no memory")
            self.num_dead = 0

    def asks():
        for number, ask in enumerate(asks_of(*(f"p{number}" for number in range(20)))):
            if number in (3, 10, 15):
                llm.num_dead = 1
            yield ask

    llm = Several()
    found = list(Restarting(llm, 2).answer_each(asks()))
    assert sorted(answer.ask.item for answer in found) == list(range(20))
    assert llm.num_revived == (2 if is_possible else 1)
    assert ("the other engines go on: no memory" in caplog.text) is not is_possible


def test_a_batch_with_a_poisonous_item_is_complete(jsonl, tmp_path):
    class Plain(DyingLLM):
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def text_of(self, ask):
            return ask.prompt.text

    source = jsonl(*({"prompt": "poison" if n == 6 else f"p{n}"} for n in range(20)))
    job = plan_batch(source, tmp_path / "out.jsonl", BatchSettings(engine_restarts=2))
    summary = run_batch(job, Plain)
    assert summary.failures == {"500 WorkerDiedError": 1}
    assert sorted(record.line for record in read_records(tmp_path / "out.jsonl")) == [*range(1, 21)]


class Checks:
    """Accepts texts that are listed; `seen` has all."""

    name = "the schema"

    def __init__(self, *good):
        self.good, self.seen = good, []

    def violation(self, text):
        self.seen.append(text)
        if text == "expensive":
            raise TooExpensiveError("the check took more than 5 s")
        return None if text in self.good else f"{text} is not allowed"


class Scripted:
    """Answers a prompt, a list of texts, with the next of them. `asked` has the parameters."""

    def __init__(self):
        self.asked = []

    def answer_each(self, asks):
        for ask in asks:
            self.asked.append(ask.params)
            yield Answer(ask=ask, output=output(f" {ask.prompt.pop(0)}\n"))


def test_an_answer_that_breaks_the_schema_is_asked_again():
    llm, checks = Scripted(), Checks("good")
    params = SamplingParams(temperature=0, seed=5)
    prompts = [["good"], ["bad", "worse", "good"], ["good"], ["bad", "bad", "worst", "good"]]
    asks = [replace(ask, params=params) for ask in asks_of(*prompts)]
    found = by_index(Validated(llm, [checks], 2).answer_each(asks))
    assert sorted(found) == [0, 1, 2, 3]
    assert [found[n].output.is_ok for n in range(4)] == [True, True, True, False]
    failed = found[3]
    assert failed.output.error_code == 422
    assert failed.output.error_msg == (
        "the answer breaks the schema, also after 2 retries: worst is not allowed"
    )
    assert failed.output.outputs.text.strip() == "worst"
    assert failed.output.outputs[0].finish_reason == "error"
    assert isinstance(failed.error, InvalidAnswerError)
    retried = [each for each in llm.asked if each != params]
    assert len({each.seed for each in retried}) == 2
    assert {each.temperature for each in retried} == {0.7}
    assert not any(each.is_greedy for each in retried)


def test_what_was_drawn_keeps_its_temperature():
    llm = Scripted()
    params = SamplingParams(temperature=0.3, top_k=7)
    list(Validated(llm, [Checks()], 1).answer_each([Ask(prompt=["a", "b"], params=params)]))
    assert [(each.temperature, each.top_k) for each in llm.asked] == [(0.3, 7)] * 2


def test_a_check_that_takes_too_long_is_not_repeated():
    llm = Scripted()
    (answer,) = Validated(llm, [Checks()], 3).answer_each(asks_of(["expensive", "x"]))
    assert answer.output.error_msg == "the answer breaks the schema: the check took more than 5 s"
    assert len(llm.asked) == 1


def test_a_model_that_cannot_start_again_is_named(tmp_path, caplog):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    settings = BatchSettings(engine_restarts=3)
    job = plan_batch(tmp_path / "in.jsonl", str(tmp_path / "out.jsonl"), settings)
    run_batch(job, lambda: nullcontext(Answering()))
    assert "engine_restarts = 3 has no effect: Answering does not start" in caplog.text


class Answering:
    def answer_each(self, asks):
        yield from (Answer(ask=ask, output=output("x")) for ask in asks)


def test_items_that_failed_are_not_checked():
    class Failing:
        def answer_each(self, asks):
            for ask in asks:
                error = EngineError("no")
                yield Answer(ask=ask, output=output(message="no", code=500), error=error)

    checks = Checks()
    (answer,) = Validated(Failing(), [checks], 3).answer_each(asks_of("a"))
    assert (answer.output.error_msg, checks.seen) == ("no", [])


def test_asks_are_taken_as_they_are_needed():
    taken = []

    def asks():
        for ask in asks_of(*"01234"):
            taken.append(ask.prompt)
            yield ask

    rounds = Rounds(asks())
    asked = rounds.asks()
    first = next(asked)
    rounds.again(replace(first, num_deaths=1))
    assert [next(asked).prompt for _ in range(2)] == ["0", "1"]
    assert taken == ["0", "1"]
    assert not rounds.is_over


@pytest.mark.full
def test_a_checker_says_what_is_wrong():
    checker = Checker(SCHEMA)
    try:
        assert checker.violation('{"n": 3}') is None
        assert checker.violation('{"n": "x"}') == "n: 'x' is not of type 'integer'"
        assert checker.violation("{}") == "'n' is a required property"
        assert checker.violation("```json\n{}\n```").startswith("it is not JSON")
        assert checker.violation("[" * 100_000).startswith("it is not JSON")
    finally:
        checker.close()


HOSTILE = {
    "a pattern of exponential time": (
        {"type": "string", "pattern": "^(a+)+$"},
        json.dumps("a" * 40 + "b"),
        "took more than",
    ),
    "nested choices": (
        {
            "$defs": {
                **{f"a{n}": {"anyOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 8} for n in range(30)},
                "a30": {"type": "string"},
            },
            "$ref": "#/$defs/a0",
        },
        "3",
        "took more than",
    ),
    "an endless reference": ({"$ref": "#"}, "3", "without an end"),
    "a reference to nowhere": ({"$ref": "#/nowhere"}, "3", "cannot be applied"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_neither_hangs_nor_ends_the_run(name):
    schema, text, words = HOSTILE[name]
    checker = Checker(schema, seconds=1.0)
    try:
        for _ in range(2):  # also in the next process
            try:
                found = checker.violation(text)
            except TooExpensiveError as error:
                found = str(error)
            assert words in found
    finally:
        checker.close()


@pytest.mark.parametrize(
    "ref", ["http://127.0.0.1:9/x", "file:///etc/passwd", "other.json", "//host/x"]
)
def test_nothing_is_fetched(ref):
    with pytest.raises(ConfigError, match="only references within it"):
        Checker({"properties": {"a": {"items": [{"$ref": ref}]}}})


@pytest.mark.full
def test_a_schema_that_is_none(tmp_path):
    with pytest.raises(ConfigError, match="cannot be used: 'nonsense' is not valid"):
        Checker({"type": "nonsense"})
    path = tmp_path / "schema.json"
    for text, words in (("{", "cannot be read as JSON"), ("[]", "must be a JSON object, got list")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            read_schema(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_schema(tmp_path / "missing.json")


@pytest.mark.full
def test_a_batch_with_a_schema(fake_llm, jsonl, tmp_path):
    source, out = jsonl({"prompt": "a"}, {"prompt": "bad"}), tmp_path / "out.jsonl"
    settings = BatchSettings(schema=AnswerSchema.given(validate=SCHEMA), validate_retries=1)
    summary = run_batch(plan_batch(source, out, settings), lambda: fake_llm)
    assert summary.failures == {"422 InvalidAnswerError": 1, "400 MediaError": 1}
    assert len(fake_llm.prompts) == 3
    record = next(each for each in read_records(out) if each.error and each.error.code == 422)
    assert record.text == "a caption of a"
    assert "also after 1 retries: it is not JSON" in record.error.message
    with pytest.raises(ConfigError, match="validate is not set, was"):
        plan_batch(source, out, BatchSettings(mode="resume", retried=NOTHING))
