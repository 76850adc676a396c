"""Adapters of decoders that attend to an encoder: what is kept of an item is the adapter's own."""

import pytest
import transformers
from PIL import Image

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.checkpoints.saving import merge_adapter

from .lora import answers, write_adapter

pytest.importorskip("peft")

# Layers that make keys and values of what the encoder gives them; a prompt.
CASES = {
    "mllama": ("MllamaForConditionalGeneration", "cross_attn", "<|image|>hello"),
    "t5gemma2": ("T5Gemma2ForConditionalGeneration", "decoder.*self_attn", "<start_of_image>hi"),
}
# Tied embeddings would repeat the first token for ever.
PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, repetition_penalty=5.0)


@pytest.mark.full
@pytest.mark.parametrize("family", ["mllama", pytest.param("t5gemma2", marks=pytest.mark.full)])
def test_keys_and_values_of_an_item_have_the_adapter(tiny_folder, tmp_path, family):
    """Beside prompts with the same picture and without it."""
    name, layers, text = CASES[family]
    plain, auto = tiny_folder(family), getattr(transformers, name)
    modules = rf".*{layers}\.(k|v)_proj"
    write_adapter(plain, tmp_path / "own", auto=auto, target_modules=modules)
    merge_adapter(str(plain), str(tmp_path / "own"), tmp_path / "merged")
    prompt = {"prompt": text, "multimodal_data": {"image": Image.new("RGB", (40, 30), "red")}}
    options = {"dtype": "float32", "use_warmup": False, "kv_cache_memory": 2**22, "quiet": True}
    with LLM(str(tmp_path / "merged"), **options) as llm:
        merged = answers(llm, [prompt], PARAMS)
    with LLM(str(plain), adapters={"own": str(tmp_path / "own")}, **options) as llm:
        without, *found = answers(llm, [prompt, {**prompt, "adapter": "own"}, prompt], PARAMS)
    assert found == [*merged, without]
    assert merged != [without]
