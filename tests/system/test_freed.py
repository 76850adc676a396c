"""`close` frees the model, also where Python collects no garbage and the object is still named."""

import gc
import weakref

import pytest
from PIL import Image

from mmdeploy_llm import LLM, SamplingParams

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
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def held_by(llm):
    """Returns references to what takes the memory: the model and its weights."""
    weights = [*llm.model.parameters(), *llm.model.buffers()]
    return [weakref.ref(each) for each in (llm.model, *weights)]


def is_freed(refs):
    return not any(ref() is not None for ref in refs)


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
    caplog.set_level("CRITICAL", logger="mmdeploy_llm.runner.retry")  # records hold frames
    fault = Failing()
    hook = next(llm.model.children()).register_forward_pre_hook(fault)
    fault.is_armed = True
    llm.generate(["one", "two"], GREEDY, use_tqdm=False)  # together or alone
    assert not fault.is_armed
    hook.remove()
    refs = held_by(llm)
    llm.close()
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


def test_memory_of_models_one_after_another_does_not_grow(tiny_folder, no_garbage):
    alive = []
    for _ in range(3):
        with LLM(str(tiny_folder("qwen2")), **SETTINGS, use_warmup=False) as llm:
            llm.generate("one", GREEDY, use_tqdm=False)
            alive.append(weakref.ref(llm.model))
        assert is_freed(alive)
