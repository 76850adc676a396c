"""No garbage is collected while an engine is loaded, and what the program has set stays."""

from __future__ import annotations

import gc
from gc import get_freeze_count  # tests/conftest.py replaces it in the module

import pytest

from mmdeploy_llm.system.processes import without_collections


@pytest.fixture(autouse=True)
def nothing_is_frozen(monkeypatch):
    """Lets the collector look at everything again, as in a program that has not called gc.freeze:
    the suite has called it."""
    monkeypatch.setattr(gc, "get_freeze_count", get_freeze_count)
    gc.unfreeze()
    yield
    gc.freeze()


def test_it_is_put_back():
    def fail():
        assert not gc.isenabled()
        raise KeyError

    assert gc.isenabled()
    with pytest.raises(KeyError), without_collections():
        fail()
    assert gc.isenabled()


def test_what_was_made_is_old():
    with without_collections():
        made = [[number] for number in range(50_000)]
    assert gc.get_count()[0] < len(made)
    assert any(each is made for each in gc.get_objects(2))


def test_what_an_engine_has_frozen_is_not_counted(monkeypatch):
    monkeypatch.setattr(gc, "get_freeze_count", pytest.fail)
    with without_collections():
        made = [[number] for number in range(50_000)]
        gc.freeze()
    assert not any(each is made for each in gc.get_objects())


@pytest.mark.full
def test_a_program_that_collects_nothing_or_has_frozen_objects_keeps_that():
    gc.freeze()
    before = gc.get_freeze_count()
    with without_collections():
        made = [[number] for number in range(50_000)]
    assert abs(gc.get_freeze_count() - before) < 100  # some of them die meanwhile
    assert any(each is made for each in gc.get_objects())
    gc.disable()
    try:
        with without_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
