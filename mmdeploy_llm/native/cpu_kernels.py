"""CpuKernels: implements kernels.Kernels with the C++ library."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from ctypes import c_int32
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from mmdeploy_llm.kernels import ActivationName, VisibleKeys
from mmdeploy_llm.kernels.coded import CODES, CodeLayout

from .build import BuildError, Level, build, cpu_levels
from .draws import Draws
from .library import DTYPES
from .prebuilt import find_prebuilt
from .products import Products
from .signatures import AttentionArgs
from .states import StateProducts

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
        self._library.mm_rms_norm(
            DTYPES[x.dtype],
            x.data_ptr(),
            x.stride(0),
            None if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            x.shape[1],
            eps,
            is_centred,
            torch.get_num_threads(),
        )
        return out

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """Returns silu(gate) * up, both [T, size]."""
        out = self._empty(gate.shape, dtype=gate.dtype)
        self._library.mm_silu_mul(
            DTYPES[gate.dtype],
            gate.data_ptr(),
            gate.stride(0),
            up.data_ptr(),
            up.stride(0),
            out.data_ptr(),
            gate.shape[0],
            gate.shape[1],
            torch.get_num_threads(),
        )
        return out

    def activate(self, x: Tensor, name: ActivationName) -> Tensor:
        """Returns x [T, size], contiguous, with each value replaced by its activation."""
        assert x.is_contiguous()
        self._library.mm_activate(
            DTYPES[x.dtype],
            ACTIVATIONS.index(name),
            x.data_ptr(),
            x.shape[0],
            x.shape[1],
            torch.get_num_threads(),
        )
        return x

    def gate_heads(self, x: Tensor, gate: Tensor) -> Tensor:
        """Returns x * sigmoid(gate), both [T, heads, D]; see kernels.ActivationKernels."""
        assert x.is_contiguous()
        self._library.mm_gate_heads(
            DTYPES[x.dtype],
            x.data_ptr(),
            gate.data_ptr(),
            gate.stride(0),
            gate.stride(1),
            *x.shape,
            torch.get_num_threads(),
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
        self._library.mm_angles(
            positions.data_ptr(),
            positions.shape[-1],
            None if axes is None else axes.data_ptr(),
            frequencies.data_ptr(),
            None if is_long is None else is_long.data_ptr(),
            scale,
            cosines.data_ptr(),
            sines.data_ptr(),
            *shape,
            torch.get_num_threads(),
        )
        return cosines, sines

    def rotate(self, x: Tensor, cosines: Tensor, sines: Tensor, *, is_interleaved: bool) -> None:
        """Rotates the first 2 R channels of every head of `x` [T, heads, D] in place. cosines,
        sines: [T, R] float32, contiguous."""
        assert cosines.is_contiguous()
        assert sines.is_contiguous()
        self._library.mm_rotate(
            DTYPES[x.dtype],
            x.data_ptr(),
            x.stride(0),
            x.shape[1],
            x.stride(1),
            cosines.data_ptr(),
            sines.data_ptr(),
            x.shape[0],
            cosines.shape[1],
            is_interleaved,
            torch.get_num_threads(),
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
        self._library.mm_norm_heads(
            DTYPES[x.dtype],
            x.data_ptr(),
            x.stride(0),
            x.shape[1],
            x.stride(1),
            weight.data_ptr(),
            x.shape[0],
            x.shape[2],
            eps,
            is_centred,
            torch.get_num_threads(),
        )

    def write_cache(
        self, rows: Tensor, cache: Tensor, slots: Tensor, scales: Tensor | None = None
    ) -> None:
        """Writes `rows` [T, K, D] to their slots [T] int64 of `cache`; see
        kernels.AttentionKernels."""
        self._library.mm_write_cache(
            DTYPES[rows.dtype],
            CACHE_DTYPES[cache.dtype],
            rows.data_ptr(),
            rows.stride(0),
            cache.data_ptr(),
            None if scales is None else scales.data_ptr(),
            slots.data_ptr(),
            *rows.shape,
            torch.get_num_threads(),
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
        args = AttentionArgs(
            q=q.data_ptr(),
            q_stride=q.stride(0),
            q_head_stride=q.stride(1),
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            kv_stride=keys.stride(-3),
            key_scales=None if key_scales is None else key_scales.data_ptr(),
            value_scales=None if value_scales is None else value_scales.data_ptr(),
            sinks=None if sinks is None else sinks.data_ptr(),
            out=out.data_ptr(),
            block_tables=None if tables is None else tables.data_ptr(),
            table_stride=0 if tables is None else tables.stride(0),
            block_size=0 if tables is None else keys.shape[1],
            query_starts=visible.query_starts.data_ptr(),
            first_seen=visible.first_visible.data_ptr(),
            behind_seen=visible.end_visible.data_ptr(),
            num_sequences=visible.query_starts.shape[0] - 1,
            num_heads=q.shape[1],
            num_kv_heads=keys.shape[-2],
            head_dim=q.shape[2],
            scale=scale,
            softcap=softcap or 0.0,
            num_threads=torch.get_num_threads(),
        )
        self._library.mm_attend(DTYPES[q.dtype], CACHE_DTYPES[keys.dtype], args)
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
        self._library.mm_patchify(
            pixels.data_ptr(),
            pixels.shape[0],
            pixels.shape[1],
            patch_size,
            merge_size,
            table.data_ptr(),
            out.shape[2],
            frames.start,
            len(frames),
            out.data_ptr(),
        )

    def place_threads(
        self, cpus: Sequence[int], pinned: Sequence[int], num_threads: int, *, node: int | None
    ) -> None:
        """Restricts the calling thread, and the threads that it computes with, to `cpus` from now
        on, and the i-th of them to pinned[i] unless `pinned` is empty. node: NUMA node whose memory
        is used first. Raises OSError when the system refuses."""
        error = self._library.mm_place_threads(
            (c_int32 * len(cpus))(*cpus),
            len(cpus),
            (c_int32 * len(pinned))(*pinned),
            len(pinned),
            -1 if node is None else node,
            num_threads,
        )
        if error:
            raise OSError(error, os.strerror(error))


def load(
    cache: Path | None = None,
    level: Level | str | None = None,
    *,
    fixed_order: bool = False,
    layouts: Mapping[str, CodeLayout] = CODES,
) -> CpuKernels:
    """Loads the kernels for `level` (default: the best one of this processor): those of the wheel
    where it has some for these sources, else those that are built on first use into `cache`
    (default: a folder in the user's home; a cache that is given is always used). Raises BuildError
    when they cannot be built or loaded, or when the processor cannot execute them. fixed_order,
    layouts: see Library."""
    levels = cpu_levels()
    level = levels[0] if level is None else Level(level)
    if level not in levels:
        names = ", ".join(each.value for each in levels)
        raise BuildError(f"this processor cannot execute {level.value}; it can execute {names}")
    if cache is None:
        prebuilt = find_prebuilt(level)
        if prebuilt is not None:
            return CpuKernels(prebuilt, fixed_order=fixed_order, layouts=layouts)
        try:
            cache = Path.home() / ".cache" / "mmdeploy_llm"
        except RuntimeError as error:
            raise BuildError(f"there is no home directory to build them in: {error}") from error
    return CpuKernels(build(level, cache), fixed_order=fixed_order, layouts=layouts)
