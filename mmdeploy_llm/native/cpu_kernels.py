"""CpuKernels: implements kernels.Kernels with the C++ library."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from ctypes import addressof, c_int32
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from mmdeploy_llm.kernels import ActivationName, VisibleKeys
from mmdeploy_llm.weight_formats import FORMATS, WeightFormat

from .build import Level, build, cpu_levels
from .draws import Draws
from .library import DTYPES
from .prebuilt import find_prebuilt
from .products import Products
from .sealed import BuildError, ForeignError
from .states import StateProducts

logger = logging.getLogger(__name__)

CACHE_DTYPES = {**DTYPES, torch.int8: 2, torch.uint8: 3}  # two values of 4 bits are a uint8
ACTIVATIONS: tuple[ActivationName, ...] = get_args(ActivationName)  # as mm::Activation in rows.h
MAX_HEAD_DIM = 512  # as in attention.h
MAX_GROUP = 256  # TILE_ROWS in attention.h


class CpuKernels(Products, StateProducts, Draws):
    """Kernels for float32 and bf16 tensors on the CPU; see kernels.Kernels for the interface and
    the shapes. They have all capabilities but `experts`."""

    samples_on_device = False
    experts = None

    @property
    def inputs(self) -> CpuKernels:
        """Embeddings and angles of a step's tokens."""
        return self

    @property
    def attention(self) -> CpuKernels:
        """Attention over the paged cache and over segments."""
        return self

    @property
    def activations(self) -> CpuKernels:
        """Activations of an MLP."""
        return self

    @property
    def norms(self) -> CpuKernels:
        """Norms whose weights are centred on zero."""
        return self

    @property
    def states(self) -> CpuKernels:
        """Layers with a state of each sequence."""
        return self

    @property
    def draws(self) -> CpuKernels:
        """Random draws."""
        return self

    @property
    def pixels(self) -> CpuKernels:
        """Patch rows for media processors."""
        return self

    @property
    def threads(self) -> CpuKernels:
        """Placement of compute threads on cores."""
        return self

    def can_attend(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether `attend` computes on [T, heads, D] like these."""
        head_dim = q.shape[-1]
        return (
            head_dim <= MAX_HEAD_DIM
            and head_dim % 2 == 0
            and q.shape[1] <= MAX_GROUP * k.shape[1]
            and k.stride() == v.stride()
            and all(x.stride(1) == head_dim for x in (q, k))
            and self.takes(q, k, v)
        )

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> Tensor:
        """Returns norm(x) * weight for rows [T, size]. With a residual [T, size], adds x to it in
        place and norms the sum."""
        return self._norm(x, weight, eps, residual, is_centred=False)

    def centred_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> Tensor:
        """Returns norm(x) * (1 + weight); see kernels.NormKernels."""
        return self._norm(x, weight, eps, residual, is_centred=True)

    def _norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, *, is_centred: bool
    ) -> Tensor:
        out = self._empty(x.shape, dtype=x.dtype)
        self._library.rms_norm(
            dtype=DTYPES[x.dtype],
            x=x.data_ptr(),
            x_stride=x.stride(0),
            residual=0 if residual is None else residual.data_ptr(),
            weight=weight.data_ptr(),
            out=out.data_ptr(),
            rows=x.shape[0],
            size=x.shape[1],
            eps=eps,
            is_centred=is_centred,
        )
        return out

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """Returns silu(gate) * up, both [T, size]."""
        out = self._empty(gate.shape, dtype=gate.dtype)
        self._library.silu_mul(
            dtype=DTYPES[gate.dtype],
            gate=gate.data_ptr(),
            gate_stride=gate.stride(0),
            up=up.data_ptr(),
            up_stride=up.stride(0),
            out=out.data_ptr(),
            rows=gate.shape[0],
            size=gate.shape[1],
        )
        return out

    def activate(self, x: Tensor, name: ActivationName) -> Tensor:
        """Returns x [T, size], contiguous, with each value replaced by its activation."""
        assert x.is_contiguous()
        self._library.activate(
            dtype=DTYPES[x.dtype],
            kind=ACTIVATIONS.index(name),
            x=x.data_ptr(),
            rows=x.shape[0],
            size=x.shape[1],
        )
        return x

    def gate_heads(self, x: Tensor, gate: Tensor) -> Tensor:
        """Returns x * sigmoid(gate), both [T, heads, D]; see kernels.ActivationKernels."""
        assert x.is_contiguous()
        self._library.gate_heads(
            dtype=DTYPES[x.dtype],
            x=x.data_ptr(),
            gate=gate.data_ptr(),
            gate_stride=gate.stride(0),
            gate_head_stride=gate.stride(1),
            rows=x.shape[0],
            heads=x.shape[1],
            size=x.shape[2],
        )
        return x

    def angles(
        self,
        positions: Tensor,
        frequencies: Tensor,
        axes: Tensor | None,
        scale: float,
        is_long: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns cos and sin of position * frequency, [T, R] each; see kernels.InputKernels."""
        assert positions.dtype is torch.int64
        assert positions.is_contiguous()
        assert is_long is None or frequencies.shape[0] == 2
        shape = positions.shape[-1], frequencies.shape[-1]
        cosines = self._empty(shape, dtype=frequencies.dtype)
        sines = self._empty(shape, dtype=frequencies.dtype)
        self._library.angles(
            positions=positions.data_ptr(),
            stride=positions.shape[-1],
            axes=0 if axes is None else axes.data_ptr(),
            frequencies=frequencies.data_ptr(),
            is_long=0 if is_long is None else is_long.data_ptr(),
            scale=scale,
            cosines=cosines.data_ptr(),
            sines=sines.data_ptr(),
            tokens=shape[0],
            pairs=shape[1],
        )
        return cosines, sines

    def rotate(self, x: Tensor, cosines: Tensor, sines: Tensor, *, is_interleaved: bool) -> None:
        """Rotates the first 2 R channels of every head of `x` [T, heads, D] in place. cosines,
        sines: [T, R] float32, contiguous."""
        assert cosines.is_contiguous()
        assert sines.is_contiguous()
        self._library.rotate(
            dtype=DTYPES[x.dtype],
            x=x.data_ptr(),
            row_stride=x.stride(0),
            heads=x.shape[1],
            head_stride=x.stride(1),
            cosines=cosines.data_ptr(),
            sines=sines.data_ptr(),
            rows=x.shape[0],
            pairs=cosines.shape[1],
            is_interleaved=is_interleaved,
        )

    def norm_and_rotate(
        self,
        x: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        num_q_heads: int,
        eps: float,
        cosines: Tensor,
        sines: Tensor,
        *,
        is_interleaved: bool,
    ) -> None:
        """RMS-norms every head, the first num_q_heads with `q_weight` [D] and the others with
        `k_weight`, then rotates as `rotate`; in place."""
        for heads, weight in ((x[:, :num_q_heads], q_weight), (x[:, num_q_heads:], k_weight)):
            self._norm_heads(heads, weight, eps, is_centred=False)
        self.rotate(x, cosines, sines, is_interleaved=is_interleaved)

    def centred_norm_heads(self, x: Tensor, weight: Tensor, eps: float) -> None:
        """Norms every head of `x` [T, heads, D] in place; see kernels.NormKernels."""
        self._norm_heads(x, weight, eps, is_centred=True)

    def _norm_heads(self, x: Tensor, weight: Tensor, eps: float, *, is_centred: bool) -> None:
        self._library.norm_heads(
            dtype=DTYPES[x.dtype],
            x=x.data_ptr(),
            row_stride=x.stride(0),
            heads=x.shape[1],
            head_stride=x.stride(1),
            weight=weight.data_ptr(),
            rows=x.shape[0],
            size=x.shape[2],
            eps=eps,
            is_centred=is_centred,
        )

    def write_cache(
        self, rows: Tensor, cache: Tensor, slots: Tensor, scales: Tensor | None = None
    ) -> None:
        """Writes `rows` [T, K, D] to their slots [T] int64 of `cache`; see
        kernels.AttentionKernels."""
        self._library.write_cache(
            dtype=DTYPES[rows.dtype],
            cache_dtype=CACHE_DTYPES[cache.dtype],
            rows=rows.data_ptr(),
            row_stride=rows.stride(0),
            cache=cache.data_ptr(),
            scales=0 if scales is None else scales.data_ptr(),
            slots=slots.data_ptr(),
            tokens=rows.shape[0],
            num_kv_heads=rows.shape[1],
            head_dim=rows.shape[2],
        )

    def attend(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        visible: VisibleKeys,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        key_scales: Tensor | None = None,
        value_scales: Tensor | None = None,
    ) -> Tensor:
        """Returns attention of `q` [T, H, D] as [T, H, D]; see kernels.AttentionKernels."""
        out = self._empty(q.shape, dtype=q.dtype)
        tables = visible.block_tables
        self._library.attend(
            dtype=DTYPES[q.dtype],
            cache_dtype=CACHE_DTYPES[keys.dtype],
            q=q.data_ptr(),
            q_stride=q.stride(0),
            q_head_stride=q.stride(1),
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            kv_stride=keys.stride(-3),
            key_scales=0 if key_scales is None else key_scales.data_ptr(),
            value_scales=0 if value_scales is None else value_scales.data_ptr(),
            sinks=0 if sinks is None else sinks.data_ptr(),
            out=out.data_ptr(),
            block_tables=0 if tables is None else tables.data_ptr(),
            table_stride=0 if tables is None else tables.stride(0),
            block_size=0 if tables is None else keys.shape[1],
            query_starts=visible.query_starts.data_ptr(),
            first_visible=visible.first_visible.data_ptr(),
            end_visible=visible.end_visible.data_ptr(),
            num_sequences=visible.query_starts.shape[0] - 1,
            num_heads=q.shape[1],
            num_kv_heads=keys.shape[-2],
            head_dim=q.shape[2],
            scale=scale,
            softcap=softcap or 0.0,
        )
        return out

    def patchify(
        self,
        pixels: Tensor,
        table: Tensor,
        out: Tensor,
        *,
        patch_size: int,
        merge_size: int,
        frames: range,
    ) -> None:
        """Writes `frames` of the patch rows `out` [N, 3, T, P, P] float32: the values of uint8
        `pixels` [H, W, 3], looked up in `table` [3, 256] float32; all contiguous. Patches come in
        blocks of merge_size x merge_size. Runs on the calling thread alone."""
        assert all(x.is_contiguous() for x in (pixels, table, out))
        self._library.patchify(
            pixels=pixels.data_ptr(),
            height=pixels.shape[0],
            width=pixels.shape[1],
            patch=patch_size,
            merge=merge_size,
            table=table.data_ptr(),
            frames=out.shape[2],
            first=frames.start,
            count=len(frames),
            out=out.data_ptr(),
        )

    def place_threads(
        self, cpus: Sequence[int], pinned: Sequence[int], num_threads: int, *, node: int | None
    ) -> None:
        """Restricts the calling thread, and the threads that it computes with, to `cpus` from now
        on, and the i-th of them to pinned[i] unless `pinned` is empty. node: NUMA node whose memory
        is used first. Raises OSError when the system refuses."""
        own, others, error = (
            (c_int32 * len(cpus))(*cpus),
            (c_int32 * len(pinned))(*pinned),
            c_int32(),
        )
        self._library.place_threads(
            cpus=addressof(own),
            num_cpus=len(cpus),
            pinned=addressof(others),
            num_pinned=len(pinned),
            node=-1 if node is None else node,
            num_workers=num_threads,
            error=addressof(error),
        )
        if error.value:
            raise OSError(error.value, os.strerror(error.value))


def load(
    cache: Path | None = None,
    level: Level | str | None = None,
    *,
    fixed_order: bool = False,
    formats: Mapping[str, WeightFormat] = FORMATS,
) -> CpuKernels:
    """Loads the kernels for `level` (default: the best one of this processor): those of the wheel
    where it has some for these sources, else those that are built on first use into `cache`
    (default: a folder in the user's home; a cache that is given is always used). Raises BuildError
    when they cannot be built or loaded, or when the processor cannot execute them. fixed_order,
    formats: see Library."""
    levels = cpu_levels()
    level = levels[0] if level is None else Level(level)
    if level not in levels:
        names = ", ".join(each.value for each in levels)
        raise BuildError(f"this processor cannot execute {level.value}; it can execute {names}")
    if cache is None:
        prebuilt = find_prebuilt(level)
        if prebuilt is not None:
            return CpuKernels(prebuilt, fixed_order=fixed_order, formats=formats)
        try:
            cache = Path.home() / ".cache" / "mmdeploy_llm" / "kernels"
        except RuntimeError as error:
            raise BuildError(f"there is no home directory to build them in: {error}") from error
    try:
        return CpuKernels(build(level, cache), fixed_order=fixed_order, formats=formats)
    except ForeignError as error:
        logger.warning("%s. Until then the kernels are compiled for each process anew", error)
    with tempfile.TemporaryDirectory() as own:
        return CpuKernels(build(level, Path(own)), fixed_order=fixed_order, formats=formats)
