"""Writes a model of Whisper as whisper.cpp reads it: `write_ggml(path, model, filters, words)`.

Little-endian: the magic number, eleven sizes; the mel filters [bins, frequencies]; words, each its
length and its bytes; then tensors, each the number of its dimensions, the length of its name, the
code of its type, its dimensions from the last to the first, its name, its values.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

MAGIC, FLOAT32, HALF, Q8_0 = 0x67676D6C, 0, 1, 8
FILE_TYPES = {HALF: 1, Q8_0: 2007}  # of ggml: the format of blocks is its version 2
# From transformers' names to those of whisper.cpp.
NAMES = (
    ("model.", ""),
    (".layers.", ".blocks."),
    ("encoder_attn_layer_norm", "cross_attn_ln"),
    ("self_attn_layer_norm", "attn_ln"),
    ("final_layer_norm", "mlp_ln"),
    ("encoder_attn.", "cross_attn."),
    ("self_attn.", "attn."),
    ("k_proj", "key"),
    ("q_proj", "query"),
    ("v_proj", "value"),
    ("out_proj", "out"),
    ("fc1", "mlp.0"),
    ("fc2", "mlp.2"),
    ("encoder.layer_norm", "encoder.ln_post"),
    ("decoder.layer_norm", "decoder.ln"),
    ("embed_positions.weight", "positional_embedding"),
    ("embed_tokens", "token_embedding"),
)
WIDE = ("encoder.conv1.bias", "encoder.conv2.bias")  # in 32 bits, as are vectors and positions

Quantize = Callable[[np.ndarray], np.ndarray]  # rows of float32 -> their blocks in Q8_0


def write_ggml(
    path: Path,
    model: Any,
    filters: np.ndarray,
    words: Sequence[bytes],
    quantize: Quantize | None = None,
) -> None:
    """Writes matrices in 16 bits, or in Q8_0 by `quantize`. model: of transformers. filters:
    [frequencies, bins]. words: those that are not special, the first of which whisper.cpp looks for
    is a blank."""
    with path.open("wb") as file:
        for part in _parts(model, filters, words, quantize):
            file.write(part)


def _parts(
    model: Any, filters: np.ndarray, words: Sequence[bytes], quantize: Quantize | None
) -> Iterator[bytes]:
    config, kind = model.config, HALF if quantize is None else Q8_0
    sizes = (
        *(config.vocab_size, config.max_source_positions, config.d_model),
        *(config.encoder_attention_heads, config.encoder_layers, config.max_target_positions),
        *(config.d_model, config.decoder_attention_heads, config.decoder_layers),
        *(config.num_mel_bins, FILE_TYPES[kind]),
    )
    yield struct.pack("<12i", MAGIC, *sizes)
    mel = np.ascontiguousarray(filters.T, dtype=np.float32)
    yield struct.pack("<2i", *mel.shape) + mel.tobytes()
    yield struct.pack("<i", len(words))
    for word in words:
        yield struct.pack("<i", len(word)) + word
    for own, tensor in model.state_dict().items():
        if own == "proj_out.weight":  # the embedding
            continue
        name = own
        for old, new in NAMES:
            name = name.replace(old, new)
        values = tensor.float().numpy().squeeze()
        values = values[:, None] if name in WIDE else values
        yield from _tensor(name, values, quantize)


def _tensor(name: str, values: np.ndarray, quantize: Quantize | None) -> Iterator[bytes]:
    kind, stored = HALF, values.astype(np.float16)
    if values.ndim < 2 or name in WIDE or "positional" in name:
        kind, stored = FLOAT32, values.astype(np.float32)
    elif quantize is not None and values.ndim == 2:  # convolutions stay in 16 bits
        kind, stored = Q8_0, quantize(values.astype(np.float32))
    yield struct.pack("<3i", values.ndim, len(name), kind)
    yield struct.pack(f"<{values.ndim}i", *values.shape[::-1]) + name.encode()
    yield stored.tobytes()
