"""A model that is released while another thread waits to start it."""

import threading

import pytest

from mmdeploy_llm import ModelPool
from mmdeploy_llm.client.aio import pool as pool_module
from mmdeploy_llm.engine.startup.needs import MemoryNeeds


class FakeLLM:
    """An AsyncLLM that loads nothing. `all` are those that were made; closing waits for `gate`."""

    all: list

    def __init__(self, config, **options):
        self.is_closed = False
        self.all.append(self)

    def finish(self, *, abort):
        self.is_closing.set()
        assert self.gate.wait(60)

    def close(self):
        self.is_closed = True


@pytest.fixture
def llms(monkeypatch):
    monkeypatch.setattr(FakeLLM, "all", [], raising=False)
    monkeypatch.setattr(FakeLLM, "gate", threading.Event(), raising=False)
    monkeypatch.setattr(FakeLLM, "is_closing", threading.Event(), raising=False)
    monkeypatch.setattr(pool_module, "AsyncLLM", FakeLLM)
    needs = MemoryNeeds(device="cpu", num_threads=1, weights=1, kv_cache=1)
    monkeypatch.setattr("mmdeploy_llm.engine.startup.needs.count_needs", lambda config, left: needs)
    return FakeLLM.all


def in_thread(call):
    """Starts `call` in a thread; returns the thread and the list that gets what it raises."""
    raised = []

    def run():
        try:
            call()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised


def test_a_start_that_waits_behind_a_release_loads_nothing(llms):
    pool = ModelPool(memory=2**20)
    pool.install("a", "model")
    pool.start("a")
    releasing, _ = in_thread(lambda: pool.release("a"))
    assert FakeLLM.is_closing.wait(60)
    starting, raised = in_thread(lambda: pool.start("a"))
    starting.join(0.2)
    assert starting.is_alive()
    FakeLLM.gate.set()
    starting.join(60)
    releasing.join(60)
    assert [type(error) for error in raised] == [KeyError]
    assert "was released before it was started" in str(raised[0])
    assert all(llm.is_closed for llm in llms)
    assert len(pool) == 0
