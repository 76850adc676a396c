"""Makes a folder of transformers of Whisper as CTranslate2 stores it: `whisper_folder(name)`.

It is needed for as long as the product does not load such folders itself; transformers needs it to
be the reference anyway. A model.bin of version 6 holds, little-endian: the version (u32), the name
of a specification (text), its revision (u32), the number of variables (u32); each variable: its
name (text), its rank (u8), its sizes (u32 each), the code of its type (u8), its bytes (u32 and
these); then the number of aliases (u32), each the alias and the variable (texts). A text is its
length with the closing zero (u16), and its bytes.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from tests.real.packages import folder_of, made

TYPES = (np.float32, np.int8, np.int16, np.int32, np.float16)  # by their codes
NAMES = (
    # (expression, what takes its place), for names without "/weight" and the like at their end
    ("^", "model/"),
    ("/layer_(?=[0-9])", "/layers/"),
    ("self_attention/layer_norm", "self_attn_layer_norm"),
    ("self_attention/linear_1", "self_attn/out_proj"),
    ("(?<!_)attention/layer_norm", "encoder_attn_layer_norm"),
    ("(?<!_)attention/linear_0", "encoder_attn/q_proj"),
    ("(?<!_)attention/linear_2", "encoder_attn/out_proj"),
    ("ffn/layer_norm", "final_layer_norm"),
    ("ffn/linear_0", "fc1"),
    ("ffn/linear_1", "fc2"),
    ("embeddings", "embed_tokens"),
    ("position_encodings", "embed_positions"),
)
JOINED = {
    "self_attention/linear_0": ("self_attn", "qkv"),
    "attention/linear_1": ("encoder_attn", "kv"),
}
ENDS = {
    "gamma": "weight",
    "beta": "bias",
    "encodings": "weight",
    "weight": "weight",
    "bias": "bias",
}


def whisper_folder(name: str) -> Path:
    """Returns the folder of transformers of a source of packages.py; it is made once."""
    return made(f"{name}-transformers", lambda folder: _write(folder_of(name), folder))


def _write(stored: Path, folder: Path) -> None:
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

    with (stored / "model.bin").open("rb") as file:
        variables = _read(file)
    ids = _ids(stored)
    config = _config(variables, ids)
    model = WhisperForConditionalGeneration(config)
    missing, unknown = model.load_state_dict(dict(_parameters(variables)), strict=False)
    assert set(missing) <= {"proj_out.weight"}, missing
    assert not unknown, unknown
    model.tie_weights()
    _set_generation(model.generation_config, json.loads((stored / "config.json").read_text()), ids)
    model.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=config.num_mel_bins).save_pretrained(folder)
    _write_tokenizer(stored, folder)


def _read(file: BinaryIO) -> dict[str, np.ndarray]:
    """Returns the variables of a model.bin."""

    def take(code: str) -> Any:
        (value,) = struct.unpack("<" + code, file.read(struct.calcsize("<" + code)))
        return value

    def text() -> str:
        return file.read(take("H"))[:-1].decode()

    if take("I") != 6:
        raise ValueError("only version 6 of model.bin is read")
    text(), take("I")
    variables = {}
    for _ in range(take("I")):
        name = text()
        sizes = [take("I") for _ in range(take("B"))]
        kind = TYPES[take("B")]
        variables[name] = np.frombuffer(file.read(take("I")), kind).reshape(sizes)
    return variables


def _parameters(variables: dict[str, np.ndarray]) -> Iterator[tuple[str, Tensor]]:
    """Yields transformers' parameters in float32. Rows of int8 are stored with factors, by which
    they were multiplied."""
    for name in variables:
        path, _, end = name.rpartition("/")
        if end not in ENDS or path == "decoder/projection":
            continue
        value = variables[name].astype(np.float32)
        if (scale := variables.get(f"{name}_scale")) is not None:
            value = value / scale.reshape(-1, *[1] * (value.ndim - 1))
        joined = re.search(r"/(self_attention/linear_0|attention/linear_1)$", path)
        if joined is None:
            for expression, new in NAMES:
                path = re.sub(expression, new, path)
            yield f"{path}.{ENDS[end]}".replace("/", "."), torch.from_numpy(value.copy())
            continue
        module, letters = JOINED[joined[1]]
        layer = re.sub("/layer_", "/layers/", f"model/{path[: joined.start()]}").replace("/", ".")
        for letter, part in zip(letters, np.split(value, len(letters)), strict=True):
            if (letter, end) != ("k", "bias"):
                yield f"{layer}.{module}.{letter}_proj.{end}", torch.from_numpy(part.copy())


def _config(variables: dict[str, np.ndarray], ids: dict[str, int]) -> Any:
    from transformers import WhisperConfig

    vocab, width = variables["decoder/embeddings/weight"].shape
    layers = {
        side: len({name.split("/")[1] for name in variables if name.startswith(f"{side}/layer_")})
        - 1  # layer_norm is no layer
        for side in ("encoder", "decoder")
    }
    end = ids["<|endoftext|>"]
    inner = len(variables["encoder/layer_0/ffn/linear_0/weight"])
    return WhisperConfig(
        vocab_size=vocab,
        d_model=width,
        encoder_layers=layers["encoder"],
        decoder_layers=layers["decoder"],
        encoder_attention_heads=width // 64,
        decoder_attention_heads=width // 64,
        encoder_ffn_dim=inner,
        decoder_ffn_dim=inner,
        num_mel_bins=variables["encoder/conv1/weight"].shape[1],
        decoder_start_token_id=ids["<|startoftranscript|>"],
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
    )


def _ids(stored: Path) -> dict[str, int]:
    """Returns the ids of the special tokens."""
    added = json.loads((stored / "tokenizer.json").read_text("utf-8"))["added_tokens"]
    return {token["content"]: token["id"] for token in added}


def _set_generation(generation: Any, stored: dict[str, Any], ids: dict[str, int]) -> None:
    """Sets the rules of decoding that generation_config.json has in folders of transformers."""
    generation._from_model_config = False  # or transformers makes it anew when it is loaded
    start = generation.decoder_start_token_id = ids["<|startoftranscript|>"]
    generation.bos_token_id = generation.eos_token_id = ids["<|endoftext|>"]
    generation.pad_token_id = ids["<|endoftext|>"]
    generation.no_timestamps_token_id = ids["<|notimestamps|>"]
    generation.prev_sot_token_id = ids["<|startofprev|>"]
    generation.suppress_tokens = stored["suppress_ids"]
    generation.begin_suppress_tokens = stored["suppress_ids_begin"]
    generation.alignment_heads = stored["alignment_heads"]
    generation.max_initial_timestamp_index = 50
    generation.max_length = 448
    generation.return_timestamps = False
    generation.is_multilingual = ids["<|endoftext|>"] > 50256
    if generation.is_multilingual:
        tasks = ("transcribe", "translate")
        generation.task_to_id = {task: ids[f"<|{task}|>"] for task in tasks}
        first_task = min(generation.task_to_id.values())
        generation.lang_to_id = {t: n for t, n in ids.items() if start < n < first_task}


def _write_tokenizer(stored: Path, folder: Path) -> None:
    from transformers import WhisperTokenizerFast

    end = dict.fromkeys(("unk_token", "bos_token", "eos_token", "pad_token"), "<|endoftext|>")
    file = shutil.copy(stored / "tokenizer.json", folder / "tokenizer.json")
    WhisperTokenizerFast(tokenizer_file=str(file), **end).save_pretrained(folder)
