"""run_batch with engines whose processes are killed: every item has its record, and the answers are
those of an engine that lives."""

import os
import signal
import threading
import time
import weakref
from pathlib import Path

import pytest

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.data.outputs.scan import read_records
from mmdeploy_llm.engine.desk import many
from mmdeploy_llm.engine.engine import Engine
from mmdeploy_llm.engine.intake.intake import Intake
from mmdeploy_llm.errors import WorkerDiedError

pytestmark = pytest.mark.full

OPTIONS = {
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "num_gpu_blocks_override": 64,
    "num_threads": 2,
    "num_intake_threads": 1,
    "quiet": True,
}
PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
ROWS = [{"id": number, "prompt": f"prompt {number}"} for number in range(24)]


@pytest.fixture(scope="module")
def folder(tiny_folder):
    return tiny_folder("qwen2")


@pytest.fixture(scope="module")
def expected(folder):
    with LLM(str(folder), **OPTIONS) as llm:
        outputs = llm.generate([row["prompt"] for row in ROWS], PARAMS, use_tqdm=False)
    return {
        row["id"]: output.outputs.text.strip() for row, output in zip(ROWS, outputs, strict=True)
    }


def kill_children():
    """Kills the processes that this one has started."""
    for path in Path("/proc/self/task").glob("*/children"):
        for pid in path.read_text().split():
            os.kill(int(pid), signal.SIGKILL)


@pytest.mark.parametrize(
    "option",
    ["tensor_parallel_size", pytest.param("data_parallel_size", marks=pytest.mark.long)],
)
def test_an_engine_that_dies_is_started_again(folder, expected, option, tmp_path):
    def rows():
        for row in ROWS:
            if row["id"] in (6, 15):
                kill_children()
            yield row

    out = tmp_path / "out.jsonl"
    with LLM(str(folder), **{option: 2}, **OPTIONS) as llm:
        summary = llm.run_batch(rows(), out, sampling_params=PARAMS, use_tqdm=False)
        assert llm.death is None
    assert summary.num_failed == 0
    assert {record.id: record.text for record in read_records(out)} == expected
    assert len(out.read_bytes().splitlines()) == len(ROWS)


@pytest.mark.long
def test_one_of_several_engines_is_started_again_while_the_other_goes_on(
    folder, expected, tmp_path
):
    def rows():
        for row in ROWS:
            if row["id"] == 6:
                os.kill(llm._desk.desks[0].pid, signal.SIGKILL)
                while not llm.num_dead:
                    time.sleep(0.01)
            yield row

    out = tmp_path / "out.jsonl"
    with LLM(str(folder), data_parallel_size=2, **OPTIONS) as llm:
        before = [desk.pid for desk in llm._desk.desks]
        summary = llm.run_batch(rows(), out, sampling_params=PARAMS, use_tqdm=False)
        after = [desk.pid for desk in llm._desk.desks]
        assert llm.num_dead == 0
        outputs = llm.generate(["prompt 1", "prompt 2"], PARAMS, use_tqdm=False)
    assert after[0] != before[0]
    assert after[1] == before[1]
    assert summary.num_failed == 0
    assert {record.id: record.text for record in read_records(out)} == expected
    assert [each.outputs.text.strip() for each in outputs] == [expected[1], expected[2]]


@pytest.mark.long
def test_an_item_that_kills_its_engine_is_isolated(folder, expected, tmp_path, monkeypatch):
    real = Intake.accept
    deaths = []

    def accept(self, prompt, *args, **kwargs):
        if "poison" in (prompt.text or ""):
            deaths.append(threading.current_thread())
            kill_children()
        return real(self, prompt, *args, **kwargs)

    monkeypatch.setattr(Intake, "accept", accept)
    out = tmp_path / "out.jsonl"
    rows = [*ROWS[:9], {"id": "poison", "prompt": "poison"}, *ROWS[9:]]
    with LLM(str(folder), tensor_parallel_size=2, **OPTIONS) as llm:
        summary = llm.run_batch(rows, out, sampling_params=PARAMS, use_tqdm=False)
    found = {record.id: record for record in read_records(out)}
    guilty = found.pop("poison")
    assert summary.failures == {"500 WorkerDiedError": 1}
    assert guilty.error.message.startswith("the engine died 3 times while it computed this item")
    assert len(deaths) == 3
    assert {name: record.text for name, record in found.items()} == expected


def test_an_engine_in_this_process_is_started_again(folder, expected, tmp_path, monkeypatch):
    real, calls = Engine.step, []

    def step(self):
        calls.append(None)
        if len(calls) in (5, 30):
            raise RuntimeError("something broke")
        return real(self)

    monkeypatch.setattr(Engine, "step", step)
    out = tmp_path / "out.jsonl"
    with LLM(str(folder), **OPTIONS) as llm:
        summary = llm.run_batch(ROWS, out, sampling_params=PARAMS, use_tqdm=False)
        (output,) = llm.generate("prompt 3", PARAMS, use_tqdm=False)
    assert len(calls) > 30
    assert summary.num_failed == 0
    assert {record.id: record.text for record in read_records(out)} == expected
    assert output.outputs.text.strip() == expected[3]


def test_two_models_are_never_in_memory(folder, monkeypatch):
    with LLM(str(folder), **OPTIONS) as llm:
        (before,) = llm.generate("prompt 3", PARAMS, use_tqdm=False)
        first, real, found = weakref.ref(llm.model), many.open_desk, []

        def open_desk(*args):
            found.append(first())
            return real(*args)

        monkeypatch.setattr(many, "open_desk", open_desk)
        llm.restart()
        assert found == [None]
        (after,) = llm.generate("prompt 3", PARAMS, use_tqdm=False)
    assert after.outputs.token_ids == before.outputs.token_ids


def test_without_restarts_the_run_ends_and_keeps_what_is_done(folder, tmp_path):
    def rows():
        for row in ROWS:
            if row["id"] == 15:
                kill_children()
            yield row

    out = tmp_path / "out.jsonl"
    with (
        LLM(str(folder), tensor_parallel_size=2, **OPTIONS) as llm,
        pytest.raises(WorkerDiedError),
    ):
        llm.run_batch(rows(), out, sampling_params=PARAMS, use_tqdm=False, engine_restarts=0)
    records = list(read_records(out))
    assert [record for record in records if record.is_ok]
    assert {record.failure for record in records if not record.is_ok} <= {
        "500 WorkerDiedError",
        "500 EngineError",
    }
