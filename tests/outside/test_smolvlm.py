"""SmolVLM as a plugin of one file answers pictures as transformers' own model and processor do."""

from pathlib import Path

import pytest
import transformers
from PIL import Image

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.testing.tiny import Family, text_config, write_family

FILE = Path(__file__).parents[2] / "examples" / "plugins" / "smolvlm.py"
TOKENS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def make_config(tokenizer, options):
    return transformers.SmolVLMConfig(
        text_config=transformers.LlamaConfig(**text_config(tokenizer, options)),
        vision_config=transformers.SmolVLMVisionConfig(**VISION).to_dict(),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=0,
    )


SMOLVLM = Family(
    architecture="SmolVLMForConditionalGeneration",
    make_config=make_config,
    special_tokens=TOKENS,
    chat_template="{% for m in messages %}{% for p in m.content %}"
    "{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}{% endfor %}",
    files={
        "preprocessor_config.json": {
            "image_processor_type": "SmolVLMImageProcessor",
            "size": {"longest_edge": 56},
            "max_image_size": {"longest_edge": 28},
        },
        "processor_config.json": {"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
    },
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_family(SMOLVLM, tmp_path_factory.mktemp("smolvlm"))


def answers(folder, **options):
    """Tokens of prompt and answer for one picture, and for two of which one is not split."""
    one = Image.linear_gradient("L").resize((90, 40)).convert("RGB")
    two = Image.radial_gradient("L").resize((40, 50)).convert("RGB")
    with LLM(
        str(folder), dtype="float32", quiet=True, limit_mm_per_prompt={"image": 2}, **options
    ) as llm:
        owner = llm.plugins.owner(llm.plugins.model_for(["SmolVLMForConditionalGeneration"]))
        parts = [
            [{"type": "image", "image": each} for each in images] for images in ((one,), (two, one))
        ]
        chats = [
            [{"role": "user", "content": [*part, {"type": "text", "text": "?"}]}] for part in parts
        ]
        outputs = llm.chat(chats, PARAMS, use_tqdm=False)
    assert [output.error_msg for output in outputs] == [None, None]
    return owner, [(list(o.prompt_token_ids), list(o.outputs.token_ids)) for o in outputs]


@pytest.mark.full  # two engines, one of them with transformers' processor
def test_pictures_are_answered_as_transformers_does(folder):
    assert len(FILE.read_text().splitlines()) <= 130
    owner, found = answers(folder, plugins=[str(FILE)])
    other, expected = answers(folder)
    assert (owner, other) == ("smolvlm.py", "transformers_any")
    assert found == expected
