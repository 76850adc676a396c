"""Gives a class of the census what its sounds need, and compares its answers about them.

Tiny families that are described somewhere are taken as they are; of the others the config is shrunk
and the feature extractor has its defaults, but Whisper's the frequencies that the config asks for.
"""

import json
import sys
from pathlib import Path

import images
import numpy as np
import shrink
import transformers
from mmdeploy_llm_plugins.transformers_media.sound.loading import load_sound_processor
from mmdeploy_llm_plugins.transformers_media.sound.processor import AnyAudioProcessor
from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES

from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm.testing.checkpoint import write_checkpoint
from mmdeploy_llm.testing.tiny import families, family_of, write_family

sys.path.insert(0, str(Path(__file__).parents[4]))
from tests.plugins.transformers_any import sound_families

WHISPER = "WhisperFeatureExtractor"  # of classes that transformers' table lacks
SECONDS = 1.2  # of a sound
OTHERS = (  # that hear, beside those of transformers' table for several media without images
    "Gemma3nForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "MusicFlamingoForConditionalGeneration",
    "AudioFlamingo3ForConditionalGeneration",
    "Qwen2_5OmniThinkerForConditionalGeneration",
    "Qwen3OmniMoeThinkerForConditionalGeneration",
)


def classes(multimodal, pictured):
    """Returns name -> model type of the classes that take sounds. multimodal, pictured: those of
    transformers' tables for all media, and for images."""
    found = {name: kind for name, kind in multimodal.items() if name not in pictured}
    for name in OTHERS:
        found[name] = getattr(transformers, name).config_class.model_type
    return found


def described():
    """Returns architecture -> the Family that describes a tiny checkpoint."""
    found = {family.architecture: family for family in sound_families.FAMILIES.values()}
    for spec in families().values():
        if "audio" in spec.media:
            found[family_of(spec).architecture] = family_of(spec)
    return found


def write(name, kind, folder):
    """Writes a small checkpoint of a class, with the files of its processor."""
    family = described().get(name)
    if family is not None:
        write_family(family, folder)
        return
    config = shrink.shrunk(getattr(transformers, name).config_class)
    config.architectures = [name]
    base, processor = images.processor_class(kind)
    tokenizer = images.make_tokenizer(base)
    extractor = getattr(transformers, FEATURE_EXTRACTOR_MAPPING_NAMES.get(kind, WHISPER))
    bins = getattr(getattr(config, "audio_config", None), "num_mel_bins", None)
    sizes = {"feature_size": bins} if bins and extractor.__name__ == WHISPER else {}
    fields = {**extractor(**sizes).to_dict(), "feature_extractor_type": extractor.__name__}
    (folder / "preprocessor_config.json").write_text(json.dumps(fields, default=str))
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": processor}))
    tokenizer.save_pretrained(folder)
    made = load_sound_processor(Checkpoint(folder=folder, config=config))
    for field in ("audio_token_id", "audio_token_index"):
        if getattr(config, field, None) is not None:
            setattr(config, field, tokenizer.convert_tokens_to_ids(made.audio_token))
    write_checkpoint(config, folder, tokenizer=tokenizer)


def prompts(folder):
    """Returns prompts of ours, and the same as arguments of transformers' forward."""
    config = transformers.AutoConfig.from_pretrained(folder)
    processor = AnyAudioProcessor(Checkpoint(folder=folder, config=config), {})
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    random = np.random.default_rng(0)
    samples = (random.standard_normal(round(SECONDS * processor.rate)) * 0.1).astype(np.float32)
    made, marker = processor.prepare(samples, {}), processor.markers[0]
    given = {"array": samples, "sampling_rate": processor.rate}
    heard = {"prompt": f"What is {marker} it?", "multimodal_data": {"audio": [given]}}
    plain = {"prompt": "Nothing to hear."}
    inputs = [
        dict(tokenizer(prompt["prompt"].replace(marker, made.text), return_tensors="pt"))
        for prompt in (heard, plain)
    ]
    inputs[0] |= made.tensors
    for one in inputs:
        one.pop("token_type_ids", None)
    return [heard, plain], inputs
