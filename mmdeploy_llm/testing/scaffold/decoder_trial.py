"""Finds the options with which the standard decoder computes what a text model of transformers
does: from its config, from the names and shapes of its weights, and, for what neither shows, by
trying a small model with random weights."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from transformers.utils import logging

from mmdeploy_llm.errors import MMDeployLLMError, ModelNotSupportedError
from mmdeploy_llm.layers import CausalLM, DecoderConfig, rotary_config, standard_decoder
from mmdeploy_llm.layers.from_config import unread_keys
from mmdeploy_llm.testing.models.dense import DenseRunner
from mmdeploy_llm.testing.tiny import make_tokenizer, randomize, text_config
from mmdeploy_llm.weights.map import WeightMap, fused_head_targets

from .small_config import small_fields

Rename = tuple[str, str]
MAX_PARAMETERS = 2**27
TOLERANCE = 2e-4  # of float32 logits
TOKENS = (3, 17, 300, 39, 5, 5, 220, 8, 31, 77, 129, 4)
RENAMES: Sequence[Rename] = (
    (r"^(transformer|gpt_neox|backbone)\.", "model."),
    (r"\.(h|blocks)\.(\d+)\.", r".layers.\2."),
    (r"\.(embed_in|wte|word_embeddings|embeddings)\.", ".embed_tokens."),
    (r"^model\.(ln_f|final_layernorm|final_layer_norm|norm_f)\.", "model.norm."),
    (r"\.(attention|attn|self_attention)\.", ".self_attn."),
    (r"\.self_attn\.(dense|out_proj)\.", ".self_attn.o_proj."),
    (r"\.self_attn\.(q|query)_(layernorm|norm)\.", ".self_attn.q_norm."),
    (r"\.self_attn\.(k|key)_(layernorm|norm)\.", ".self_attn.k_norm."),
    (r"\.(c_fc|dense_h_to_4h|fc_in)\.", ".fc1."),
    (r"\.(c_proj|dense_4h_to_h|fc_out)\.", ".fc2."),
    (r"\.self_attn\.(query_key_value|qkv)\.", ".self_attn.qkv_proj."),
    (r"^embed_out\.", "lm_head."),
)
PLAIN_MLP: Sequence[Rename] = ((r"\.up_proj\.", ".fc1."), (r"\.down_proj\.", ".fc2."))
NORMS_AFTER: Sequence[Rename] = (
    (r"\.post_attention_layernorm\.", ".post_self_attn_layernorm."),
    (r"\.pre_feedforward_layernorm\.", ".post_attention_layernorm."),
    (r"\.post_feedforward_layernorm\.", ".post_mlp_layernorm."),
)
GLOBAL_LAYERS = (
    'frozenset(i for i, kind in enumerate(config.layer_types) if kind == "full_attention")'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderFound:
    """Says how the standard decoder becomes a model, as far as it can.

    options: fields of DecoderConfig that the family's code sets -> their value in Python.
    is_interleaved: layout of rotary pairs. has_fused_heads: query, key and value of each head lie
        in turn in one matrix, see fused_head_targets. renames: of weights.
    own: keys of the config that the standard decoder does not read.
    fields: of the small config.
    missing: what the standard decoder does not cover; (): its logits are transformers'.
    difference: largest one of the logits; None: they could not be compared.
    """

    options: Mapping[str, str]
    is_interleaved: bool = False
    has_fused_heads: bool = False
    renames: tuple[Rename, ...] = ()
    own: Mapping[str, Any]
    fields: Mapping[str, Any]
    missing: tuple[str, ...] = ()
    difference: float | None = None


def find_decoder(config: Any, architecture: str) -> DecoderFound:
    """Finds the options for a text config of transformers' class `architecture`."""
    found = _found(config, architecture, small_fields(config))
    if found.difference is None and "head_dim" in found.fields:  # heads may have to fill the model
        other = _found(config, architecture, small_fields(config, head_dim=16))
        return found if other.difference is None else other
    return found


