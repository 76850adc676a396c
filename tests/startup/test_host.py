"""What an engine changes of its process, and puts back."""

import gc
from types import SimpleNamespace

from mmdeploy_llm.startup.host import Host


def host():
    machine = SimpleNamespace(kernels=None, placement=None)
    return Host(SimpleNamespace(num_threads=1, device="cpu"), machine)


def test_what_was_loaded_is_examined_again_after_the_last_engine():
    before = gc.get_freeze_count()
    first, second = host(), host()
    first.settle()
    loaded = gc.get_freeze_count()
    assert loaded > before
    later = [[] for _ in range(1000)]
    second.settle()
    assert gc.get_freeze_count() > loaded + len(later) / 2
    first.close()
    assert gc.get_freeze_count() >= loaded
    second.close()
    assert gc.get_freeze_count() == 0


def test_an_engine_that_is_dropped_lets_go():
    owner = host()
    owner.settle()
    del owner
    assert gc.get_freeze_count() == 0


def test_a_program_that_freezes_objects_keeps_them_so():
    gc.freeze()
    try:
        own = gc.get_freeze_count()
        owner = host()
        owner.settle()
        owner.close()
        assert own - 100 < gc.get_freeze_count() <= own
    finally:
        gc.unfreeze()
