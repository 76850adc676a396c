"""A checkpoint that a native plugin serves returns the same tokens without that plugin."""

import pytest

from mmdeploy_llm import SamplingParams
from mmdeploy_llm.testing.tiny import write_tiny

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
TEXTS = {
    f"User: {IMAGE}what is it? Assistant:": 1,
    f"A {IMAGE} B {IMAGE} C": 2,
    "The quick brown fox": 0,
}


@pytest.mark.full
def test_qwen2_5_vl(make_llm, tmp_path, picture):
    write_tiny("qwen2_5_vl", tmp_path)
    images = [picture(seed, 70 + 40 * seed, 90) for seed in range(2)]
    prompts = [
        {"prompt": text, "multimodal_data": {"image": images[:count]}}
        for text, count in TEXTS.items()
    ]
    found = {}
    for blocked in ((), ("qwen",)):
        llm, _ = make_llm(tmp_path, blocked_plugins=blocked)
        spec = llm.plugins.model_for(["Qwen2_5_VLForConditionalGeneration"])
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [output.error_msg for output in outputs] == [None] * len(outputs)
        found[spec.name] = [
            (output.num_input_image_tokens, output.outputs.token_ids) for output in outputs
        ]
    assert set(found) == {"qwen2_5_vl", "transformers_any"}
    assert found["qwen2_5_vl"] == found["transformers_any"]
