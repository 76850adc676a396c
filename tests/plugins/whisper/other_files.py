"""Writes Whisper models of transformers in the layouts of CTranslate2 and whisper.cpp, from their
descriptions, for tests that read them again."""

import json
import struct
from pathlib import Path

import gguf
import numpy as np
import torch

TYPES = {"float32": 0, "int8": 1, "int16": 2, "int32": 3, "float16": 4, "bfloat16": 5}
# Name in CTranslate2 -> names in transformers, one below the other.
LAYER = {
    "self_attention/linear_0": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "self_attention/linear_1": ["self_attn.out_proj"],
    "attention/linear_0": ["encoder_attn.q_proj"],
    "attention/linear_1": ["encoder_attn.k_proj", "encoder_attn.v_proj"],
    "attention/linear_2": ["encoder_attn.out_proj"],
    "ffn/linear_0": ["fc1"],
    "ffn/linear_1": ["fc2"],
}
NORMS = {
    "self_attention/layer_norm": "self_attn_layer_norm",
    "attention/layer_norm": "encoder_attn_layer_norm",
    "ffn/layer_norm": "final_layer_norm",
}
GGML = {
    "self_attn_layer_norm": "attn_ln",
    "encoder_attn_layer_norm": "cross_attn_ln",
    "final_layer_norm": "mlp_ln",
    "self_attn.": "attn.",
    "encoder_attn.": "cross_attn.",
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "out_proj": "out",
    "fc1": "mlp.0",
    "fc2": "mlp.2",
    "layers.": "blocks.",
    "embed_tokens": "token_embedding",
    "embed_positions.weight": "positional_embedding",
    "encoder.layer_norm": "encoder.ln_post",
    "decoder.layer_norm": "decoder.ln",
}
GGML_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8}
# Of a whole file, beside 2000 where it has blocks, whose format is ggml's second.
GGML_FILES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9}


def ctranslate2_variables(model, kind):
    """Returns (name, array or number) of all variables. kind: as CTranslate2's converter names
    them."""
    state, found = model.state_dict(), {}
    plain = {"int8": "float32", "int16": "float32"}.get(kind, kind.removeprefix("int8_"))

    def put(name, value, is_weight=False):
        value = value.float()
        if is_weight and kind.startswith("int8"):
            rows = value.flatten(1)
            most = rows.abs().amax(1)
            scale = 127 / torch.where(most == 0, torch.full_like(most, 127.0), most)
            found[name] = (rows * scale[:, None]).round().to(torch.int8).view(value.shape)
            found[f"{name}_scale"] = scale
        elif is_weight and kind == "int16":
            scale = 2**10 / value.abs().max()
            found[name] = (value * scale).round().to(torch.int16)
            found[f"{name}_scale"] = scale
        else:
            found[name] = value.to(getattr(torch, plain))

    def linear(name, keys):
        weights = [state[f"{key}.weight"] for key in keys]
        put(f"{name}/weight", torch.cat(weights), is_weight=True)
        sizes = [len(weight) for weight in weights]
        biases = [state.get(f"{key}.bias") for key in keys]
        rows = [torch.zeros(n) if b is None else b for n, b in zip(sizes, biases, strict=True)]
        put(f"{name}/bias", torch.cat(rows))

    def norm(name, key):
        put(f"{name}/gamma", state[f"{key}.weight"])
        put(f"{name}/beta", state[f"{key}.bias"])

    config = model.config
    for side, layers, heads in (
        ("encoder", config.encoder_layers, config.encoder_attention_heads),
        ("decoder", config.decoder_layers, config.decoder_attention_heads),
    ):
        found[f"{side}/num_heads"] = torch.tensor(heads, dtype=torch.int16)
        put(f"{side}/position_encodings/encodings", state[f"model.{side}.embed_positions.weight"])
        norm(f"{side}/layer_norm", f"model.{side}.layer_norm")
        for number in range(layers):
            own, key = f"{side}/layer_{number}", f"model.{side}.layers.{number}"
            for name, parts in LAYER.items():
                if f"{key}.{parts[0]}.weight" in state:
                    linear(f"{own}/{name}", [f"{key}.{part}" for part in parts])
            for name, part in NORMS.items():
                if f"{key}.{part}.weight" in state:
                    norm(f"{own}/{name}", f"{key}.{part}")
    for name in ("conv1", "conv2"):
        put(f"encoder/{name}/weight", state[f"model.encoder.{name}.weight"], is_weight=True)
        put(f"encoder/{name}/bias", state[f"model.encoder.{name}.bias"])
    put("decoder/embeddings/weight", state["model.decoder.embed_tokens.weight"], is_weight=True)
    found["decoder/activation"] = torch.tensor(3, dtype=torch.int8)
    found["decoder/pre_norm"] = torch.tensor(1, dtype=torch.int8)
    return dict(sorted(found.items()))


