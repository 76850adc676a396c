"""Describes an image-text model for transformers, from the metadata of its two GGUF files."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.weights.gguf.config import gguf_config
from mmdeploy_llm.weights.gguf.header import Header
from mmdeploy_llm.weights.gguf.lookup import Tables
from mmdeploy_llm.weights.gguf.metadata import Metadata
from mmdeploy_llm.weights.gguf.tables import Tower, Values
from mmdeploy_llm.weights.gguf.tower_sizes import side

TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaConfig:
    """values: transformers' config of the whole model, "model_type" and "architectures" included.
    image, video: options of the processors."""

    values: Values
    image: Values
    video: Values


def media_config(text: Header, tower: Header, tables: Tables) -> MediaConfig:
    """Describes the model whose text model and vision tower are in these files.

    Raises ModelNotSupportedError for an unknown architecture, CheckpointError for an unknown tower,
    files that do not belong together and metadata that are missing or out of range.
    """
    kind, model, metadata = tables.tower(tower), tables.media_model(text, tower), Metadata(tower)
    own = gguf_config(text, tables.model(text))
    shared = {name: own[name] for name in ("tie_word_embeddings", "dtype", *TOKEN_KEYS)}
    del own["architectures"]
    if model.text_type:
        own["model_type"] = model.text_type
    _check_width(metadata, kind, own["hidden_size"], text)
    patch = side(metadata, "patch_size")
    vision, image = kind.config(metadata, own)
    channels = {name: _channels(metadata, name) for name in ("image_mean", "image_std")}
    tokens = {field: _token(text, word) for field, word in kind.tokens.items()}
    outer = {name: vision.pop(name) for name in kind.outer & vision.keys()}
    return MediaConfig(
        values={
            "model_type": model.model_type,
            "architectures": [model.model],
            "text_config": own,
            "vision_config": {"patch_size": patch, **vision},
            **shared,
            **tokens,
            **outer,
        },
        image={**channels, **image},
        video=channels,
    )


def _check_width(metadata: Metadata, kind: Tower, hidden_size: int, text: Header) -> None:
    found = metadata.tensors.get(kind.last)
    if found is None or found.shape[0] != hidden_size:
        width = "missing" if found is None else f"of the shape {list(found.shape)}"
        raise CheckpointError(
            f"the tensor {kind.last} of {metadata.header.paths[0]} is {width}, but the model in "
            f"{text.paths[0].name} has {hidden_size} channels: they do not belong together. Put "
            "each model and its mmproj file into a folder of their own"
        )


def _token(text: Header, word: str) -> int:
    found = text.values.get("tokenizer.ggml.tokens")
    if not isinstance(found, tuple) or word not in found:
        raise CheckpointError(
            f"tokenizer.ggml.tokens of {text.paths[0]} has no {word}, which stands for images or "
            "videos in a prompt; put the model's config.json into the folder, which names another"
        )
    return found.index(word)


def _channels(metadata: Metadata, name: str) -> list[float]:
    """Returns the values of three channels."""
    found = metadata.values(f"vision.{name}")
    allowed = "three numbers" + (" above 0" if name == "image_std" else "")
    values = [] if found is None else [each for each in found if type(each) in (int, float)]
    is_good = len(values) == 3 and all(abs(float(each)) < 1e4 for each in values)
    if not is_good or (name == "image_std" and min(map(float, values)) <= 0):
        raise metadata.wrong(f"vision.{name}", allowed)
    return [float(str(np.float32(each))) for each in values]  # as few digits as tell it apart
