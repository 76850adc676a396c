"""An engine changes some things of its process, and puts them back."""

from types import SimpleNamespace

import pytest

from mmdeploy_llm.engine.startup import host as module
from mmdeploy_llm.kernels import TORCH


class Collector:
    """Stands for Python's module gc, which engines of other tests in this process hold, too."""

    def __init__(self):
        self.num_frozen = 0

    def freeze(self):
        self.num_frozen += 1000

    def unfreeze(self):
        self.num_frozen = 0

    def get_freeze_count(self):
        return self.num_frozen


@pytest.fixture
def collector(monkeypatch):
    own = Collector()
    monkeypatch.setattr(module, "gc", own)
    examined = module.SharedChange(lambda: own.unfreeze)
    monkeypatch.setattr(module, "EXAMINED_OBJECTS", examined)
    return own


def new_host():
    machine = SimpleNamespace(kernels=TORCH, placement=None)
    return module.Host(SimpleNamespace(num_threads=1, device="cpu"), machine)


def test_what_was_loaded_is_examined_again_after_the_last_engine(collector):
    first, second = new_host(), new_host()
    first.settle()
    second.settle()
    assert collector.num_frozen == 2000
    first.close()
    assert collector.num_frozen == 2000
    second.close()
    assert collector.num_frozen == 0


def test_an_engine_that_is_dropped_lets_go(collector):
    owner = new_host()
    owner.settle()
    assert collector.num_frozen
    del owner
    assert not collector.num_frozen


def test_a_program_that_freezes_objects_keeps_them_so(collector):
    collector.num_frozen = 7
    owner = new_host()
    owner.settle()
    owner.close()
    assert collector.num_frozen == 7
