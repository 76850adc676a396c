"""Each broken observer fails its check; so does a plugin that changes the process."""

import os
import re
import sys
import threading
import time
from textwrap import dedent

import pytest

from mmdeploy_llm.hooks import hookimpl
from mmdeploy_llm.testing import CheckFailed
from mmdeploy_llm.testing.plugins import fresh, left_over, observers, probe
from mmdeploy_llm.testing.plugins.observers import CHECKS
from mmdeploy_llm.testing.plugins.plugin_subject import PluginSubject

NAMES = [check.__name__ for check in CHECKS]
CHANGE, CHANGES = fresh.changes_of, probe.CHANGES


def sleeps(stats):
    time.sleep(0.001)


def hangs(stats):
    time.sleep(30)


class Sometimes:
    def __init__(self):
        self.count = 0

    def __call__(self, stats):
        self.count += 1
        if self.count % 20 == 0:
            time.sleep(0.02)


def divides(stats):
    return 1 / stats.num_scheduled_tokens


def expects_reasons(record):
    return {"stop": 1, "length": 2}[record.finish_reason]


def counts_images(record):
    for kind, number in record.num_media_tokens.items():
        assert kind in ("image", "video"), number


def starts_a_thread(info):
    threading.Thread(target=time.sleep, args=(5,), daemon=True, name="exporter").start()


def sets_the_environment(info):
    os.environ["KIT_MADE_UP"] = "1"


BROKEN = [
    # hook, function, check that fails, regex for its message
    ("on_step", sleeps, "observers_are_quick", r"on_step takes \S+ us on average, 500 us are al"),
    ("on_step", hangs, "observers_are_quick", "on_step has not ended after 0.3 s; never block"),
    ("on_step", Sometimes(), "observers_are_quick", r"one of 60 calls of on_step takes \S+ s|aver"),
    ("on_step", divides, "observers_bear_any_record", "raised ZeroDivisionError"),
    ("on_request_finished", expects_reasons, "observers_bear_any_record", "raised KeyError"),
    ("on_request_finished", counts_images, "observers_bear_any_record", "raised AssertionError"),
    ("on_engine_start", starts_a_thread, "observers_leave_nothing", "the thread 'exporter' still"),
    (
        "on_engine_start",
        sets_the_environment,
        "observers_leave_nothing",
        "the names in os.environ has changed, new is 'KIT_MADE_UP'",
    ),
]


def observing(hook, function):
    """Returns the subject for a module with this hook."""
    module = type(sys)("kit_observer")

    def on_step(stats):
        function(stats)

    def on_request_finished(record):
        function(record)

    def on_engine_start(info):
        function(info)

    setattr(module, hook, hookimpl(locals()[hook]))
    return PluginSubject.of(module)


@pytest.mark.one_is_quick
@pytest.mark.parametrize(("hook", "function", "name", "message"), BROKEN)
def test_a_broken_observer_fails(failures, monkeypatch, hook, function, name, message):
    monkeypatch.setattr(left_over, "GRACE", 0.1)
    monkeypatch.setattr(observers, "BLOCKED", 0.3)
    monkeypatch.setattr(observers, "LONGEST_CALL", 0.015)
    monkeypatch.delenv("KIT_MADE_UP", raising=False)
    found = failures([CHECKS[NAMES.index(name)]], observing(hook, function))
    os.environ.pop("KIT_MADE_UP", None)
    assert re.search(message, found[name]), found[name]


def test_a_thread_with_the_number_of_one_that_has_ended_is_told(monkeypatch):
    monkeypatch.setattr(left_over, "GRACE", 0.0)
    end = threading.Event()
    for name in ("before", "after"):
        thread = threading.Thread(target=end.wait, name=name)
        thread.start()
        if name == "before":
            left = left_over.Left()
            end.set()
            thread.join()
            end.clear()
    problem = left.difference()
    end.set()
    thread.join()
    assert "the thread 'after' still runs" in problem


def test_a_good_observer_passes(failures):
    seen = []
    for hook in ("on_step", "on_request_finished", "on_engine_start"):
        assert failures(CHECKS, observing(hook, seen.append)) == {}
    assert seen


def test_every_check_has_a_broken_observer():
    assert {name for *_, name, _ in BROKEN} == set(NAMES)


CHANGING = {
    "kit_patches": (
        "import json, functools\n"
        "before = json.loads\n"
        "json.loads = functools.wraps(before)(lambda *a, **k: before(*a, **k))\n",
        "pass",
        "changes the process when it is imported and lists .*: json.loads is another object",
    ),
    "kit_settles": (
        "import warnings\nwarnings.simplefilter('ignore')\n",
        "pass",
        "warnings.filters has changed, new is .'ignore'",
    ),
    "kit_dtype": (
        "",
        "import torch\ntorch.set_default_dtype(torch.bfloat16)",
        "when its factories are imported: torch.get_default_dtype.. is torch.bfloat16",
    ),
    "kit_linear": (
        "",
        "import torch\ndef forward(self, x):\n    return x\ntorch.nn.Linear.forward = forward\n",
        "torch.nn.Linear.forward is another object; do not replace what others use",
    ),
    "kit_thread": (
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(9,), daemon=True, name='warm').start()\n",
        "pass",
        "when it is imported .*: the thread 'warm' still runs",
    ),
}
SPEC = """
from mmdeploy_llm.hooks import ReasoningParserSpec, hookimpl
@hookimpl
def provide_reasoning_parsers():
    return [ReasoningParserSpec(name={name!r}, factory="{name}_factory:Parser")]
"""
PARSER = "from mmdeploy_llm.testing.fakes import FakeReasoningParser as Parser\n"


