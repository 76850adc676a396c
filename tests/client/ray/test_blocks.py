"""Rows that kill processes are found, without a cluster: a process that dies is an exception."""

import threading
from collections import Counter

import pytest

from mmdeploy_llm import SamplingParams
from mmdeploy_llm.client.ray.blocks import BlockEngine, SharedLock, num_at_once
from mmdeploy_llm.client.ray.deaths import DeathLedger, groups_of
from mmdeploy_llm.client.ray.rows import Columns
from mmdeploy_llm.client.ray.sizes import PROCESS_BYTES, ActorSize, actor_size, num_beside_reading
from mmdeploy_llm.engine.desk.ask import Ask
from mmdeploy_llm.engine.desk.deaths import MAX_DEATHS
from mmdeploy_llm.engine.desk.outcome import Answer
from mmdeploy_llm.engine.startup.needs import count_needs
from mmdeploy_llm.errors import ConfigError, EngineError
from mmdeploy_llm.testing.tiny import write_tiny
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.values.outputs.request_output import (
    CompletionOutput,
    Completions,
    RequestMetrics,
    RequestOutput,
)

PARAMS = SamplingParams()
MAX_SECONDS = 60


class Killed(BaseException):
    """Ends a process of these tests."""


class KilledByNames:
    """Answers with the prompt in capitals. Prompts of `deadly` kill their process; `met` counts how
    often each prompt was begun, and `groups` lists the prompts that ran together."""

    def __init__(self, *deadly):
        self.deadly, self.met, self.groups = deadly, Counter(), []

    def answer_each(self, asks):
        prompts = [ask.prompt for ask in asks]
        self.met.update(prompts)
        self.groups.append(prompts)
        if set(self.deadly) & set(prompts):
            raise Killed
        for ask in reversed(asks):
            completion = CompletionOutput(text=ask.prompt.upper(), finish_reason="stop")
            output = RequestOutput(
                request_id="r",
                prompt=ask.prompt,
                item=ask.prompt,
                outputs=Completions([completion]),
                finished=True,
                metrics=RequestMetrics(arrival_time=1.0),
            )
            yield Answer(ask=ask, output=output)


def asks_of(*names):
    return [Ask(prompt=name, params=PARAMS) for name in names]


def answered(llm, names, ledger, num_processes=20):
    """The answers of a block that each new process begins again."""
    for _ in range(num_processes):
        try:
            return BlockEngine(llm, ledger).answer("a block", asks_of(*names))
        except Killed:
            continue
    raise AssertionError("the block was never answered")


@pytest.mark.parametrize("deadly", [(), ("n5",), ("n0", "n15"), ("n3", "n4", "n5")])
def test_rows_that_kill_get_an_error_and_the_others_their_answers(deadly):
    llm, names, ledger = (
        KilledByNames(*deadly),
        [f"n{number}" for number in range(16)],
        DeathLedger(),
    )
    found = answered(llm, names, ledger)
    assert [own.ask.prompt for own in found] == names
    for name, own in zip(names, found, strict=True):
        if name in deadly:
            assert (own.output.error_code, own.output.is_ok) == (500, False)
            assert "died 3 times" in own.output.error_msg
        else:
            assert own.output.outputs.text == name.upper()
    assert all(llm.met[name] <= MAX_DEATHS for name in deadly)
    if len(deadly) == 1:  # with all others, in a group of four, alone
        assert [len(group) for group in llm.groups if "n5" in group] == [16, 4, 1]


def test_a_death_that_no_row_has_caused_costs_one_round_of_groups():
    ledger, llm = DeathLedger(), KilledByNames()
    names = [f"n{number}" for number in range(9)]
    ledger.begin("a block", 9)  # by a process that was killed from outside
    assert all(own.output.is_ok for own in answered(llm, names, ledger))
    assert [len(group) for group in llm.groups if group] == [3, 3, 3]


def test_groups():
    assert groups_of([0, 1, 1, 2, 3, 1, 1, 2]) == [[1, 2], [5, 6], [3], [7]]
    assert groups_of([0, 3]) == []


def test_the_ledger_forgets_what_has_ended_and_what_was_innocent():
    ledger = DeathLedger()
    assert ledger.begin("a", 4) == []
    assert ledger.begin("a", 4) == [1, 1, 1, 1]
    ledger.run("a", [0, 1])
    ledger.run("a", [2, 3])
    assert ledger.begin("a", 4) == [0, 0, 2, 2]
    ledger.end("a")
    assert ledger.begin("a", 4) == []


def test_the_ledger_counts_deaths_at_loading_in_a_row():
    ledger = DeathLedger()
    assert [ledger.load("x"), ledger.load("x"), ledger.load("y")] == [0, 1, 0]
    ledger.loaded("x")
    assert ledger.load("x") == 0


def test_a_dead_engine_ends_its_process():
    class Dead:
        def answer_each(self, asks):
            yield from ()
            raise EngineError("gone")

    def on_death(error):
        raise Killed(str(error))

    with pytest.raises(Killed, match="gone"):
        BlockEngine(Dead(), DeathLedger(), on_death).answer("a", asks_of("x"))


