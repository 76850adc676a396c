"""Shows the variables of CTranslate2's Whisper models as the entries of transformers' checkpoint.
CTranslate2 stores queries, keys and values one below the other in one matrix."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from mmdeploy_llm.weights.other_files import (
    CodedWeight,
    CodeLayout,
    EntryFile,
    Header,
    StoredTensor,
    TensorRows,
    TensorType,
    WeightRows,
)
from mmdeploy_llm.weights.quantized import GroupedMatrix

from .ctranslate2_header import FLOATS, Variable, Variables, wrong
from .stored import StoredWhisper

SCALE = "_scale"
NORM = {"gamma": "weight", "beta": "bias"}
# Parts of a layer -> their names in transformers; several lie one below the other.
PARTS: Mapping[str, tuple[str, ...]] = {
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
    "self_attention/layer_norm": ("self_attn_layer_norm",),
    "attention/layer_norm": ("encoder_attn_layer_norm",),
    "ffn/layer_norm": ("final_layer_norm",),
}
OUTSIDE: Mapping[str, str] = {
    "encoder/conv1": "model.encoder.conv1",
    "encoder/conv2": "model.encoder.conv2",
    "encoder/layer_norm": "model.encoder.layer_norm",
    "decoder/layer_norm": "model.decoder.layer_norm",
    "decoder/embeddings": "model.decoder.embed_tokens",
    "decoder/projection": "proj_out",
    "encoder/position_encodings": "model.encoder.embed_positions",
    "decoder/position_encodings": "model.decoder.embed_positions",
}
NO_BIAS = "k_proj.bias"  # CTranslate2 stores zeros


@dataclass(frozen=True, slots=True, kw_only=True)
class CTranslate2Source:
    """Tells where the values of an entry come from: `shape` of a variable, from row `first` on.
    scales: by which its rows were multiplied, or all of it; None: by nothing."""

    tensor: StoredTensor
    shape: tuple[int, ...]
    first: int = 0
    scales: StoredTensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the entry is read."""
        own = self.tensor.type.dtype
        return torch.float32 if own is None or self.scales is not None else own


class CTranslate2Weights(EntryFile[CTranslate2Source]):
    """The weights of one Whisper model."""

    def __init__(self, variables: Variables, stored: StoredWhisper) -> None:
        """Raises CheckpointError for variables that Whisper models do not have."""
        found = dict(_sources(variables))
        self._zeros = [found.pop(key) for key in list(found) if key.endswith(NO_BIAS)]
        if stored.is_tied:
            found.pop("proj_out.weight", None)
        super().__init__(Header(paths=(variables.path,), values={}, tensors={}), found)

    def __enter__(self) -> Self:
        super().__enter__()
        if any(bool(self._weight(own).rows(0, own.shape[0]).any()) for own in self._zeros):
            self.__exit__()
            raise wrong(self.path, "has biases of keys, which Whisper models do not have")
        return self

    def layout(self, key: str) -> CodeLayout | None:
        """See CodedFile: matrices in 8 bits stay so, with a scale for each row."""
        source = self._sources[key]
        is_coded = source.tensor.type.dtype is torch.int8 and len(source.shape) == 2
        return CodeLayout(bits=8, group_size=source.shape[1]) if is_coded else None

    def read_coded(self, key: str, out: Tensor | None = None) -> CodedWeight:
        """See CodedFile. out: not used, since codes are given another sign first."""
        del out
        source, layout = self._sources[key], self.layout(key)
        assert layout is not None
        rows = _Rows(source, self._rows)
        n, k = source.shape
        matrix = GroupedMatrix(
            codes=rows.codes(0, n),
            scales=1 / rows.scales(0, n).view(n, 1),
            group_size=k,
            dtype=torch.float32,
        )
        return matrix.coded(layout)

    def _weight(self, source: CTranslate2Source) -> WeightRows:
        return _Rows(source, self._rows)


class _Rows:
    """The rows of one entry; see WeightRows."""

    def __init__(self, source: CTranslate2Source, rows: TensorRows) -> None:
        self._source, self._rows = source, rows

    def rows(self, start: int, end: int) -> Tensor:
        """Returns rows start .. end, in floats."""
        values = self.codes(start, end)
        if self._source.scales is None:
            return values
        scales = self.scales(start, end)
        return values.float() / scales.view(-1, *[1] * (values.ndim - 1))

    def codes(self, start: int, end: int) -> Tensor:
        """Returns rows as they are stored."""
        source = self._source
        first, last = source.first + start, source.first + end
        if len(source.shape) == 1:
            return self._rows.read(source.tensor, 0, 1).view(-1)[first:last]
        inner = math.prod(source.shape[1:-1])
        values = self._rows.read(source.tensor, first * inner, last * inner)
        return values.view(end - start, *source.shape[1:])

    def scales(self, start: int, end: int) -> Tensor:
        """Returns the scales of rows, or the one of all."""
        scales, first = self._source.scales, self._source.first
        assert scales is not None
        found = self._rows.read(scales, 0, 1).view(-1).float()
        return found if len(found) == 1 else found[first + start : first + end]


def _sources(variables: Variables) -> Iterator[tuple[str, CTranslate2Source]]:
    unknown = []
    for name, variable in variables.tensors.items():
        place, _, own = name.rpartition("/")
        if own.endswith(SCALE) or name in variables.numbers:
            continue
        keys = _keys(place)
        if not keys:
            unknown.append(name)
            continue
        suffix = "weight" if own == "encodings" else NORM.get(own, own)
        whole = _source(variables, variable)
        size, rest = divmod(variable.shape[0], len(keys))
        if rest:
            raise wrong(variables.path, f"has {variable.shape[0]} rows in {name}")
        for number, key in enumerate(keys):
            shape = (size, *variable.shape[1:])
            yield f"{key}.{suffix}", replace(whole, shape=shape, first=number * size)
    if unknown:
        names = ", ".join(map(ascii, unknown[:10]))
        raise wrong(variables.path, f"holds {len(unknown)} unknown variables: {names}")


def _keys(place: str) -> tuple[str, ...]:
    """Returns the names in transformers of what lies at a place, () for an unknown one."""
    if place in OUTSIDE:
        return (OUTSIDE[place],)
    side, _, rest = place.partition("/layer_")
    number, _, part = rest.partition("/")
    if side not in ("encoder", "decoder") or not number.isdecimal():
        return ()
    return tuple(f"model.{side}.layers.{number}.{own}" for own in PARTS.get(part, ()))


def _source(variables: Variables, variable: Variable) -> CTranslate2Source:
    tensor, scale = _tensor(variable), variables.tensors.get(f"{variable.name}{SCALE}")
    source = CTranslate2Source(tensor=tensor, shape=variable.shape)
    if variable.kind in FLOATS:
        return source
    sizes = {"int8": (variable.shape[0],), "int16": (1,)}.get(variable.kind)
    if sizes is None or scale is None or scale.kind != "float32" or scale.shape != sizes:
        raise wrong(variables.path, f"has no scales that fit {variable.name}, {variable.kind}")
    return replace(source, scales=_tensor(scale))


def _tensor(variable: Variable) -> StoredTensor:
    dtype: torch.dtype = getattr(torch, variable.kind)
    kind = TensorType(
        name=variable.kind, number=-1, block_size=1, block_bytes=dtype.itemsize, dtype=dtype
    )
    return StoredTensor(
        name=variable.name, type=kind, shape=variable.shape, file=0, offset=variable.offset
    )