@pytest.mark.full  # a process that imports torch
def test_a_plugin_that_changes_the_process(tmp_path, monkeypatch):
    """One process imports all of them; each change is told of the module that made it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, (source, factory, _) in CHANGING.items():
        (tmp_path / f"{name}.py").write_text(source + SPEC.format(name=name))
        (tmp_path / f"{name}_factory.py").write_text(PARSER + dedent(factory))
    found = CHANGE(list(CHANGING))
    monkeypatch.setattr(fresh, "changes_of", lambda modules: found)
    for name, (*_, message) in CHANGING.items():
        with pytest.raises(AssertionError, match=message):
            fresh.imports_change_nothing(PluginSubject.of(name))


ALONE = """
from mmdeploy_llm.hooks import (
    CorpusFormatSpec, LogitsProcessorSpec, ReasoningParser, ReasoningParserSpec, hookimpl
)
class Own(ReasoningParser):
    def feed(self, text): return []
    def finish(self): return []
@hookimpl
def provide_{kind}s():
    return [{spec}(name="own", {field}="{name}_factory:Own")]
"""
PARSER_HOOK = {"kind": "reasoning_parser", "spec": "ReasoningParserSpec", "field": "factory"}
LOGITS_HOOK = {"kind": "logits_processor", "spec": "LogitsProcessorSpec", "field": "factory"}
CORPUS_HOOK = {"kind": "corpus_format", "spec": "CorpusFormatSpec"}
CORPUS_HOOK["field"] = "suffixes=('.own',), reader"
TOLD = {  # source, of the factory, its hook, what is told; None: the one process cannot tell
    "kit_one_patches": (
        "import json\njson.loads = lambda *words: None\n",
        "",
        PARSER_HOOK,
        "when it is imported and lists what it provides: json.loads is another object",
    ),
    "kit_one_waits": (
        "",
        "import socket\nsocket.setdefaulttimeout(3)",
        PARSER_HOOK,
        r"when its factories are imported: socket.getdefaulttimeout\(\) is 3",
    ),
    "kit_one_reads": (
        "",
        "import warnings\nwarnings.simplefilter('ignore')",
        CORPUS_HOOK,
        "when its factories are imported: warnings.filters has changed",
    ),
    "kit_one_draws": (
        "",
        "import PIL.Image\nPIL.Image.MAX_IMAGE_PIXELS = None",
        PARSER_HOOK,
        "when its factories are imported: PIL.Image.MAX_IMAGE_PIXELS is None",
    ),
    "kit_one_dtype": (
        "",
        "import torch\ntorch.set_default_dtype(torch.bfloat16)",
        LOGITS_HOOK,
        r"when its factories are imported: torch.get_default_dtype\(\) is torch.bfloat16",
    ),
    "kit_two_dtype": (
        "",
        "import torch\ntorch.set_default_dtype(torch.bfloat16)",
        PARSER_HOOK,
        None,
    ),
    "kit_one_good": ("import json", "import socket, PIL.Image", PARSER_HOOK, ""),
}


@pytest.mark.one_is_quick
@pytest.mark.parametrize("name", TOLD)
def test_one_process_tells_what_a_plugin_changes(name, tmp_path, monkeypatch):
    """A second one, which has imported torch and transformers before, is asked where the plugin is
    the first that imports a library."""
    source, factory, hook, told = TOLD[name]
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / f"{name}.py").write_text(source + ALONE.format(name=name, **hook))
    (tmp_path / f"{name}_factory.py").write_text(f"{factory}\nclass Own: pass\n")
    asked = []
    monkeypatch.setattr(probe, "CHANGES", CHANGES)
    monkeypatch.setattr(fresh, "changes_of", lambda modules: asked.append(modules) or {})
    if told:
        with pytest.raises(CheckFailed, match=told):
            fresh.imports_change_nothing(PluginSubject.of(name))
    else:
        fresh.imports_change_nothing(PluginSubject.of(name))
    assert asked == ([(name,)] if told is None else [])


@pytest.mark.parametrize("end", ["import os\nos._exit(0)", "import time\ntime.sleep(60)"])
def test_factories_that_end_or_hold_the_process_are_left_to_the_second(end, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(probe, "SECONDS", 3.0)
    monkeypatch.setattr(probe, "CHANGES", CHANGES)
    (tmp_path / "kit_ends.py").write_text(ALONE.format(name="kit_ends", **PARSER_HOOK))
    (tmp_path / "kit_ends_factory.py").write_text(f"{end}\nclass Own: pass\n")
    found = PluginSubject.of("kit_ends").probe
    assert found["changes"] is None
    assert found["by"] == {}


def test_a_module_that_holds_the_process_is_told(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(probe, "SECONDS", 2.0)
    (tmp_path / "kit_holds.py").write_text("import time\ntime.sleep(60)\n")
    with pytest.raises(CheckFailed, match="importing 'kit_holds' and listing took over 2 s"):
        fresh.imports_change_nothing(PluginSubject.of("kit_holds"))
