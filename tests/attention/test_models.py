"""Whole engines with our Triton attention give the tokens of the reference."""

import numpy as np
import pytest

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.attention import select
from mmdeploy_llm.testing.tiny import write_tiny

TEXTS = ("the cat sat on the mat with a dog", "and then")
OPTIONS = {"block_size": 4, "max_num_batched_tokens": 12, "max_num_seqs": 4, "use_warmup": False}
GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


def tokens(folder, prompts):
    with LLM(model=str(folder), attention_backend="reference", dtype="float32", **OPTIONS) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        again = llm.generate(prompts[:1], GREEDY, use_tqdm=False)  # a prefix hit
    assert [output.error_msg for output in outputs] == [None] * len(prompts)
    return [list(output.outputs.token_ids) for output in [*outputs, *again]]


@pytest.mark.parametrize("family", ["mistral", "qwen2_5_vl"])
def test_tokens_are_those_of_the_reference(triton_attention, monkeypatch, tmp_path, family):
    """Prefill in chunks, decode in batches, prefix hits, windows, media."""
    if triton_attention.gpu.num_processors > 8:
        pytest.skip("these engines run on the CPU")
    write_tiny(family, tmp_path)
    prompts = list(TEXTS if family == "mistral" else TEXTS[:1])
    if family == "qwen2_5_vl":
        image = np.arange(56 * 56 * 3, dtype=np.uint8).reshape(56, 56, 3)
        mark = "<|vision_start|><|image_pad|><|vision_end|>"
        prompts.append({"prompt": f"{mark} what", "multimodal_data": {"image": [image]}})
    expected = tokens(tmp_path, prompts)
    made = []

    def create(choice, *rest):
        made.append(choice.name)
        return triton_attention

    monkeypatch.setattr(select, "create", create)
    assert tokens(tmp_path, prompts) == expected
    assert made == ["reference"]
