"""compressed-tensors: integers and floats of several widths, by groups of layers.

    format                 stored                                              values
    pack-quantized         weight_packed int32, weight_scale, weight_shape     1 to 8 bits
    int-quantized          weight int8, weight_scale                           1 to 8 bits
    float-quantized        weight float8_e4m3fn, weight_scale                  8-bit floats
    naive-quantized        as one of the two
    mxfp8-quantized        weight float8_e4m3fn, weight_scale uint8            the same, by 32
    mxfp4-pack-quantized   weight_packed uint8, weight_scale uint8             4-bit floats
    nvfp4-pack-quantized   the same, weight_scale float8, weight_global_scale

Asymmetric ones have weight_zero_point, those ordered by activations weight_g_idx.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from functools import partial
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, PositiveInt, Strict
from torch import Tensor

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.weights.quantized import (
    FLOATS,
    CodeLayout,
    Flag,
    GroupedMatrix,
    GroupSize,
    PackedNibbles,
    QuantizedLayer,
    SchemeSettings,
    Stored,
    float4,
    integer_layout,
    power_of_two,
    read_settings,
    refuse,
    unpack_dense,
    unpack_nibbles,
)

MAX_PATTERN = 500  # characters
MAX_REPEATS = 3  # of unbounded repeats: the time grows with the length of a name to this power
REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT)
LONG = 16  # a repeat of more times counts as unbounded


def matches(pattern: str, name: str) -> bool:
    """Whether a name begins with a match of the pattern. Raises CheckpointError for a pattern that
    is malformed or could take for ever."""
    try:
        parsed = _parser.parse(pattern) if len(pattern) <= MAX_PATTERN else None
    except (re.error, RecursionError, OverflowError) as error:
        raise CheckpointError(
            "quantization_config in config.json has the malformed pattern "
            f"{pattern[:80]!r}: {error}"
        ) from None
    if parsed is None or _num_repeats(parsed) > MAX_REPEATS:
        raise CheckpointError(
            f"quantization_config in config.json has the pattern {pattern[:80]!r}, which could "
            f"take for ever; patterns have up to {MAX_PATTERN} characters and {MAX_REPEATS} "
            "repeats, none within another"
        )
    return re.match(pattern, name) is not None


def _num_repeats(parsed: Any) -> int:
    """Counts unbounded repeats; one within another counts as too many."""
    total = 0
    for operation, argument in parsed:
        inner = sum(_num_repeats(part) for part in _parts(argument))
        is_long = operation in REPEATS and int(argument[1]) > LONG
        total += (MAX_REPEATS + 1 if inner else 1) if is_long else inner
    return total


def _parts(argument: Any) -> list[Any]:
    """Returns the patterns within the argument of an operation."""
    if isinstance(argument, _parser.SubPattern):
        return [argument]
    if isinstance(argument, list | tuple):
        return [part for each in argument for part in _parts(each)]
    return []


Strategy = Literal["tensor", "channel", "group", "block", "tensor_group", "token"]
SUPPORTED = (
    "pack-quantized, int-quantized, float-quantized, naive-quantized, mxfp4-pack-quantized, "
    "mxfp8-quantized and nvfp4-pack-quantized, by tensor, channel, group or block"
)
NAIVE = ("int-quantized", "float-quantized", "naive-quantized", "mxfp8-quantized")


class WeightArgs(SchemeSettings):
    """How the weights of a group of layers are quantised."""

    num_bits: Annotated[int, Strict()] = 8
    type: Literal["int", "float"] = "int"
    symmetric: Flag = True
    strategy: Strategy | None = None
    group_size: GroupSize | None = None
    block_structure: tuple[PositiveInt, PositiveInt] | None = None


class ConfigGroup(SchemeSettings):
    """A group of layers. targets: names, "re:" patterns, or classes such as "Linear"."""

    targets: tuple[str, ...] = ()
    weights: WeightArgs | None = None
    format: str | None = None


class CompressedSettings(SchemeSettings):
    """quantization_config of compressed-tensors."""

    format: str = "dense"
    config_groups: dict[str, ConfigGroup] = Field(default_factory=dict)


def compressed_layers(values: Mapping[str, Any], stored: Stored) -> Iterator[QuantizedLayer]:
    """Yields the quantised layers. Raises CheckpointError for formats that are not known."""
    settings = read_settings(CompressedSettings, values)
    for name in stored.names(".weight_scale"):
        group = _group_of(name, settings)
        args = group.weights
        if args is None:
            raise refuse("compressed-tensors", "no scheme for its weights", SUPPORTED, name)
        kind = group.format or settings.format
        if kind == "pack-quantized":
            yield _packed(name, args, stored)
        elif kind in NAIVE:
            yield _naive(name, args, stored, has_exponents=kind.startswith("mxfp8"))
        elif kind in ("mxfp4-pack-quantized", "nvfp4-pack-quantized"):
            yield _four_bit_floats(name, args, stored, has_global=kind.startswith("nvfp4"))
        else:
            raise refuse("compressed-tensors", f"format {kind!r}", SUPPORTED, name)


def _group_of(name: str, settings: CompressedSettings) -> ConfigGroup:
    """Returns the group of a layer: by its name, else by a pattern, else by a class."""
    groups = settings.config_groups.values()
    by_class = None
    for is_pattern in (False, True):
        for group in groups:
            for target in group.targets:
                if target.startswith("re:"):
                    if is_pattern and matches(target.removeprefix("re:"), name):
                        return group
                elif not is_pattern and target == name:
                    return group
                elif "." not in target:
                    by_class = by_class or group
    if by_class is None:
        raise refuse("compressed-tensors", "no config group that names it", SUPPORTED, name)
    return by_class


def _packed(name: str, args: WeightArgs, stored: Stored) -> QuantizedLayer:
    needed = {"codes": ".weight_packed", "scales": ".weight_scale", "shape": ".weight_shape"}
    optional = {"group_of": ".weight_g_idx"}
    if not args.symmetric:
        needed["zeros"] = ".weight_zero_point"
    parts = stored.parts(name, needed, optional)
    if not 1 <= args.num_bits <= 8 or args.type != "int":
        found = f"{args.num_bits}-bit {args.type} values"
        raise refuse("pack-quantized", found, "integers of 1 to 8 bits", name)
    stored.check(parts["shape"], (2,), torch.int64, torch.int32)
    n, k = (int(size) for size in stored.read(parts["shape"]).tolist())
    num_words = -(-k * args.num_bits // 32)
    stored.check(parts["codes"], (n, num_words), torch.int32)
    dtype, group_size = _scales(name, args, stored, n, k)
    if "zeros" in parts:  # packed along the rows
        shape = stored.entries[parts["scales"]].shape
        num_groups = shape[-1] if len(shape) == 2 else 1
        stored.check(parts["zeros"], (-(-n * args.num_bits // 32), num_groups), torch.int32)
    group_of = None
    if "group_of" in parts:
        stored.check(parts["group_of"], (k,), torch.int32, torch.int64)
        group_of = stored.read(parts["group_of"])
    return QuantizedLayer(
        name=name,
        key=f"{name}.weight",
        parts=parts,
        shape=(n, k),
        dtype=dtype,
        decode=partial(_decode_packed, bits=args.num_bits, n=n, k=k, group_size=group_size),
        layout=integer_layout(args.num_bits, group_size, group_of),
    )


def _decode_packed(
    parts: Mapping[str, Tensor], *, bits: int, n: int, k: int, group_size: int
) -> GroupedMatrix:
    scales = parts["scales"].view(-1, parts["scales"].shape[-1]).expand(n, -1)
    zeros = torch.full(scales.shape, 2 ** (bits - 1), dtype=torch.uint8)
    if "zeros" in parts:  # packed along the rows
        zeros = unpack_dense(parts["zeros"].T.contiguous(), bits, n).T
    is_nibbles = bits == 4
    words = parts["codes"]
    return GroupedMatrix(
        codes=PackedNibbles(words, k) if is_nibbles else unpack_dense(words, bits, k),
        scales=scales,
        zeros=zeros,
        group_of=parts["group_of"].long() if "group_of" in parts else None,
        group_size=group_size,
        dtype=parts["scales"].dtype,
    )


def _naive(name: str, args: WeightArgs, stored: Stored, *, has_exponents: bool) -> QuantizedLayer:
    needed = {"codes": ".weight", "scales": ".weight_scale"}
    if not args.symmetric:
        needed["zeros"] = ".weight_zero_point"
    parts = stored.parts(name, needed)
    code = torch.int8 if args.type == "int" else torch.float8_e4m3fn
    if (args.num_bits != 8 and args.type == "float") or not 1 <= args.num_bits <= 8:
        found = f"{args.num_bits}-bit {args.type} values"
        raise refuse("compressed-tensors", found, "integers of 1 to 8 bits, 8-bit floats", name)
    n, k = stored.matrix(parts["codes"], code)
    dtype, group_size = _scales(name, args, stored, n, k, torch.uint8 if has_exponents else None)
    if "zeros" in parts:
        wanted, stored_as = (
            stored.entries[parts["scales"]].shape,
            stored.entries[parts["zeros"]].shape,
        )
        is_same_size = math.prod(stored_as) == math.prod(wanted)
        stored.check(parts["zeros"], stored_as if is_same_size else wanted, torch.int8)
    block_rows = args.block_structure[0] if args.strategy == "block" and args.block_structure else 1
    return QuantizedLayer(
        name=name,
        key=parts["codes"],
        parts=parts,
        shape=(n, k),
        dtype=dtype,
        decode=partial(_decode_naive, n=n, group_size=group_size, block_rows=block_rows),
        layout=CodeLayout(bits=8, group_size=group_size, is_float8=args.type == "float"),
    )


def _decode_naive(
    parts: Mapping[str, Tensor], *, n: int, group_size: int, block_rows: int
) -> GroupedMatrix:
    num_rows = -(-n // block_rows)
    scales = parts["scales"]
    if scales.dtype is torch.uint8:
        scales = power_of_two(scales).bfloat16()

    def spread(values: Tensor) -> Tensor:
        last = values.shape[-1] if values.dim() == 2 else 1
        return values.view(-1, last).expand(num_rows, -1)

    return GroupedMatrix(
        codes=parts["codes"],
        scales=spread(scales),
        zeros=spread(parts["zeros"]) if "zeros" in parts else None,
        group_size=group_size,
        block_rows=block_rows,
        dtype=scales.dtype,
    )


def _scales(
    name: str,
    args: WeightArgs,
    stored: Stored,
    n: int,
    k: int,
    exponents: torch.dtype | None = None,
) -> tuple[torch.dtype, int]:
    """Checks the scales of a layer; returns their dtype and the columns of a group. exponents: the
    dtype of scales that are powers of two; their values are bfloat16."""
    key = f"{name}.weight_scale"
    size = {"group": args.group_size, "tensor_group": args.group_size}.get(args.strategy or "", k)
    shapes: list[tuple[int, ...]]
    if args.strategy == "block" and args.block_structure:
        rows, size = args.block_structure
        shapes = [(-(-n // rows), -(-k // size))]
    elif args.strategy in ("group", "tensor_group") and size and size > 0:
        shapes = [(n, -(-k // size))]
    elif args.strategy == "channel":
        shapes = [(n, 1), (n,)]
    elif args.strategy in ("tensor", None):
        shapes = [(1,), (), (1, 1)]
    else:
        raise refuse("compressed-tensors", f"strategy {args.strategy!r}", SUPPORTED, name)
    found = stored.entries[key].shape
    dtypes = FLOATS if exponents is None else (exponents,)
    entry = stored.check(key, found if found in shapes else shapes[0], *dtypes)
    assert size is not None, "checked above"
    return entry.dtype if exponents is None else torch.bfloat16, size


def _four_bit_floats(
    name: str, args: WeightArgs, stored: Stored, *, has_global: bool
) -> QuantizedLayer:
    needed = {"codes": ".weight_packed", "scales": ".weight_scale"}
    if has_global:
        needed["global"] = ".weight_global_scale"
    parts = stored.parts(name, needed)
    n, half = stored.matrix(parts["codes"], torch.uint8)
    size = 16 if has_global else 32
    if args.group_size not in (None, size):
        raise refuse("compressed-tensors", f"groups of {args.group_size}", f"of {size}", name)
    code = torch.float8_e4m3fn if has_global else torch.uint8
    stored.check(parts["scales"], (n, -(-2 * half // size)), code)
    if has_global:
        stored.check(parts["global"], (1,), torch.float32)
    return QuantizedLayer(
        name=name,
        key=f"{name}.weight",
        parts=parts,
        shape=(n, 2 * half),
        dtype=torch.float32 if has_global else torch.bfloat16,
        decode=partial(_decode_float4, name=name, group_size=size),
    )


def _decode_float4(parts: Mapping[str, Tensor], *, name: str, group_size: int) -> GroupedMatrix:
    scales, dtype = parts["scales"], torch.bfloat16
    if "global" in parts:
        if not bool(parts["global"].isfinite().all() & (parts["global"] != 0).all()):
            raise CheckpointError(f"{name}.weight_global_scale is 0 or not finite")
        scales, dtype = scales.float() / parts["global"], torch.float32
    else:
        scales = power_of_two(scales)
    return GroupedMatrix(
        codes=float4(unpack_nibbles(parts["codes"]), torch.bfloat16),
        scales=scales,
        group_size=group_size,
        dtype=dtype,
    )
