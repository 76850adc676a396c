"""Reads the sizes of the language model from transformers' config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mmdeploy_llm.errors import CheckpointError, ModelNotSupportedError
from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm.system.guarding.folder_files import shown

# In the configs of transformers.
POSITIONS = ("max_position_embeddings", "max_seq_len", "max_target_positions")
NO_LIMIT = -1  # XLNet's
# Says how many tokens a head gives; the first that the config has.
VOCABULARIES = (
    "unpadded_vocab_size",  # Inkling's: its embeddings have rows for none
    "decoder_vocab_size",  # Marian's, whose encoder may have another
    "vocab_size",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSizes:
    """The sizes of a language model, as its config states them.

    dtype: torch's name of the dtype of the weights, float32 where the config names none.
    max_position_embeddings: the longest sequence, None where the config does not tell.
    head_dim: channels of a head, None where the config does not tell.
    """

    dtype: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int | None
    head_dim: int | None


def read_text_sizes(checkpoint: Checkpoint) -> TextSizes:
    """Reads the sizes. Raises ModelNotSupportedError for a config class without one that is needed,
    CheckpointError for a value that is not an integer above 0."""
    text, name = text_config(checkpoint), checkpoint.architecture
    stored = getattr(checkpoint.config, "dtype", None) or getattr(text, "dtype", None)
    has_size = _uniform(text, "hidden_size") is not None
    # A head alone has none; its layers are those of an encoder.
    layers = text if has_size else getattr(text, "encoder_config", None) or text
    hidden_size = _whole_number(layers, "hidden_size", name)
    stated = [field for field in POSITIONS if _uniform(layers, field) not in (None, NO_LIMIT)]
    longest = _whole_number(layers, stated[0], name) if stated else None
    return TextSizes(
        dtype=str(stored or "float32").removeprefix("torch."),
        vocab_size=_whole_number(text, _vocabulary(text), name),
        hidden_size=hidden_size,
        max_position_embeddings=longest,
        head_dim=_head_dim(text, hidden_size),
    )


def text_config(checkpoint: Checkpoint) -> Any:
    """Returns the language model's part of the config. Raises CheckpointError where there is
    none."""
    try:
        found = checkpoint.config.get_text_config()
    except Exception as error:  # transformers raises whatever its config classes raise
        raise CheckpointError(
            f"config.json of the model names no text model: {type(error).__name__}: {error}"
        ) from error
    if isinstance(found, dict) or found is None:
        raise CheckpointError("text_config in config.json of the model names no text model")
    return found


def _whole_number(config: Any, name: str, architecture: str) -> int:
    """Returns a value of transformers' config that every model here needs.

    Raises ModelNotSupportedError where its class has none, CheckpointError where it is no integer
    above 0.
    """
    value = _uniform(config, name)
    if value is None:
        raise ModelNotSupportedError(
            f"{architecture or 'the model'} cannot run: its config ({type(config).__name__}) has "
            f"no {name}, which attention over a KV cache needs; use a plugin made for this model"
        )
    if type(value) is not int or value < 1:
        raise CheckpointError(
            f"{name!r} in config.json of the model is {shown(value)}; allowed: an integer above 0"
        )
    return value


def _vocabulary(text: Any) -> str:
    """Returns the field that says how many tokens the head gives."""
    stated = (field for field in VOCABULARIES if _uniform(text, field) is not None)
    return next(stated, VOCABULARIES[-1])


def _uniform(config: Any, name: str) -> Any:
    """Returns a value of the config, None where it has none, or one for each layer."""
    try:
        return getattr(config, name, None)
    except Exception:  # transformers' error for values that differ is no AttributeError
        return None


def _head_dim(text: Any, hidden_size: int) -> int | None:
    """Returns the channels of a head where the config tells them: None where heads differ."""
    head_dim, num_heads = _uniform(text, "head_dim"), _uniform(text, "num_attention_heads")
    if type(head_dim) is int and head_dim > 0:
        return head_dim
    return hidden_size // num_heads if type(num_heads) is int and num_heads > 0 else None