def ctranslate2_bytes(variables, spec="WhisperSpec", version=6):
    """Returns model.bin."""

    def text(value):
        return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"

    parts = [struct.pack("<I", version), text(spec), struct.pack("<II", 3, len(variables))]
    for name, value in variables.items():
        data = value.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        kind = TYPES[str(value.dtype).removeprefix("torch.")]
        parts += [text(name), struct.pack(f"<B{value.ndim}I", value.ndim, *value.shape)]
        parts += [struct.pack("<BI", kind, len(data)), data]
    aliases = {}
    for end in ("weight", "weight_scale"):
        if f"decoder/embeddings/{end}" in variables:
            aliases[f"decoder/projection/{end}"] = f"decoder/embeddings/{end}"
    parts.append(struct.pack("<I", len(aliases)))
    parts += [text(alias) + text(name) for alias, name in aliases.items()]
    return b"".join(parts)


def write_ctranslate2(model, tokens, folder, kind, tokenizer=None):
    """Writes a folder. tokens: all, by their ids. tokenizer: the JSON of one."""
    folder = Path(folder)
    folder.mkdir(exist_ok=True)
    (folder / "model.bin").write_bytes(ctranslate2_bytes(ctranslate2_variables(model, kind)))
    (folder / "vocabulary.json").write_text(json.dumps(tokens))
    generation = model.generation_config
    values = {
        "suppress_ids": generation.suppress_tokens,
        "suppress_ids_begin": generation.begin_suppress_tokens,
        "alignment_heads": [[0, 0]],
        "lang_ids": sorted(generation.lang_to_id.values()),
    }
    (folder / "config.json").write_text(json.dumps(values))
    if tokenizer is not None:
        (folder / "tokenizer.json").write_text(tokenizer)


def ggml_tensors(model, kind):
    """Returns (name, type, shape, bytes) of the tensors of a file of whisper.cpp."""
    for key, value in model.state_dict().items():
        if key == "proj_out.weight":
            continue
        name, value = key.removeprefix("model."), value.float()
        for old, new in GGML.items():
            name = name.replace(old, new)
        if "conv" in name and name.endswith("bias"):
            value = value[:, None]
        is_small = value.ndim < 2 or "positional" in name or value.shape[-1] == 1
        own = "f32" if is_small else kind
        own = "f16" if "conv" in name and own.startswith("q") else own
        number = GGML_TYPES[own]
        data = gguf.quantize(value.numpy(), gguf.GGMLQuantizationType(number))
        yield name, number, tuple(value.shape), np.ascontiguousarray(data).tobytes()


def write_ggml(model, words, path, kind, filters=None):
    """Writes a file of whisper.cpp. words: the bytes of all tokens that are no special ones, among
    them a blank, which that program looks for. filters: of mels, [frequencies, mels], zeros where
    nobody computes with them."""
    config = model.config
    mels = config.num_mel_bins
    bank = np.zeros((mels, 201)) if filters is None else filters.T
    parts = [
        struct.pack(
            "<4s11i",
            b"lmgg",
            config.vocab_size,
            config.max_source_positions,
            config.d_model,
            config.encoder_attention_heads,
            config.encoder_layers,
            config.max_target_positions,
            config.d_model,
            config.decoder_attention_heads,
            config.decoder_layers,
            mels,
            GGML_FILES[kind] + 2000 * kind.startswith("q"),
        ),
        struct.pack("<2i", *bank.shape) + bank.astype(np.float32).tobytes(),
        struct.pack("<i", len(words)),
    ]
    parts += [struct.pack("<i", len(word)) + word for word in words]
    for name, number, shape, data in ggml_tensors(model, kind):
        axes = struct.pack(f"<{len(shape)}i", *reversed(shape))
        parts.append(struct.pack("<3i", len(shape), len(name), number) + axes + name.encode())
        parts.append(data)
    Path(path).write_bytes(b"".join(parts))
