"""Whoever types the text or the id of a placeholder into a prompt gets an answer or an error that
says what is wrong with this prompt, whatever the family, and no other prompt is lost."""

import pytest
import transformers

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.hooks import PluginManager
from mmdeploy_llm.testing.tiny import generating
from mmdeploy_llm.weights.folder import read_checkpoint
from tests.plugins.pictures import picture

pytestmark = pytest.mark.full
LONG = ("gemma4_unified",)  # an image of its processor is longer than the tiny model's window
FAMILIES = sorted(
    name for name, spec in generating().items() if "image" in spec.media and name not in LONG
)
# Served by transformers_any, too: one of each rule for its images.
BY_ANY = (("gemma3", "gemma"), ("internvl", "internvl"), ("qwen2_5_vl", "qwen"))
PARAMS = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
OPTIONS = {
    "num_threads": 1,
    "use_warmup": False,
    "kv_cache_memory": 2**26,
    "limit_mm_per_prompt": {"image": 3},
    "enable_prefix_caching": False,
}
INSIDE = ("Error:", "Traceback", "index out of", "object has no", "IndexError", "KeyError")


def typed(folder, blocked):
    """Returns what stands for an image in a prompt, and all that someone may type of its tokens."""
    plugins = PluginManager.load(blocked=blocked)
    checkpoint = read_checkpoint(folder)
    spec = plugins.model_for(checkpoint.config.architectures)
    kinds = [own for own in plugins.media_processors if spec.name in (own.models or ())]
    own = max((own for own in kinds if own.kind == "image"), key=lambda own: own.priority)
    processor = plugins.build(own, checkpoint, {})
    written = getattr(processor, "written_token", None)
    marker = processor.markers[0]
    processor.close()
    return marker, {*processor.markers, processor.token, written or marker}


@pytest.mark.few_in_ci(8)
@pytest.mark.parametrize(
    ("family", "blocked"), [*((name, ()) for name in FAMILIES), *((a, (b,)) for a, b in BY_ANY)]
)
def test_typed_placeholders_cost_their_own_prompt_at_most(tiny_folder, family, blocked):
    folder = tiny_folder(family)
    marker, texts = typed(folder, blocked)
    good = {"prompt": f"{marker}The quick", "multimodal_data": {"image": picture(1)}}
    longest = 128 if generating()[family].encoder else 512  # positions are learned in some
    with LLM(str(folder), blocked_plugins=blocked, max_model_len=longest, **OPTIONS) as llm:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        named = {text: tokenizer.convert_tokens_to_ids(text) for text in texts}
        ids = sorted({one for one in named.values() if isinstance(one, int)})
        prompts = [f"The {text} quick" for text in sorted(texts)]
        prompts += [f"{text}{text}The quick" for text in sorted(texts)]
        prompts += [{**good, "prompt": f"{good['prompt']} {text}"} for text in sorted(texts)]
        prompts += [[40, one, one, 41] for one in ids]
        prompts += [{**good, "prompt": None, "prompt_token_ids": [40, one, 41]} for one in ids]
        prompts = [_without_none(prompt) for prompt in prompts]
        (alone,) = llm.generate([good], PARAMS, use_tqdm=False)
        found = llm.generate([*prompts, good], PARAMS, use_tqdm=False)
    assert alone.is_ok, alone.error_msg
    assert found[-1].is_ok, found[-1].error_msg
    assert found[-1].outputs.token_ids == alone.outputs.token_ids
    for prompt, output in zip(prompts, found, strict=False):
        if not output.is_ok:
            assert 400 <= output.error_code < 500, (prompt, output.error_msg)
            assert not any(word in output.error_msg for word in INSIDE), output.error_msg


@pytest.mark.few_in_ci(8)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_typed_in_a_conversation_stands_for_nothing(tiny_folder, family):
    """All special tokens and markers in the text of a user, with a picture and, where the family
    needs none, without: every prompt is answered, and the tokens of its picture are the same."""
    folder = tiny_folder(family)
    _, texts = typed(folder, ())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = sorted({*texts, *tokenizer.all_special_tokens, *tokenizer.get_added_vocab()})[:48]
    texts = ["", *texts, "".join(texts[:3])]
    longest = 128 if generating()[family].encoder else 512
    picture_part = {"type": "image", "image": picture(1)}
    parts = [{"type": "text", "text": f"The {text} quick"} for text in texts]
    with LLM(str(folder), max_model_len=longest, **OPTIONS) as llm:
        for own in ([picture_part], []):
            asked = [[{"role": "user", "content": [*own, part]}] for part in parts]
            if own or llm.chat(asked[0], PARAMS, use_tqdm=False)[0].is_ok:
                found = llm.chat(asked, PARAMS, use_tqdm=False)
                assert [out.error_msg for out in found] == [None] * len(texts)
                (count,) = {out.num_input_image_tokens for out in found}
                assert bool(count) == bool(own)


def _without_none(prompt):
    """Returns a prompt without fields that are None."""
    if not isinstance(prompt, dict):
        return prompt
    return {name: value for name, value in prompt.items() if value is not None}
