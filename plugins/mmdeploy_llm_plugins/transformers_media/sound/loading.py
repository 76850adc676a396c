"""Loads transformers' processor of a checkpoint with what it needs for sounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers

from mmdeploy_llm.errors import CheckpointError, UnsupportedMediaError
from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm_plugins.transformers_media.processing import (
    assembled,
    processor_class,
    reason_of,
)

from .extractors import GraniteSpeechFeatureExtractor
from .voxtral import VoxtralProcessor

COMPONENTS = ("feature_extractor", "audio_processor")  # names of what processes sounds
PROCESSOR_FILE = "processor_config.json"
PREPROCESSOR_FILE = "preprocessor_config.json"
# Classes that need libraries, or leave something to them -> ours.
OURS = {made.__name__: made for made in (GraniteSpeechFeatureExtractor, VoxtralProcessor)}


def load_sound_processor(checkpoint: Checkpoint) -> Any:
    """Loads the processor with its feature extractor and tokenizer; its other components are None.

    Raises UnsupportedMediaError when the model has none for sounds, CheckpointError for files that
    transformers cannot use.
    """
    base = processor_class(checkpoint, COMPONENTS, "sounds")
    base = OURS.get(base.__name__, base)
    name = next(name for name in COMPONENTS if name in base.get_attributes())
    options = _fields(checkpoint)
    if options is None:
        raise UnsupportedMediaError("the checkpoint has no file that describes a feature extractor")
    try:
        extractor = _extractor_class(options).from_dict(dict(options))
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            checkpoint.folder, local_files_only=True, trust_remote_code=False
        )
        components = {name: extractor, "tokenizer": tokenizer}
        processor = assembled(base, components, checkpoint.read_json(PROCESSOR_FILE))
    except UnsupportedMediaError:
        raise
    except Exception as error:  # transformers raises whatever its classes raise
        raise CheckpointError(
            f"transformers' {base.__name__} cannot be made from the checkpoint's files: "
            f"{reason_of(error)}"
        ) from error
    if not getattr(processor, "audio_token", None):
        raise UnsupportedMediaError(f"transformers' {base.__name__} names no token for sounds")
    return processor


def _fields(checkpoint: Checkpoint) -> Mapping[str, Any] | None:
    """Returns the options of the feature extractor: of its own file, or of the processor's."""
    nested = checkpoint.read_json(PROCESSOR_FILE)
    for name in COMPONENTS:
        if isinstance(nested.get(name), Mapping):
            found: Mapping[str, Any] = nested[name]
            return found
    own = checkpoint.read_json(PREPROCESSOR_FILE)
    return own if own.get("feature_extractor_type") else None


def _extractor_class(options: Mapping[str, Any]) -> Any:
    name = str(options.get("feature_extractor_type"))
    if name in OURS:
        return OURS[name]
    found = getattr(transformers, name, None)
    if found is None or getattr(found, "is_dummy", False):
        raise UnsupportedMediaError(
            f"transformers has no feature extractor {name!r}, or it needs a library that is not "
            "installed"
        )
    return found
