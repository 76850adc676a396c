"""The allowed values of a checkpoint's JSON files. Keys that are not named here stay as they are;
a float such as 1200.0 becomes the integer that a field wants.

The bounds are far above every published model; they keep a wrong number from costing hours or all
memory before anything else can notice it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict

from mmdeploy_llm.system.guarding.folder_files import fault, shown, validated

MAX_LAYERS = 10_000
MAX_COUNT = 2**24  # of anything whose name begins with num_ or n_
MAX_SIZE = 2**20  # channels
MAX_POSITIONS = 2**25
MAX_VOCABULARY = 2**22
MAX_LABELS = 100_000  # transformers makes a dict entry for each
MAX_NAME = 256
MAX_PIXELS = 10**10

LAYER_KEY = re.compile(r"(?:^|_)(?:layers?|depths?|blocks?)$")
COUNT_KEY = re.compile(r"^(?:num|n)_")
NAME = re.compile(r"[A-Za-z0-9_.|+ -]*")
# What families call the number of experts, and how many of them compute a token.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_k", "moe_topk")
OTHER_CONFIGS = frozenset({"quantization_config", "compression_config"})
IMPLEMENTATION_KEYS = frozenset(
    f"{prefix}{kind}_implementation{suffix}"
    for kind in ("attn", "experts")
    for prefix in ("", "_")
    for suffix in ("", "_internal")
)


def _check(is_good: Callable[[Any], bool], allowed: str, *, optional: bool = True) -> Any:
    """Returns a pydantic validator. allowed: what the error says; optional: null passes."""

    def check(value: Any) -> Any:
        if not (optional and value is None) and not is_good(value):
            raise ValueError(allowed)
        return value

    return BeforeValidator(check)


def _check_integers(is_good: Callable[[Any], bool], allowed: str) -> Any:
    """Returns the validator of an integer, or of several, which it makes of floats without a
    fraction: programs that write JSON have made floats of them."""

    def check(value: Any) -> Any:
        made = _integers(value)
        if made is not None and not is_good(made):
            raise ValueError(allowed)
        return made

    return BeforeValidator(check)


def _integers(value: Any) -> Any:
    """Replaces floats without a fraction by integers, in a list and by name too."""
    if isinstance(value, list):
        return [_integers(item) for item in value]
    if isinstance(value, dict):
        return {key: _integers(item) for key, item in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_whole(value: object, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high


def _is_number(value: object, low: float, high: float) -> bool:
    return type(value) in (int, float) and low <= value <= high  # type: ignore[operator]


def _whole(low: int, high: int) -> Any:
    """Checks an integer, or a list with one for each layer or stage."""

    def is_good(value: object) -> bool:
        values = value if isinstance(value, list) else [value]
        return len(values) <= MAX_LAYERS and all(_is_whole(item, low, high) for item in values)

    return _check_integers(is_good, f"an integer from {low} to {high}")


def _names(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_name, value))


def _is_name(value: object) -> bool:
    return isinstance(value, str) and len(value) <= MAX_NAME and "\0" not in value


def _is_token_id(value: object) -> bool:
    return _is_whole(value, -1, MAX_VOCABULARY)


def _is_token_ids(value: object) -> bool:
    ids = value if isinstance(value, list) else [value]
    return len(ids) <= 1024 and all(map(_is_token_id, ids))


def _is_positive(value: object) -> bool:
    return _is_number(value, 1e-30, 1e30)


def _is_channel_values(value: object) -> bool:
    values = value if isinstance(value, list) else [value]
    return 1 <= len(values) <= 16 and all(_is_number(item, -1e4, 1e4) for item in values)


def _is_channel_scales(value: Any) -> bool:
    values = value if isinstance(value, list) else [value]
    return _is_channel_values(value) and all(item > 0 for item in values)


def _is_image_size(value: object) -> bool:
    sizes = list(value.values()) if isinstance(value, dict) else value
    sizes = sizes if isinstance(sizes, list) else [sizes]
    return all(size is None or _is_whole(size, 1, MAX_PIXELS) for size in sizes)


def _is_template(value: object) -> bool:
    return isinstance(value, (str, dict, list))


Names: TypeAlias = Annotated[
    Any, _check(_names, f"a list of names of at most {MAX_NAME} characters")
]
Name: TypeAlias = Annotated[Any, _check(_is_name, f"a name of at most {MAX_NAME} characters")]
Size: TypeAlias = Annotated[Any, _whole(1, MAX_SIZE)]
TokenIds: TypeAlias = Annotated[
    Any,
    _check_integers(_is_token_ids, f"a token id from 0 to {MAX_VOCABULARY}, or a list of them"),
]
Positive: TypeAlias = Annotated[Any, _check(_is_positive, "a number above 0")]
Mean: TypeAlias = Annotated[Any, _check(_is_channel_values, "finite numbers, one per channel")]
Scale: TypeAlias = Annotated[
    Any, _check(_is_channel_scales, "finite numbers above 0, one per channel")
]
ImageSize: TypeAlias = Annotated[
    Any, _check_integers(_is_image_size, f"integers from 1 to {MAX_PIXELS}, by name or in a list")
]
Template: TypeAlias = Annotated[Any, _check(_is_template, "a text, or texts by name")]


class _File(BaseModel):
    model_config = ConfigDict(extra="allow")


class ConfigFile(_File):
    """config.json, or one of the configs inside it."""

    architectures: Names = None
    model_type: Name = None
    vocab_size: Annotated[Any, _whole(1, MAX_VOCABULARY)] = None
    hidden_size: Size = None
    intermediate_size: Annotated[Any, _whole(0, 2**24)] = None
    head_dim: Annotated[Any, _whole(0, 65_536)] = None  # 0: without rotary embedding
    num_attention_heads: Annotated[Any, _whole(1, 65_536)] = None
    num_key_value_heads: Annotated[Any, _whole(1, 65_536)] = None
    num_hidden_layers: Annotated[Any, _whole(1, MAX_LAYERS)] = None
    num_labels: Annotated[Any, _whole(0, MAX_LABELS)] = None
    max_position_embeddings: Annotated[Any, _whole(1, MAX_POSITIONS)] = None
    patch_size: ImageSize = None
    image_size: ImageSize = None
    rms_norm_eps: Positive = None
    layer_norm_eps: Positive = None
    eos_token_id: TokenIds = None
    bos_token_id: TokenIds = None
    pad_token_id: TokenIds = None
    rope_theta: Positive = None


class GenerationFile(_File):
    """generation_config.json. Sampling defaults are checked by SamplingParams."""

    eos_token_id: TokenIds = None
    bos_token_id: TokenIds = None
    pad_token_id: TokenIds = None
    do_sample: Annotated[Any, _check(lambda value: type(value) is bool, "true or false")] = None


class ProcessorFile(_File):
    """preprocessor_config.json, video_preprocessor_config.json and processor_config.json,
    which holds both."""

    image_mean: Mean = None
    image_std: Scale = None
    rescale_factor: Positive = None
    patch_size: ImageSize = None
    merge_size: ImageSize = None
    temporal_patch_size: ImageSize = None
    size: ImageSize = None
    crop_size: ImageSize = None
    min_pixels: ImageSize = None
    max_pixels: ImageSize = None
    min_frames: ImageSize = None
    max_frames: ImageSize = None
    num_frames: ImageSize = None
    fps: Positive = None
    processor_class: Name = None
    image_processor_type: Name = None


class TokenizerFile(_File):
    """tokenizer_config.json."""

    tokenizer_class: Name = None
    processor_class: Name = None
    chat_template: Template = None
    model_max_length: Positive = None


class ChatTemplateFile(_File):
    """chat_template.json."""

    chat_template: Template = None


def check_config(values: Mapping[str, Any], file_name: str, prefix: str = "") -> Mapping[str, Any]:
    """Checks config.json and every config inside it, and returns it with integers where fields want
    them. Raises CheckpointError."""
    made = dict(values)
    if not prefix or prefix.endswith("_config."):
        made = validated(ConfigFile, file_name, values, prefix).model_dump(exclude_unset=True)
        _check_experts(made, file_name, prefix)
    for key, value in made.items():
        allowed = _allowed_elsewhere(key, value)
        if allowed:
            raise fault(file_name, prefix + key, f"is {shown(value)}", allowed)
        if isinstance(value, dict) and key not in OTHER_CONFIGS:
            made[key] = check_config(value, file_name, f"{prefix}{key}.")
    return made


def _check_experts(values: Mapping[str, Any], file_name: str, prefix: str) -> None:
    """Raises CheckpointError where a router would choose no expert, or more than there are."""
    most = max((values[key] for key in EXPERTS if type(values.get(key)) is int), default=0)
    if most < 1:  # a dense model, whose other numbers mean nothing
        return
    for key in CHOSEN:
        found = values.get(key)
        if type(found) is int and not 1 <= found <= most:
            raise fault(file_name, prefix + key, f"is {found}", f"1 to the {most} experts")


def _allowed_elsewhere(key: str, value: object) -> str | None:
    """Returns what is allowed where a key has no field of its own, None when the value is good."""
    if key in OTHER_CONFIGS and not isinstance(value, dict | None):
        return "an object"
    if key in IMPLEMENTATION_KEYS and not _is_implementation(value):
        return "the name of an implementation in transformers, never a repository"
    values = value if isinstance(value, list) else [value]
    whole = [item for item in values if type(item) is int]
    if LAYER_KEY.search(key) and any(abs(item) > MAX_LAYERS for item in whole):
        return f"up to {MAX_LAYERS} layers"
    if COUNT_KEY.match(key) and any(abs(item) > MAX_COUNT for item in whole):
        return f"up to {MAX_COUNT}"
    numbers = [item for item in values if type(item) is float]
    if COUNT_KEY.match(key) and any(math.isinf(item) for item in numbers):
        return f"up to {MAX_COUNT}"
    return None


def _is_implementation(value: object) -> bool:
    """A name with a slash is a repository whose kernels transformers would fetch and run."""
    names = value.values() if isinstance(value, dict) else [value]
    return all(
        name is None or (isinstance(name, str) and len(name) <= MAX_NAME and NAME.fullmatch(name))
        for name in names
    )
