"""ModelPool: several models in one process, which start, stop and start again under load with exact
answers, share the cores by a rule, and give their memory and threads back."""

import gc
import random
import threading
import time

import pytest
import torch

from mmdeploy_llm import ConfigError, EngineError, ModelPool, SamplingParams
from mmdeploy_llm.client.aio import pool as pools

GREEDY = SamplingParams(temperature=0, max_tokens=12)
LONG = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
TEXTS = ["The quick brown fox", "a", "There are two of them; a red circle"]
FAMILIES = {"text": "mistral", "vl": "qwen2_5_vl", "moe": "ernie4_5_vl_moe"}
OPTIONS = {
    "block_size": 16,
    "max_model_len": 512,
    "kv_cache_memory": 2**22,
    "use_warmup": False,
    "quiet": True,
}


@pytest.fixture
def pool():
    with ModelPool() as pool:
        yield pool


@pytest.fixture
def folder(tiny_folder):
    return str(tiny_folder("mistral"))


def tokens(output):
    return list(output.outputs.token_ids)


def states(pool):
    return {status.name: status.state for status in pool.status()}


class TestLifeCycle:
    @pytest.mark.full
    def test_states(self, pool, folder, reference_of):
        expected = reference_of("mistral").generate(TEXTS[0])
        pool.install("a", folder, **OPTIONS)
        pool.install("b", folder, **OPTIONS)
        assert states(pool) == {"a": "installed", "b": "installed"}
        assert pool.start("a") is pool["a"] is pool.start("a")
        assert states(pool) == {"a": "running", "b": "installed"}
        for _ in range(2):
            assert tokens(pool["a"].submit(TEXTS[0], GREEDY).result()) == expected
            pool.stop("a")
            assert states(pool) == {"a": "stopped", "b": "installed"}
            with pytest.raises(EngineError, match=r"'a' is stopped; call pool.start\('a'\)"):
                pool["a"]
            pool.start("a")
        pool.release("a")
        assert list(pool) == ["b"]
        pool.release("b")
        assert len(pool) == 0

    def test_names_and_options_are_checked_before_anything_is_loaded(self, pool, folder):
        pool.install("a", folder)
        with pytest.raises(ConfigError, match="'a' is installed already"):
            pool.install("a", folder)
        with pytest.raises(ConfigError, match="did you mean"):
            pool.install("b", folder, max_num_seq=3)
        with pytest.raises(KeyError, match="no model is installed as 'b'; installed: 'a'"):
            pool["b"]
        with pytest.raises(KeyError):
            pool.start("b")

    def test_a_model_that_cannot_be_loaded_takes_nothing(self, pool, tmp_path):
        pool.install("a", str(tmp_path))
        with pytest.raises(Exception, match=r"config\.json"):
            pool.start("a")
        (status,) = pool.status()
        assert (status.state, status.weights, status.kv_cache) == ("installed", 0, 0)

    @pytest.mark.full
    def test_stop_finishes_what_runs(self, pool, folder):
        pool.install("a", folder, **OPTIONS)
        handles = [pool.start("a").submit(text, LONG) for text in TEXTS]
        pool.stop("a")
        assert [len(tokens(handle.result(0))) for handle in handles] == [LONG.max_tokens] * 3

    def test_or_aborts_it(self, pool, folder):
        pool.install("a", folder, **OPTIONS)
        handle = pool.start("a").submit(TEXTS[0], LONG)
        handle.get()
        pool.stop("a", abort=True)
        assert handle.status == "interrupted"
        assert handle.result(0).outputs.finish_reason == "abort"
        assert 0 < len(tokens(handle.result(0))) < LONG.max_tokens

    def test_the_end_of_the_block_releases_all(self, folder):
        with ModelPool() as pool:
            pool.install("a", folder, **OPTIONS)
            handle = pool.start("a").submit(TEXTS[0], LONG)
        assert len(pool) == 0
        assert handle.is_finished


class TestMemory:
    @pytest.mark.full
    def test_the_table_is_what_is_taken(self, pool, folder):
        pool.install("a", folder, native_kernels=False, **OPTIONS)  # which pack the weights anew
        llm = pool.start("a")
        (status,) = pool.status()
        weights = sum(each.numel() * each.element_size() for each in llm.model.parameters())
        assert status.weights == weights
        assert 0 < status.kv_cache <= OPTIONS["kv_cache_memory"]
        assert status.device == "cpu"

    @pytest.mark.full
    def test_what_does_not_fit_is_refused_with_the_numbers(self, folder, monkeypatch):
        with ModelPool(memory=6 * 2**20) as pool:
            pool.install("a", folder, **OPTIONS)
            pool.install("b", folder, **OPTIONS)
            pool.start("a")
            monkeypatch.setattr(pools, "AsyncLLM", None)  # nothing may be loaded
            with pytest.raises(ConfigError, match=r"takes 0\.\d+ GiB .* running: 'a' 0\.\d+ GiB"):
                pool.start("b")
            assert states(pool)["b"] == "installed"
            monkeypatch.undo()
            pool.stop("a")
            assert pool.start("b").submit("a", GREEDY).result().is_ok

    def test_an_open_size_fits_into_the_budget(self, folder):
        options = {**OPTIONS, "kv_cache_memory": None}
        with ModelPool(memory=8 * 2**20) as pool:
            pool.install("a", folder, **options)
            assert pool.start("a").submit("a", GREEDY).result().is_ok
            (status,) = pool.status()
            assert status.weights + status.kv_cache <= 8 * 2**20
            llm = pool["a"]
            assert status.kv_cache % llm.num_kv_blocks == 0


