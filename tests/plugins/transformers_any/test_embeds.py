"""Embeddings that transformers' own encoder computed give the tokens of the images themselves."""

import pytest
import torch

from mmdeploy_llm import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
SIZES = ((70, 50), (30, 64), (56, 56))
# Whether an image of any size has the same text; otherwise the size, or the grid, is given.
SAME_TEXT = ("gemma3", "internvl")
FAMILIES = (*SAME_TEXT, "glm4v", "llava_onevision", "mistral3")


@torch.inference_mode()
def embedded(reference, image):
    """The image's embeddings, with what else this family needs to know."""
    made = reference.inputs(reference.family.marker, [image])
    texts = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
    arguments = {name: value for name, value in made.items() if name not in texts}
    found = reference.model.get_image_features(**arguments, return_dict=True).pooler_output
    rows = [found] if isinstance(found, torch.Tensor) else list(found)
    rows = torch.cat([own.reshape(-1, own.shape[-1]) for own in rows])
    if "image_grid_thw" in made:
        return {"image_embeds": rows, "grid": made["image_grid_thw"][0]}
    return {"image_embeds": rows, "size": image.size}


def cases(reference, picture):
    pictures = [picture(seed, *size) for seed, size in enumerate(SIZES)]
    marker = reference.family.marker
    return [
        (f"User: {marker}what is it? Assistant:", pictures[:1]),
        (f"A {marker}\nB {marker} C\n\n{marker} D", pictures),
    ]


def run(llm, prompts):
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.error_msg for output in outputs] == [None] * len(prompts)
    return outputs


def tokens(outputs):
    return [list(output.outputs.token_ids) for output in outputs]


@pytest.mark.full
@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[pytest.mark.full] * (name != "gemma3")) for name in FAMILIES],
)
def test_in_chunks_and_with_a_prefix_hit(reference_of, make_llm, picture, family):
    reference = reference_of(family)
    llm, stats = make_llm(reference.folder, block_size=4, max_num_batched_tokens=7, max_num_seqs=3)
    found = cases(reference, picture)
    prompts = [
        {
            "prompt": text,
            "multimodal_data": {"image": [embedded(reference, image) for image in images]},
        }
        for text, images in found
    ]
    wanted = [reference.generate(text, images) for text, images in found]
    cold, warm = run(llm, prompts), run(llm, prompts)
    assert tokens(cold) == tokens(warm) == wanted
    assert all(output.num_cached_tokens > 0 for output in warm)
    assert max(step.num_scheduled_tokens for step in stats.steps) <= 7
    for prompt, output in zip(prompts, cold, strict=True):
        assert llm.count_tokens(prompt).num_prompt_tokens == len(output.prompt_token_ids)


@pytest.mark.full
@pytest.mark.parametrize("family", SAME_TEXT)
def test_neither_grid_nor_size_is_needed(reference_of, make_llm, picture, family):
    reference = reference_of(family)
    llm, _ = make_llm(reference.folder)
    ((text, images), _) = cases(reference, picture)
    item = {"image_embeds": embedded(reference, images[0])["image_embeds"]}
    prompt = {"prompt": text, "multimodal_data": {"image": item}}
    assert tokens(run(llm, [prompt])) == [reference.generate(text, images)]


@pytest.mark.full
def test_what_is_missing_is_named(reference_of, make_llm, picture):
    wrong = {
        "llava_onevision": ({"image_embeds": torch.zeros(2, 64)}, "give the image's own 'size'"),
        "glm4v": ({"image_embeds": torch.zeros(2, 64)}, "of this model need a 'grid'"),
        "gemma3": ({"image_embeds": torch.zeros(4, 64), "size": 5}, "must be (width, height)"),
    }
    for family, (item, message) in wrong.items():
        reference = reference_of(family)
        llm, _ = make_llm(reference.folder)
        prompt = {"prompt": reference.family.marker, "multimodal_data": {"image": item}}
        (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert output.error_code == 400
        assert message in output.error_msg
