"""`close` frees the model, also where Python collects no garbage and the object is still named."""

import gc
import os
import signal
import time
import weakref

import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

from mmdeploy_llm import LLM, ModelPool, SamplingParams
from mmdeploy_llm.engine.startup import computer, loaded
from mmdeploy_llm.errors import CheckpointError, ConfigError, MMDeployLLMError

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
SETTINGS = {"num_threads": 1, "max_model_len": 256, "kv_cache_memory": 2**22, "dtype": "float32"}
PICTURE = Image.new("RGB", (56, 56), (200, 30, 30))
OPTIONS = {  # what else may hold a model
    "text": {},
    "recorded": {"use_warmup": True},
    "4 bits": {"quantization": "int4"},
    "drafts": {"speculative": "ngram"},
    "constrained": {},
}


@pytest.fixture
def no_garbage():
    gc.disable()
    yield
    gc.enable()


def held_by(llm):
    """Returns references to what takes the memory: the model and its weights."""
    weights = [*llm.model.parameters(), *llm.model.buffers()]
    return [weakref.ref(each) for each in (llm.model, *weights)]


def is_freed(refs):
    return not any(ref() is not None for ref in refs)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("case", OPTIONS)
def test_a_closed_model_is_freed(case, tiny_folder, no_garbage):
    llm = LLM(str(tiny_folder("qwen2")), **SETTINGS, **OPTIONS[case])
    params = GREEDY
    if case == "constrained":
        params = SamplingParams(max_tokens=4, guided_decoding={"choice": ["yes", "no"]})
    outputs = llm.generate(["one", "one two", [5, 6, 7]], params, use_tqdm=False)
    assert [output.error_code for output in outputs] == [200] * 3
    refs = held_by(llm)
    llm.close()
    assert is_freed(refs)
    assert llm.model is None
    assert "closed" in repr(llm)


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5", "florence2", "gemma3"])
def test_a_closed_model_of_images_is_freed(family, tiny_folder, no_garbage):
    with LLM(str(tiny_folder(family)), **SETTINGS) as llm:
        if family == "florence2":
            item = {"prompt": "<CAPTION>", "multimodal_data": {"image": PICTURE}}
            (output,) = llm.generate([item], GREEDY, use_tqdm=False)
        else:
            parts = [{"type": "image", "image": PICTURE}, {"type": "text", "text": "what is it?"}]
            (output,) = llm.chat([{"role": "user", "content": parts}], GREEDY, use_tqdm=False)
        assert output.error_code == 200, output.error_msg
        refs = held_by(llm)
        assert llm.cache_stats()["processed"].num_bytes > 0
    assert is_freed(refs)
    assert llm.cache_stats()["processed"].num_bytes == 0


class Failing:
    """Fails the first forward pass after the load, whose items are computed again one by one."""

    def __init__(self):
        self.is_armed = False

    def __call__(self, module, args):
        if self.is_armed:
            self.is_armed = False
            raise RuntimeError("injected")


def test_a_model_that_failed_once_is_freed(tiny_folder, no_garbage, caplog):
    llm = LLM(str(tiny_folder("qwen2")), **SETTINGS, use_warmup=False)
    caplog.set_level("CRITICAL", logger="mmdeploy_llm.engine.runner.retry")  # records hold frames
    fault = Failing()
    hook = next(llm.model.children()).register_forward_pre_hook(fault)
    fault.is_armed = True
    llm.generate(["one", "two"], GREEDY, use_tqdm=False)  # together or alone
    assert not fault.is_armed
    hook.remove()
    refs = held_by(llm)
    llm.close()
    assert is_freed(refs)


def weight_lacks(folder, patch):
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]  # the last one
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def memory_runs_out(folder, patch):
    def refuse(loaded):
        raise MemoryError

    patch.setattr(computer, "plan_cache", refuse)


def ctrl_c(folder, patch):
    def interrupt(loaded):
        os.kill(os.getpid(), signal.SIGINT)
        while True:
            time.sleep(0.01)

    patch.setattr(computer, "plan_cache", interrupt)


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("fault", "error"),
    [(weight_lacks, CheckpointError), (memory_runs_out, ConfigError), (ctrl_c, KeyboardInterrupt)],
)
def test_a_load_that_failed_is_freed(fault, error, tiny_copy, tmp_path, monkeypatch, no_garbage):
    """It goes with its exception, so that a second try has the memory of the first."""
    folder, made, real = tiny_copy("qwen2", tmp_path / "model"), [], loaded.fit_head

    def noted(model, *args):
        made.append(weakref.ref(model))
        return real(model, *args)

    monkeypatch.setattr(loaded, "fit_head", noted)
    fault(folder, monkeypatch)
    found = None  # pytest.raises would keep the exception
    try:
        LLM(str(folder), **SETTINGS)
    except (MMDeployLLMError, KeyboardInterrupt) as raised:
        found = type(raised)
    assert (found, len(made)) == (error, 1)
    assert is_freed(made)


def test_a_pool_frees_the_model_that_it_stops(tiny_folder, no_garbage):
    with ModelPool() as pool:
        pool.install("a", str(tiny_folder("qwen2")), **SETTINGS)
        llm = pool.start("a")
        assert llm.submit("one", GREEDY).result().is_ok
        refs = held_by(llm)
        pool.stop("a")
        assert is_freed(refs)


def test_a_model_is_freed_with_its_last_name(tiny_folder, no_garbage):
    """And by a restart, before the next one is loaded."""
    llm = LLM(str(tiny_folder("qwen2")), **SETTINGS)
    refs = held_by(llm)
    llm.restart()
    assert is_freed(refs)
    refs, thread = held_by(llm), llm._desk.thread
    del llm
    thread.join()
    assert is_freed(refs)


def test_what_is_told_after_close(tiny_folder):
    """Counters stay those of the last moment, and calls say that it is closed."""
    llm = LLM(str(tiny_folder("qwen2")), **SETTINGS)
    llm.generate("one", GREEDY, use_tqdm=False)
    llm.close()
    llm.close()
    assert llm.stats().num_generated_tokens == 4
    assert llm.death is None
    with pytest.raises(Exception, match="closed"):
        llm.generate("one", GREEDY, use_tqdm=False)


@pytest.mark.full
def test_memory_of_models_one_after_another_does_not_grow(tiny_folder, no_garbage):
    alive = []
    for _ in range(3):
        with LLM(str(tiny_folder("qwen2")), **SETTINGS, use_warmup=False) as llm:
            llm.generate("one", GREEDY, use_tqdm=False)
            alive.append(weakref.ref(llm.model))
        assert is_freed(alive)