class TestCores:
    def test_an_unknown_rule(self):
        with pytest.raises(ConfigError, match="'turns' or 'shares'"):
            ModelPool(cores="both")

    @pytest.mark.full
    def test_shares_need_a_number_and_do_not_exceed_the_cpus(self, folder, monkeypatch):
        monkeypatch.setattr("mmdeploy_llm.system.portable.machine.num_cpus", lambda: 2)
        with ModelPool(cores="shares") as pool:
            pool.install("none", folder, **OPTIONS)
            with pytest.raises(ConfigError, match="'none' has no num_threads"):
                pool.start("none")
            for name in "abc":
                pool.install(name, folder, num_threads=1, **OPTIONS)
            pool.start("a")
            pool.start("b")
            with pytest.raises(ConfigError, match="1 threads and the running ones with 2"):
                pool.start("c")

    @pytest.mark.full
    def test_turns_leave_no_two_engines_computing(self, pool, folder, monkeypatch):
        inside, most = [], []
        for name in "ab":
            pool.install(name, folder, **OPTIONS)
            engine = pool.start(name)

            def spied(forward=engine.model.forward):
                def run(*args, **kwargs):
                    inside.append(1)
                    most.append(len(inside))
                    time.sleep(0.001)  # so that two that compute at once would meet
                    try:
                        return forward(*args, **kwargs)
                    finally:
                        inside.pop()

                return run

            monkeypatch.setattr(engine.model, "forward", spied())
        handles = [pool[name].submit(text, GREEDY) for text in TEXTS for name in "ab"]
        assert all(handle.result(60).is_ok for handle in handles)
        assert len(most) > 20
        assert set(most) == {1}

    @pytest.mark.full
    def test_engines_of_other_processes_take_no_turns(self, pool, folder):
        pool.install("a", folder, data_parallel_size=2, **OPTIONS)
        with pytest.raises(ConfigError, match="cores='shares'"):
            pool.start("a")


@pytest.mark.full
def test_nothing_of_a_model_reaches_another(pool, folder, reference_of):
    """Plugins, caches and seeds are each model's own."""
    pool.install("a", folder, seed=1, **OPTIONS)
    pool.install("b", folder, seed=2, blocked_plugins=["remote"], **OPTIONS)
    a, b = pool.start("a"), pool.start("b")
    assert a.plugins is not b.plugins
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0)
    prompt = "There are two of them; a red circle" * 3
    first = tokens(a.submit(prompt, params).result())
    other = b.submit(prompt, params).result()
    assert other.num_cached_tokens == 0  # a has read this prompt, b has not
    assert tokens(other) != first
    with ModelPool() as alone:
        alone.install("a", folder, seed=1, **OPTIONS)
        assert tokens(alone.start("a").submit(prompt, params).result()) == first


@pytest.fixture
def cases(reference_of, make_picture):
    """name of a model -> (prompt, expected tokens) of several prompts."""

    def prompts_of(family):
        reference = reference_of(family)
        found = [(text, reference.generate(text)) for text in TEXTS]
        if reference.has_images:
            picture, text = make_picture(1, 70, 90), f"A {reference.image_text()} B"
            prompt = {"prompt": text, "multimodal_data": {"image": picture}}
            found.append((prompt, reference.generate(text, [picture])))
        return found

    return {name: prompts_of(family) for name, family in FAMILIES.items()}


@pytest.mark.long
def test_under_load_models_start_and_stop(pool, tiny_folder, cases):
    for name, family in FAMILIES.items():
        pool.install(name, str(tiny_folder(family)), **OPTIONS)
        pool.start(name)  # each once, so that what stays for good is there
        pool.stop(name)
    gc.collect()
    threads, num_threads = set(threading.enumerate()), torch.get_num_threads()
    before = memory()
    end, wrong, num_done = time.monotonic() + 60, [], [0]
    is_over = threading.Event()

    def ask(seed):
        choose = random.Random(seed)
        while not is_over.is_set():
            name = choose.choice(list(FAMILIES))
            prompt, expected = choose.choice(cases[name])
            try:
                output = pool[name].submit(prompt, GREEDY).result(60)
            except EngineError:  # the model is stopped, or is stopping
                time.sleep(0.01)
                continue
            num_done[0] += 1
            is_exact = tokens(output) == expected[: len(tokens(output))]
            if not is_exact or (not output.is_ok and output.outputs.finish_reason != "abort"):
                wrong.append((name, output))

    askers = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for each in askers:
        each.start()
    choose = random.Random(0)
    while time.monotonic() < end or (num_done[0] < 10 and time.monotonic() < end + 120):
        name = choose.choice(list(FAMILIES))
        if states(pool)[name] == "running":
            pool.stop(name, abort=choose.random() < 0.3)
        else:
            pool.start(name)
    is_over.set()
    for each in askers:
        each.join(90)
        assert not each.is_alive()
    assert wrong == []
    assert num_done[0] >= 10
    for name in FAMILIES:
        pool.stop(name)
    gc.collect()
    assert set(threading.enumerate()) <= threads
    assert torch.get_num_threads() == num_threads
    assert memory() - before < 64 * 2**20


def memory():
    """Resident bytes of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
