"""A budget holds for the image processors of transformers too: by their own options, and where
these do not suffice by shrinking the image."""

import json

import pytest
import transformers
from mmdeploy_llm_plugins.transformers_media.processor import AnyImageProcessor
from mmdeploy_llm_processors.from_transformers.levels import levels_of
from PIL import Image

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import Checkpoint, MediaLimits
from mmdeploy_llm.media.image.decode import ImageHeader
from mmdeploy_llm.testing.tiny import make_tokenizer

SIZES = [(504, 378), (378, 504), (500, 10), (10, 500), (28, 28), (1, 60), (60, 1), (320, 180)]
PHOTO = SIZES[0]
FAMILIES = {
    # Shrunk by the area of an image.
    "Qwen2VL": (
        {"size": {"shortest_edge": 56 * 56, "longest_edge": 1280 * 28 * 28}},
        transformers.Qwen2VLConfig,
        "<|image_pad|>",
        {},
    ),
    # Split into fewer parts, then not at all.
    "Idefics3": (
        {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 28}},
        transformers.Idefics3Config,
        "<image>",
        {"image_seq_len": 4},
    ),
    # Has no option: the image itself is shrunk.
    "Pixtral": (
        {"size": {"longest_edge": 1024}, "patch_size": {"height": 14, "width": 14}},
        transformers.Mistral3Config,
        "[IMG]",
        {"patch_size": 14, "spatial_merge_size": 2},
    ),
}


def processor_of(name, folder, options=None):
    """Writes the files of a processor, without a model, and builds ours."""
    fields, config_class, token, more = FAMILIES[name]
    tokenizer = make_tokenizer()
    texts = [token, "[IMG_BREAK]", "[IMG_END]", "<|video_pad|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": texts})
    tokenizer.save_pretrained(folder)
    (folder / "processor_config.json").write_text(
        json.dumps({"processor_class": f"{name}Processor", **more})
    )
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": f"{name}ImageProcessor", **fields})
    )
    config = config_class()
    config.image_token_id = tokenizer.convert_tokens_to_ids(token)
    return AnyImageProcessor(Checkpoint(folder=folder, config=config), options or {})


def count(processor, size):
    """Counts the tokens of an image of (width, height)."""
    return processor.count_tokens(ImageHeader(size=size), {})


@pytest.mark.one_is_quick
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tokens", [24, 100])
def test_no_image_has_more_tokens(name, tokens, tmp_path):
    """Any shape stays within the budget, a photo uses most of it, and what is processed is what was
    counted."""
    processor = processor_of(name, tmp_path)
    assert processor.auto_tokens == 1280
    limited = processor.with_budget(tokens, may_raise=True)
    for size in SIZES:
        found = count(limited, size)
        assert 1 <= found <= tokens, size
        item = limited.decode(Image.new("RGB", size), MediaLimits())
        made = limited.process(item, {})
        assert made.num_tokens == found == made.prompt_text.count(limited.token)
    assert count(limited, PHOTO) >= 0.7 * min(tokens, count(processor, PHOTO))
    assert limited.with_budget(10**6)._tokens == tokens
    limited.close()


def test_two_budgets_are_two_keys(tmp_path):
    """A shrunk image is another one for the caches."""
    processor = processor_of("Pixtral", tmp_path)
    keys = {
        one.process(one.decode(Image.new("RGB", PHOTO), MediaLimits()), {}).key
        for one in (processor, processor.with_budget(30), processor.with_budget(60))
    }
    assert len(keys) == 3
    processor.close()


def test_too_few_tokens(tmp_path):
    """A number below the least of a model is an error with that number."""
    processor = processor_of("Idefics3", tmp_path)
    with pytest.raises(ConfigError, match="image_tokens = 3 is below 4: the tokens of a"):
        processor.with_budget(3)


def test_options_of_the_user_are_not_raised():
    """A number raises the checkpoint's bound, not that of the user."""
    fields = {"size": {"shortest_edge": 1, "longest_edge": 7840}, "patch_size": 14, "merge_size": 2}
    (free,) = levels_of(fields, 100, (), may_raise=True)
    assert free["size"]["longest_edge"] == 78400
    (own,) = levels_of(fields, 100, ("size",), may_raise=True)
    assert own["size"]["longest_edge"] == 7840