def test_who_is_alone_is_alone():
    lock, inside, most = SharedLock(), [], []
    begin = threading.Barrier(6)

    def enter(context, name):
        begin.wait(MAX_SECONDS)
        for _ in range(50):
            with context():
                inside.append(name)
                most.append(tuple(inside))
                inside.remove(name)

    threads = [threading.Thread(target=enter, args=(lock.shared, "shared")) for _ in range(4)]
    threads += [threading.Thread(target=enter, args=(lock.alone, "alone")) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(MAX_SECONDS)
    assert len(most) == 300
    assert all(seen == ("alone",) for seen in most if "alone" in seen)


@pytest.mark.parametrize(
    ("num_seqs", "num_rows", "expected"), [(32, 64, 2), (32, 8, 8), (256, 64, 8)]
)
def test_an_engine_has_twice_what_it_computes(num_seqs, num_rows, expected):
    assert num_at_once(num_seqs, num_rows) == expected


def test_a_prompt_names_columns_only():
    columns = Columns(prompt="{{{title}}} {year}", image_column="image")
    row = {"title": "{year}", "year": 7, "image": [b"a", {"bytes": None, "path": "b.png"}]}
    prompt = columns.prompt_of(row)
    (message,) = prompt["messages"]
    assert [part.get("image") for part in message["content"]] == [b"a", "b.png", None]
    assert message["content"][2]["text"] == "{{year}} 7"
    assert "nothing in column 'year'" in str(columns.prompt_of({**row, "year": None}))
    for wrong in ("{title.__class__}", "{0[a]}", "{}", "{title!r}", "{title:9}", "{"):
        with pytest.raises(ConfigError):
            Columns(prompt=wrong)


def test_columns_are_checked_by_name():
    columns = Columns(prompt="{title}")
    columns.check(["title", "id"])
    with pytest.raises(ConfigError, match="no column 'title'"):
        columns.check(["id"])
    with pytest.raises(ConfigError, match="output_prefix"):
        columns.check(["title", "text"])
    Columns(prompt="{title}", output_prefix="caption_").check(["title", "text"])


def test_a_cluster_holds_as_many_actors_as_its_machines():
    size = ActorSize(num_cpus=2, num_gpus=0, memory=3 * 2**30, num_seqs=1, options={})
    nodes = [{"CPU": 8.0, "memory": 10.0 * 2**30}, {"CPU": 3.0, "memory": 64.0 * 2**30}, {}]
    assert size.num_in(nodes) == 3 + 1
    with pytest.raises(ConfigError, match="the most are 1 CPUs"):
        size.num_in([{"CPU": 1.0}])
    assert num_beside_reading(size, nodes) == 4
    assert num_beside_reading(size, [{"CPU": 8.0, "memory": 64.0 * 2**30}]) == 3
    with pytest.raises(ConfigError, match="takes all 2 CPUs"):
        num_beside_reading(size, [{"CPU": 2.0, "memory": 64.0 * 2**30}])
    cards = ActorSize(num_cpus=1, num_gpus=4, memory=None, num_seqs=1, options={})
    assert cards.num_in([{"CPU": 64.0, "GPU": 8.0}]) == 2
    assert cards.resources == {"num_cpus": 1, "num_gpus": 4}


@pytest.mark.full
def test_an_actor_is_as_large_as_its_engines(tmp_path, monkeypatch):
    model = str(write_tiny("qwen2", tmp_path, num_hidden_layers=1))
    options = {"num_threads": 3, "max_num_seqs": 5, "kv_cache_memory": 2**22}
    size = actor_size(model, options, has_gpus=False)
    needs = count_needs(EngineConfig(model=model, device="cpu", **options), free=2**33)
    assert 0 < needs.kv_cache <= 2**22
    assert size.resources == {
        "num_cpus": 3,
        "num_gpus": 0,
        "memory": needs.weights + needs.kv_cache + PROCESS_BYTES,
    }
    assert (size.num_seqs, size.options) == (5, {**options, "device": "cpu"})
    # An engine that divides what is free when it starts takes what was reserved for it.
    open_size = actor_size(model, {"num_threads": 1}, has_gpus=False)
    weights = open_size.memory - PROCESS_BYTES - open_size.options["kv_cache_memory"]
    assert weights == needs.weights
    ranks = {"tensor_parallel_size": 2, "data_parallel_size": 3}
    cards = actor_size(model, ranks, has_gpus=True)
    assert cards.resources == {"num_cpus": 3, "num_gpus": 6}
    assert (cards.num_seqs, cards.options) == (3 * 256, {**ranks, "device": "cuda"})
    # An actor works in another folder.
    (tmp_path / "my.py").touch()
    monkeypatch.chdir(tmp_path)
    options = actor_size(model, {"plugins": ["my.py"]}, has_gpus=True).options
    assert (options["plugins"], options["plugin_files"]) == (None, (str(tmp_path / "my.py"),))
    with pytest.raises(ConfigError, match="Ray chooses the cards"):
        actor_size(model, {"device": "cuda:1"}, has_gpus=True)


def test_columns_hold_media_of_any_kind():
    columns = Columns(
        prompt="{title}",
        audio_column="sound",
        media_column={"sketch": ["front", "back"], "pdf": "scan"},
    )
    assert columns.needed == ("title", "sound", "front", "back", "scan")
    row = {"title": "A", "sound": {"bytes": b"w", "path": "a.wav"}, "scan": "s.pdf"}
    prompt = columns.prompt_of({**row, "front": b"f", "back": b"b"})
    assert prompt["messages"][0]["content"] == [
        {"type": "audio", "audio": b"w"},
        {"type": "sketch", "sketch": b"f"},
        {"type": "sketch", "sketch": b"b"},
        {"type": "pdf", "pdf": "s.pdf"},
        {"type": "text", "text": "A"},
    ]
