"""Describes a model for transformers, from the metadata of its GGUF file.

transformers reads such a config itself (`gguf_file=...`), but leaves many sizes at the defaults of
its classes, such as the channels of a head, and does not know every architecture.
"""

from __future__ import annotations

from .header import Header
from .metadata import Metadata, head_dim, num_layers
from .rope import rope_parameters
from .tables import TextModel, Values

END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")  # of a text, a turn, a message


def gguf_config(header: Header, model: TextModel) -> Values:
    """Returns the fields of transformers' config, "model_type" and "architectures" included.

    Raises CheckpointError for metadata that are missing or out of range.
    """
    metadata = Metadata(header)
    return _shared(metadata, model) | model.config(metadata)


def _shared(metadata: Metadata, model: TextModel) -> Values:
    hidden_size = metadata.whole("embedding_length")
    num_heads = metadata.whole("attention.head_count")
    values = {
        "model_type": model.model_type,
        "architectures": [model.model],
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers(metadata),
        "num_attention_heads": num_heads,
        "max_position_embeddings": metadata.whole("context_length"),
        "vocab_size": metadata.shape("token_embd.weight", 2)[0],
        "tie_word_embeddings": "output.weight" not in metadata.tensors,
        "dtype": _dtype(metadata),
        "bos_token_id": metadata.token("bos_token_id"),
        "pad_token_id": metadata.token("padding_token_id"),
        "eos_token_id": _ends(metadata),
    }
    if model.has_equal_layers:
        if model.has_rms_norm:
            values["rms_norm_eps"] = metadata.number("attention.layer_norm_rms_epsilon")
        values["num_key_value_heads"] = metadata.most("attention.head_count_kv", num_heads)
        values["head_dim"] = size = head_dim(metadata)
        values["rope_parameters"] = rope_parameters(metadata, size)
    if model.has_mlp_size:
        values["intermediate_size"] = metadata.whole("feed_forward_length")
    return values


def _ends(metadata: Metadata) -> list[int] | int | None:
    found = [metadata.token(key) for key in END_KEYS]
    ids = list(dict.fromkeys(token for token in found if token is not None))
    return ids if len(ids) > 1 else next(iter(ids), None)


def _dtype(metadata: Metadata) -> str:
    """Returns the dtype to compute in: that of the matrices, bfloat16 for quantised ones."""
    kinds = {t.type.name for t in metadata.tensors.values() if len(t.shape) > 1}
    plain = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    if kinds - plain.keys() or "BF16" in kinds:
        return "bfloat16"
    return "float16" if "F16" in kinds else "float32"