def _found(config: Any, architecture: str, small: Mapping[str, Any]) -> DecoderFound:
    own: Mapping[str, Any] = {}
    try:
        own = unread_keys(config)
        standard_decoder(config, own=own)
    except MMDeployLLMError as error:
        return DecoderFound(options={}, own=own, fields=small, missing=(str(error),))
    try:
        model = small_model(architecture, small)
    except Exception as error:  # transformers' code may refuse the small config in any way
        reason = f"transformers does not build a small {architecture}: {error}"
        return DecoderFound(options={}, own=own, fields=small, missing=(reason,))
    try:
        return _tried(model, small, unread_keys(model.config) | own)
    except MMDeployLLMError as error:
        return DecoderFound(options={}, own=own, fields=small, missing=(str(error),))


def small_model(architecture: str, fields: Mapping[str, Any]) -> Any:
    """Builds transformers' model of a small config with random weights."""
    model_class = getattr(transformers, architecture)
    config = model_class.config_class(**text_config(make_tokenizer(), {}, **fields))
    with torch.device("meta"):
        size = sum(each.numel() for each in model_class(config).parameters())
    if size > MAX_PARAMETERS:
        raise ModelNotSupportedError(
            f"a small {architecture} has {size:,} parameters, since its config has sizes of its "
            f"own; {MAX_PARAMETERS:,} are tried at most"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config).eval()
        randomize(model)
    return model


def _tried(model: Any, small: Mapping[str, Any], own: Mapping[str, Any]) -> DecoderFound:
    """Tries variants until the logits are equal; returns the nearest one."""
    state = saved_state(model)
    renames = renames_of(state)
    known = {_renamed(key, renames): tuple(value.shape) for key, value in state.items()}
    seen = seen_options(known, model.config) | rounding(model)
    best: DecoderFound | None = None
    for is_interleaved, has_fused_heads, guess in variants(model.config, known):
        options = {**seen, **guess}
        decoder = _decoder(model.config, own, options, is_interleaved)
        missing, difference = compare(
            model, state, decoder, renames, has_fused_heads=has_fused_heads
        )
        found = DecoderFound(
            options=_written(options, standard_decoder(model.config, own=own)),
            is_interleaved=is_interleaved,
            has_fused_heads=has_fused_heads,
            renames=renames,
            own=own,
            fields=small,
            missing=missing,
            difference=difference,
        )
        if not missing:
            return replace(found, missing=tuple(_doubtful(own)))
        nearer = best is None or (difference or 1e9) < (best.difference or 1e9)
        best = found if nearer else best
    assert best is not None
    return best


def saved_state(model: Any) -> Mapping[str, torch.Tensor]:
    """Returns the weights as a checkpoint has them: transformers renames some when it saves."""
    with TemporaryDirectory() as folder:
        has_bar = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            model.save_pretrained(folder)
        finally:
            if has_bar:
                logging.enable_progress_bar()
        files = sorted(Path(folder).glob("*.safetensors"))
        return {key: value for file in files for key, value in load_file(file).items()}


def renames_of(state: Mapping[str, Any]) -> tuple[Rename, ...]:
    """Returns those renames that change a key."""
    keys, used = list(state), []
    has_gate = any(re.search(r"\.gate_(up_)?proj\.|\.experts\.", key) for key in keys)
    groups = [*RENAMES, *(() if has_gate else PLAIN_MLP)]
    if any("_feedforward_layernorm." in key for key in keys):
        groups += NORMS_AFTER
    for pattern, new in groups:
        changed = [re.sub(pattern, new, key) for key in keys]
        if changed != keys:
            used.append((pattern, new))
            keys = changed
    return tuple(used)


