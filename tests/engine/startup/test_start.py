"""A start that fails leaves nothing over, wherever it fails."""

import threading
from types import SimpleNamespace

import pytest
import torch

from mmdeploy_llm import LLM
from mmdeploy_llm.engine.startup import host
from mmdeploy_llm.engine.startup import start as starting
from mmdeploy_llm.errors import CheckpointError, ConfigError, PluginError
from mmdeploy_llm.media.loading.kinds import ModelMedia
from mmdeploy_llm.system.portable import children
from mmdeploy_llm.values.options.config import EngineConfig

CORE = "mmdeploy_llm"
# In the order of a start: where the function is looked up that fails.
STAGES = (
    "startup.start.read_machine",
    "startup.start.final_options",
    "startup.media._build_splitters",
    "startup.media.within_budget",
    "startup.start.new_table",
    "startup.computer.load_model",
    "startup.computer.plan_cache",
    "startup.computer.ready_runner",
    "startup.host.Host.settle",
    "startup.rooms.check_eos",
    "startup.rooms.build_intake",
    "startup.rooms.Engine",
    "startup.start.report_load",
)
AFTER_THE_RANKS = ("startup.start._log", "startup.rooms.build_intake", "startup.rooms.Engine")
SMALL = {"device": "cpu", "num_threads": 2, "num_gpu_blocks_override": 64, "max_num_seqs": 4}
SHARED = ("KERNEL_CACHE", "EXAMINED_OBJECTS", "FREED_MEMORY", "CROWD")


def fails(*_, **__):
    raise ConfigError("this stage fails")


@pytest.fixture
def left(monkeypatch):
    """Returns what has begun since the fixture did and has not ended, as names."""
    begun, before = [], set(threading.enumerate())
    held = {name for name in SHARED if getattr(host, name).is_held}
    start = children.start
    monkeypatch.setattr(
        children, "start", lambda *args, **kwargs: begun.append(start(*args, **kwargs)) or begun[-1]
    )

    def found():
        threads = [each for each in threading.enumerate() if each not in before]
        threads = [each for each in threads if each.name != "tqdm_monitor"]  # one of a program
        for each in threads:  # a reader of what has been killed ends a moment later
            each.join(60)
        return [
            *(each.name for each in threads if each.is_alive()),
            *(f"process {child.process.pid}" for child in begun if child.process.poll() is None),
            *(name for name in SHARED if name not in held and getattr(host, name).is_held),
        ]

    return SimpleNamespace(found=found, begun=begun)


@pytest.fixture
def closed(monkeypatch):
    """The processors that were built and are not closed."""
    from mmdeploy_llm.hooks import PluginManager

    opened, build = [], PluginManager.build

    def built(manager, spec, *args):
        made = build(manager, spec, *args)
        if hasattr(made, "decode") and hasattr(made, "close"):
            opened.append(made)
            close = made.close
            monkeypatch.setattr(
                made, "close", lambda: (opened.remove(made), close()), raising=False
            )
        return made

    monkeypatch.setattr(PluginManager, "build", built)
    return opened


@pytest.mark.one_is_quick
@pytest.mark.parametrize("stage", STAGES)
def test_no_thread_and_no_open_processor_is_left_of_a_start_that_fails(
    stage, monkeypatch, left, closed
):
    """The error is held meanwhile, whose traceback refers to all that was made."""
    monkeypatch.setattr(f"{CORE}.engine.{stage}", fails)
    threads = torch.get_num_threads()
    with pytest.raises(ConfigError, match="this stage fails") as error:
        LLM("shapes-vl", **SMALL)
    assert not left.found()
    assert not closed
    assert torch.get_num_threads() == threads
    assert error.value is not None


@pytest.mark.full
@pytest.mark.parametrize("stage", AFTER_THE_RANKS)
def test_no_rank_is_left_of_a_start_that_fails_after_theirs(stage, monkeypatch, left):
    monkeypatch.setattr(f"{CORE}.engine.{stage}", fails)
    with pytest.raises(ConfigError, match="this stage fails") as error:
        LLM("shapes-vl", tensor_parallel_size=2, **SMALL)
    assert len(left.begun) == 2
    assert not left.found()
    assert error.value is not None


@pytest.mark.full
@pytest.mark.parametrize("stage", ["desk.many.ManyDesks", "startup.start.report_load"])
def test_no_engine_is_left_of_a_start_that_fails_after_theirs(stage, monkeypatch, left, caplog):
    """They end as those that are closed do, and none is said to have died."""
    monkeypatch.setattr(f"{CORE}.engine.{stage}", fails)
    with pytest.raises(ConfigError, match="this stage fails") as error:
        LLM("shapes-vl", data_parallel_size=2, **SMALL)
    assert len(left.begun) == 2
    assert not left.found()
    assert "died" not in caplog.text
    assert error.value is not None


@pytest.mark.full
def test_the_first_engine_ends_where_the_second_cannot_be_loaded(monkeypatch, left):
    from mmdeploy_llm.engine.desk.remote import RemoteDesk

    opened, open_one = [], RemoteDesk.open

    def open_only_one(desk):
        if opened:
            raise PluginError("the second fails")
        opened.append(desk)
        open_one(desk)

    monkeypatch.setattr(RemoteDesk, "open", open_only_one)
    with pytest.raises(PluginError, match="the second fails") as error:
        LLM("shapes-vl", data_parallel_size=2, **SMALL)
    assert not left.found()
    assert error.value is not None


def test_processors_are_closed_when_the_weights_cannot_be_read(monkeypatch, caplog):
    """They are built first, and may hold processes. One that cannot be closed prevents neither the
    others nor the error that is to be told."""
    closed = []

    def cannot():
        raise OSError("it hangs")

    def fails(*_):
        raise CheckpointError("a file is missing")

    broken, sound = SimpleNamespace(close=cannot), SimpleNamespace(close=lambda: closed.append(1))
    media = ModelMedia(processors={"video": broken, "image": sound})
    monkeypatch.setattr(starting, "build_media", lambda *_: media)
    monkeypatch.setattr(starting, "build_computer", fails)
    with pytest.raises(CheckpointError, match="a file is missing"):
        starting.start(EngineConfig(model="shapes-vl"))
    assert closed == [1]
    assert "cannot be closed" in caplog.text
