"""Gemma 4 hears as transformers' processor and model do, also beside pictures."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from mmdeploy_llm_plugins.gemma.audio4 import Gemma4AudioProcessor
from mmdeploy_llm_plugins.gemma.image4 import Gemma4ImageProcessor
from mmdeploy_llm_plugins.gemma.tiny4 import AUDIO, END_AUDIO, IMAGE, START_AUDIO

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.errors import MediaLimitError, UnsupportedMediaError
from mmdeploy_llm.hooks import Checkpoint, MediaLimits, MediaSpan
from mmdeploy_llm.testing.models.reference import Reference
from tests.media.sound_files import RATE

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
HERE = MediaLimits(isolation="thread")


def sound(seconds, seed=0):
    values = np.random.default_rng(seed).standard_normal(round(seconds * RATE)) * 0.1
    return {"array": values.astype(np.float32), "sampling_rate": RATE}


def checkpoint_of(folder):
    config = transformers.AutoConfig.from_pretrained(folder)
    made = Checkpoint(folder=folder, config=config)
    return replace(made, preprocessor=made.read_json("preprocessor_config.json"))


@pytest.fixture
def folder(tiny_folder):
    return tiny_folder("gemma4")


@pytest.fixture
def processor(folder):
    made = Gemma4AudioProcessor(checkpoint_of(folder), {})
    yield made
    made.close()


@pytest.mark.one_is_quick
@pytest.mark.parametrize("seconds", [0.05, 1.0, 1.237])
def test_features_and_counts_equal_transformers(processor, folder, seconds):
    given = sound(seconds)
    accepting = {"check_argument_for_proper_class": lambda *_: None}  # None for a component
    base = transformers.Gemma4Processor
    theirs = type(base.__name__, (base,), accepting)(
        feature_extractor=transformers.Gemma4AudioFeatureExtractor(),
        image_processor=None,
        tokenizer=transformers.AutoTokenizer.from_pretrained(folder),
        video_processor=None,
    )
    made = theirs(text=[AUDIO], audio=[given["array"]], return_tensors="pt")
    item = processor.decode(given, HERE)
    ours = processor.process(item, {})
    assert torch.equal(ours.tensors["input_features"], made["input_features"])
    assert torch.equal(ours.tensors["input_features_mask"], made["input_features_mask"])
    count = int((made["input_ids"] == theirs.audio_token_id).sum())
    assert ours.num_tokens == processor.count_tokens(item, {}) == count
    assert ours.prompt_text == f"{START_AUDIO}{AUDIO * count}{END_AUDIO}"


def test_longer_than_thirty_seconds_is_refused(processor):
    assert processor.most == 30
    with pytest.raises(MediaLimitError, match="longer than the 30 seconds"):
        processor.count_tokens(processor.decode(sound(30.001), HERE), {})


def test_a_model_without_a_tower_says_so(folder):
    checkpoint = checkpoint_of(folder)
    checkpoint.config.audio_config = None
    with pytest.raises(UnsupportedMediaError, match="E2B and E4B"):
        Gemma4AudioProcessor(checkpoint, {})


@pytest.mark.full
def test_sounds_and_a_picture_as_transformers(folder, processor, noise):
    """They stand in one prompt and in several, whole and in chunks of a batch."""
    assert_as_transformers(folder, processor, noise)


@pytest.mark.full
def test_of_the_unified_too(tiny_folder, noise):
    """Gemma 4 Unified, in which pictures are seen in both directions and sounds are not."""
    folder = tiny_folder("gemma4_unified", sliding_window=80)
    processor = Gemma4AudioProcessor(checkpoint_of(folder), {})
    assert_as_transformers(folder, processor, noise)
    processor.close()


def assert_as_transformers(folder, processor, noise):
    sounds = [sound(1.0), sound(0.6, 1)]
    prompts = [
        (f"x {AUDIO} {IMAGE} What is it?", sounds[:1], [noise(40, 60)]),
        (f"{AUDIO} or {AUDIO}?", sounds, []),
    ]
    given = [
        {"prompt": text, "multimodal_data": {"audio": heard, "image": seen}}
        for text, heard, seen in prompts
    ]
    options = {"dtype": "float32", "num_threads": 1, "use_warmup": False, "block_size": 16}
    with LLM(model=str(folder), limit_mm_per_prompt={"audio": 2}, **options) as llm:
        outputs = llm.generate(given, GREEDY)
        prepared = [llm.count_tokens(one) for one in given]
    reference = Reference(folder)
    tokens = reference.config.audio_token_id, reference.config.image_token_id
    images = Gemma4ImageProcessor(checkpoint_of(folder), {})
    for (_, heard, seen), output, count in zip(prompts, outputs, prepared, strict=True):
        assert output.error_msg is None
        ids = output.prompt_token_ids
        assert len(ids) == count.num_prompt_tokens
        items = [processor.process(processor.decode(one, HERE), {}) for one in heard]
        items += [images.process(images.decode(one, HERE), {}) for one in seen]
        starts = [i for i, x in enumerate(ids) if x in tokens and x != ids[i - 1]]
        media = [MediaSpan(offset=at, item=item) for at, item in zip(starts, items, strict=True)]
        assert list(output.outputs.token_ids) == reference.generate(ids, 6, media)