def seen_options(known: Mapping[str, tuple[int, ...]], config: Any) -> dict[str, Any]:
    """Returns the options that the names and shapes of a model's weights show."""
    layer = {
        key.removeprefix("model.layers.0."): shape
        for key, shape in known.items()
        if key.startswith("model.layers.0.")
    }
    has_mlp_norm = "post_attention_layernorm.weight" in layer
    has_norms = "model.norm.weight" in known
    has_pre_norms = "input_layernorm.weight" in layer or not has_norms
    has_post_norms = "post_mlp_layernorm.weight" in layer
    is_parallel = has_norms and has_pre_norms and not has_mlp_norm
    heads = layer.get("self_attn.q_norm.weight")
    is_full = heads is not None and heads[0] != _head_dim(config)
    options = {
        "qkv_bias": bool({"self_attn.q_proj.bias", "self_attn.qkv_proj.bias"} & {*layer}),
        "out_bias": "self_attn.o_proj.bias" in layer,
        "mlp_bias": bool(
            {"mlp.fc1.bias", "mlp.gate_proj.bias", "mlp.gate_up_proj.bias"} & {*layer}
        ),
        "head_bias": "lm_head.bias" in known,
        "has_gate": "mlp.fc1.weight" not in layer,
        "pre_norms": has_pre_norms,
        "post_norms": has_post_norms,
        "has_norm_weights": has_norms,
        "has_norm_biases": "model.norm.bias" in known,
        "qk_norm": heads is not None and not is_full,
        "has_full_qk_norm": is_full,
        "has_sinks": "self_attn.sinks" in layer,
        "is_parallel": is_parallel or bool(getattr(config, "use_parallel_residual", False)),
    }
    options["has_mlp_norm"] = options["is_parallel"] and has_mlp_norm
    if "model.norm.bias" in known or not has_norms:
        options["layer_norms"] = True
    return options


@torch.inference_mode()
def rounding(model: Any) -> dict[str, Any]:
    """Returns rounds_norms_late where the model's norms do, which float32 logits do not show."""
    norms = [each for each in model.modules() if type(each).__name__.endswith("RMSNorm")]
    own = next((each for each in norms if getattr(each, "weight", None) is not None), None)
    if own is None:
        return {}
    norm = copy.deepcopy(own).bfloat16()
    weight, x = norm.weight, torch.linspace(-3, 3, norm.weight.shape[0]).bfloat16()

    def normed(value: float) -> torch.Tensor:
        weight.fill_(value)
        out: torch.Tensor = norm(x)
        return out

    if normed(0.0).any():  # its weights are centred on zero
        return {}
    is_late = not torch.equal(normed(1.0) * 1.3671875, normed(1.3671875))
    return {"rounds_norms_late": True} if is_late else {}


def variants(config: Any, known: Mapping[str, Any]) -> Iterator[tuple[bool, bool, dict[str, Any]]]:
    """Yields what neither config nor weights show: whether rotary pairs are interleaved, whether
    heads lie in turn, and options; the usual ones first."""
    ranges: list[list[dict[str, Any]]] = [[{}, {"zero_centered_norms": True}]]
    kinds = getattr(config, "layer_types", None) or ()
    if {*kinds} == {"full_attention", "sliding_attention"}:
        layers = frozenset(i for i, kind in enumerate(kinds) if kind == "full_attention")
        ranges.append([{}, {"nope_layers": layers}])
    ranges.append([{}, {"embed_scale": config.hidden_size**0.5}])
    if "model.norm.bias" not in known and "model.norm.weight" in known:
        ranges.append([{}, {"layer_norms": True}, {"layer_norms": False}])
    is_fused = any(".qkv_proj." in key for key in known)
    choices = [
        (is_interleaved, fused, {name: value for part in parts for name, value in part.items()})
        for is_interleaved in (
            (False, True) if "rope_theta" in config.rope_parameters else (False,)
        )
        for fused in ((False, True) if is_fused else (False,))
        for parts in product(*ranges)
    ]
    yield from sorted(choices, key=lambda choice: choice[0] + choice[1] + len(choice[2]))


def _doubtful(own: Mapping[str, Any]) -> Iterator[str]:
    """Yields keys that a trial has not shown to matter, which does not say that they never do."""
    for key, value in own.items():
        yield (
            f"the key {key} = {value!r}: random weights show no effect of it; read the modeling "
            "file, and implement it, or name it in own=(...)"
        )


@torch.inference_mode()
def compare(
    model: Any,
    state: Mapping[str, torch.Tensor],
    decoder: DecoderConfig,
    renames: Sequence[Rename],
    *,
    has_fused_heads: bool,
) -> tuple[tuple[str, ...], float | None]:
    """Returns what the decoder lacks, (): nothing, and the largest difference of logits."""
    built = CausalLM(decoder)
    missing = fill(built, state, renames, has_fused_heads=has_fused_heads)
    if missing:
        return missing, None
    expected = model(torch.tensor([TOKENS])).logits[0]
    runner = DenseRunner(built)
    found = runner.run(runner.add(TOKENS))
    difference = float((found - expected).abs().max())
    if difference <= TOLERANCE:
        return (), difference
    reason = (
        f"the logits differ by up to {difference:.2g}: the model computes what neither a weight's "
        "name nor a key shows; read its modeling file"
    )
    return (reason,), difference


def fill(
    built: CausalLM,
    state: Mapping[str, torch.Tensor],
    renames: Sequence[Rename],
    *,
    has_fused_heads: bool,
) -> tuple[str, ...]:
    """Copies a state of transformers into a model; returns the names that do not fit."""
    ignored = (r"inv_freq$", *(("^lm_head",) if built.lm_head is None else ()))
    names = WeightMap(built, renames=renames, ignored=ignored)
    parameters = dict(built.named_parameters())
    filled, missing = set[str](), list[str]()
    for key, value in state.items():
        targets = names.targets(key)
        if targets is None:
            missing.append(f"the weight {key} {list(value.shape)}")
        elif has_fused_heads and ".qkv_proj." in _renamed(key, renames):
            targets = fused_head_targets(targets[0].name, built.num_kv_heads, built.head_dim)
        for target in targets or ():
            place = parameters[target.name].data[target.rows or slice(None)]
            part = value[target.source or slice(None)]
            if place.shape != part.shape:
                missing.append(f"the shape {list(value.shape)} of {key}, not {list(place.shape)}")
                continue
            place.copy_(part)
            filled.add(target.name)
    empty = sorted({*parameters} - filled)
    missing += [f"{name} has no weight in the checkpoint" for name in empty]
    for module in built.modules():
        init_buffers: Any = getattr(module, "init_buffers", None)
        if init_buffers is not None:
            init_buffers(torch.device("cpu"))
    return tuple(_of_first_layers(missing))


def _of_first_layers(missing: Sequence[str]) -> list[str]:
    """Leaves out what is said again of another layer."""
    return list({re.sub(r"\.\d+\.", ".N.", text): text for text in reversed(missing)}.values())[
        ::-1
    ]


def _decoder(
    config: Any, own: Mapping[str, Any], options: Mapping[str, Any], is_interleaved: bool
) -> DecoderConfig:
    rotary = rotary_config(config, is_interleaved=True) if is_interleaved else None
    decoder = standard_decoder(config, rotary, own=own)
    return replace(decoder, **options)


def _written(options: Mapping[str, Any], read: DecoderConfig) -> dict[str, str]:
    """Returns the options that the config does not say, in Python."""
    order = [each.name for each in fields(DecoderConfig)]
    changed = {n: v for n, v in options.items() if getattr(read, n) != v}
    sources = {"nope_layers": GLOBAL_LAYERS, "embed_scale": "config.hidden_size**0.5"}
    return {n: sources.get(n, repr(changed[n])) for n in sorted(changed, key=order.index)}


def _head_dim(config: Any) -> int:
    size: int = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    return size


def _renamed(key: str, renames: Sequence[Rename]) -> str:
    for pattern, new in renames:
        key = re.sub(pattern, new, key)
    return key
