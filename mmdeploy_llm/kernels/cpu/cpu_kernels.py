"""CpuKernels: overrides kernels.Kernels with the C++ library."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from mmdeploy_llm.forward import Alibi, QKRotary
from mmdeploy_llm.hooks.objects.attention import VisibleKeys
from mmdeploy_llm.kernels.plain import ROTATED_VALUES, ActivationName
from mmdeploy_llm.values.options.weight_formats import FORMATS, WeightFormat

from .build import CompilerError, Level, build, cpu_levels
from .draws import Draws
from .low_rank import LowRankProducts
from .mixtures import Mixtures
from .norms import Norms
from .pixels import Pixels
from .prebuilt import find_prebuilt
from .products import Products
from .sealed import BuildError, ForeignError
from .states import StateProducts

logger = logging.getLogger(__name__)

ACTIVATIONS: tuple[ActivationName, ...] = get_args(ActivationName)  # as mm::Activation in rows.h
MAX_HEAD_DIM = 512  # as in attention.h
MAX_GROUP = 256  # TILE_ROWS in attention.h


class CpuKernels(Norms, Products, StateProducts, LowRankProducts, Draws, Mixtures, Pixels):
    """Kernels for float32 and bf16 tensors on the CPU; see kernels.Kernels for what each computes
    and the shapes."""

    can_place_threads = True

    @property
    def attention(self) -> CpuKernels:
        """These kernels; see hooks.AttentionKernels."""
        return self

    @property
    def pixels(self) -> CpuKernels:
        """These kernels; see hooks.PixelKernels."""
        return self

    def can_attend(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        head_dim = q.shape[-1]
        return (
            head_dim <= MAX_HEAD_DIM
            and head_dim % 2 == 0
            and q.shape[1] <= MAX_GROUP * k.shape[1]
            and k.stride() == v.stride()
            and all(x.stride(1) == head_dim for x in (q, k))
            and self.takes(q, k, v)
        )

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        if not self._takes_pair(gate, up):
            return super().silu_mul(gate, up)
        return self.gated_mul(gate, up, "silu")

    def _takes_pair(self, gate: Tensor, up: Tensor) -> bool:
        return gate.dim() == 2 and self.takes(gate, up)

    def gated_mul(self, gate: Tensor, up: Tensor, name: ActivationName | None) -> Tensor:
        if not self._takes_pair(gate, up):
            return super().gated_mul(gate, up, name)
        out = self._empty(gate.shape, dtype=gate.dtype)
        self._library.gated_mul(
            dtype=gate.dtype,
            kind=len(ACTIVATIONS) if name is None else ACTIVATIONS.index(name),
            gate=gate,
            gate_stride=gate.stride(0),
            up=up,
            up_stride=up.stride(0),
            out=out,
            rows=gate.shape[0],
            size=gate.shape[1],
        )
        return out

    def clamped_mul(self, both: Tensor, alpha: float, limit: float) -> Tensor:
        if both.dim() != 2 or not self.takes_whole(both):
            return super().clamped_mul(both, alpha, limit)
        rows, size = both.shape[0], both.shape[1] // 2
        out = self._empty((rows, size), dtype=both.dtype)
        self._library.clamped_mul(
            dtype=both.dtype, both=both, out=out, rows=rows, size=size, alpha=alpha, limit=limit
        )
        return out

    def activate(self, x: Tensor, name: ActivationName) -> Tensor:
        if x.dim() != 2 or not self.takes_whole(x):
            return super().activate(x, name)
        self._library.activate(
            dtype=x.dtype, kind=ACTIVATIONS.index(name), x=x, rows=x.shape[0], size=x.shape[1]
        )
        return x

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """In bf16 looks each value up in a table that torch has computed: over a large vocabulary
        the three operations take longer than its largest value is found; see Kernels."""
        if x.dtype is not torch.bfloat16 or not self.takes_whole(x):
            return super().softcap(x, cap)
        if cap not in self._softcaps:
            bits = torch.arange(2**16, dtype=torch.int32).to(torch.uint16)
            self._softcaps[cap] = super().softcap(bits.view(torch.bfloat16), cap)
        self._library.map_values(x=x, table=self._softcaps[cap], values=x.numel())
        return x

    def scale(self, x: Tensor, factor: float, *, rounds: bool = False) -> Tensor:
        if not self.takes_whole(x):
            return super().scale(x, factor, rounds=rounds)
        self._library.scale(dtype=x.dtype, x=x, factor=factor, rounds=rounds, values=x.numel())
        return x

    def add_rows(self, to: Tensor, x: Tensor, gate: Tensor | None = None) -> Tensor:
        if not self.takes_whole(to, x, gate):
            return super().add_rows(to, x, gate)
        self._library.add_rows(
            dtype=x.dtype,
            x=x,
            x_stride=x.stride(0),
            gate=gate,
            sum=to,
            rows=x.shape[0],
            size=x.shape[1],
        )
        return to

    def gate_heads(self, x: Tensor, gate: Tensor) -> Tensor:
        if not self.takes_whole(x, gate):
            return super().gate_heads(x, gate)
        self._library.gate_heads(
            dtype=x.dtype,
            x=x,
            gate=gate,
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
        assert positions.dtype is torch.int64
        assert positions.is_contiguous()
        assert is_long is None or frequencies.shape[0] == 2
        shape = positions.shape[-1], frequencies.shape[-1]
        cosines = self._empty(shape, dtype=frequencies.dtype)
        sines = self._empty(shape, dtype=frequencies.dtype)
        self._library.angles(
            positions=positions,
            stride=positions.shape[-1],
            axes=axes,
            frequencies=frequencies,
            is_long=is_long,
            scale=scale,
            cosines=cosines,
            sines=sines,
            tokens=shape[0],
            pairs=shape[1],
        )
        return cosines, sines

    def rotate(self, x: Tensor, cosines: Tensor, sines: Tensor, *, is_interleaved: bool) -> Tensor:
        if not self.takes(x):
            return super().rotate(x, cosines, sines, is_interleaved=is_interleaved)
        assert cosines.is_contiguous()
        assert sines.is_contiguous()
        self._library.rotate(
            dtype=x.dtype,
            x=x,
            row_stride=x.stride(0),
            heads=x.shape[1],
            head_stride=x.stride(1),
            cosines=cosines,
            sines=sines,
            rows=x.shape[0],
            pairs=cosines.shape[1],
            is_interleaved=is_interleaved,
        )
        return x

    def mix_heads(
        self,
        x: Tensor,
        matrix: Tensor,
        centres: Tensor | None = None,
        factors: Tensor | None = None,
    ) -> Tensor:
        if not self.takes(x):
            return super().mix_heads(x, matrix, centres, factors)
        block = matrix.shape[0]  # of a Hadamard matrix, which the library has itself
        assert 0 < block <= ROTATED_VALUES, block
        assert block & (block - 1) == 0, block
        known = centres if centres is not None else factors
        out = self._empty(x.shape, dtype=x.dtype)
        self._library.mix_heads(
            dtype=x.dtype,
            x=x,
            row_stride=x.stride(0),
            heads=x.shape[1],
            head_stride=x.stride(1),
            centres=centres,
            factors=factors,
            groups=1 if known is None else known.shape[0],
            block=block,
            out=out,
            rows=x.shape[0],
            size=x.shape[2],
        )
        return out

    def norm_and_rotate(
        self, x: Tensor, num_q_heads: int, rotary: QKRotary, centre: float | None = None
    ) -> Tensor:
        q_weight, k_weight = rotary.q_weight, rotary.k_weight
        if q_weight is None or k_weight is None or not self.takes(x, q_weight, k_weight):
            return super().norm_and_rotate(x, num_q_heads, rotary, centre)
        self.norm_heads(x[:, :num_q_heads], q_weight, rotary.eps, centre)
        self.norm_heads(x[:, num_q_heads:], k_weight, rotary.eps, centre)
        return self.rotate(x, rotary.cosines, rotary.sines, is_interleaved=rotary.is_interleaved)

    def norm_and_rotate_apart(
        self, q: Tensor, k: Tensor, rotary: QKRotary, centre: float | None = None
    ) -> tuple[Tensor, Tensor]:
        q_weight, k_weight = rotary.q_weight, rotary.k_weight
        if q_weight is None or k_weight is None or not self.takes(q, k, q_weight, k_weight):
            return super().norm_and_rotate_apart(q, k, rotary, centre)
        tables, is_interleaved = (rotary.cosines, rotary.sines), rotary.is_interleaved
        for x, weight in ((q, q_weight), (k, k_weight)):
            self.norm_heads(x, weight, rotary.eps, centre)
            self.rotate(x, *tables, is_interleaved=is_interleaved)
        return q, k

    def write_cache(
        self, rows: Tensor, cache: Tensor, slots: Tensor, scales: Tensor | None = None
    ) -> None:
        assert cache.numel(), "keys are stored in a layer whose cache has no memory"
        self._library.write_cache(
            dtype=rows.dtype,
            cache_dtype=cache.dtype,
            rows=rows,
            row_stride=rows.stride(0),
            cache=cache,
            scales=scales,
            slots=slots,
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
        alibi: Alibi | None = None,
        key_scales: Tensor | None = None,
        value_scales: Tensor | None = None,
    ) -> Tensor:
        out = self._empty(q.shape, dtype=q.dtype)
        tables = visible.block_tables
        self._library.attend(
            dtype=q.dtype,
            cache_dtype=keys.dtype,
            q=q,
            q_stride=q.stride(0),
            q_head_stride=q.stride(1),
            keys=keys,
            values=values,
            kv_stride=keys.stride(-3),
            key_scales=key_scales,
            value_scales=value_scales,
            sinks=sinks,
            slopes=None if alibi is None else alibi.slopes,
            out=out,
            block_tables=tables,
            table_stride=0 if tables is None else tables.stride(0),
            block_size=0 if tables is None else keys.shape[1],
            query_starts=visible.query_starts,
            first_visible=visible.first_visible,
            end_visible=visible.end_visible,
            num_sequences=visible.query_starts.shape[0] - 1,
            num_heads=q.shape[1],
            num_kv_heads=keys.shape[-2],
            head_dim=q.shape[2],
            scale=scale,
            softcap=softcap or 0.0,
            bias_factor=0.0 if alibi is None else alibi.factor,
            rounds_biases=alibi is not None and alibi.dtype is torch.bfloat16,
        )
        return out

    def place_threads(
        self, cpus: Sequence[int], pinned: Sequence[int], num_threads: int, *, node: int | None
    ) -> None:
        error = torch.zeros(1, dtype=torch.int32)
        self._library.place_threads(
            cpus=torch.tensor(cpus, dtype=torch.int32),
            num_cpus=len(cpus),
            pinned=torch.tensor(pinned, dtype=torch.int32),
            num_pinned=len(pinned),
            node=-1 if node is None else node,
            num_workers=num_threads,
            error=error,
        )
        if code := int(error):
            raise OSError(code, os.strerror(code))


def load(
    cache: Path | None = None,
    level: Level | str | None = None,
    *,
    fixed_order: bool = False,
    formats: Mapping[str, WeightFormat] = FORMATS,
) -> CpuKernels:
    """Loads the kernels for `level` (default: the best one that this processor executes and the
    compiler knows): those of the wheel where it has some for these sources, else those that are
    built on first use into `cache` (default: a folder in the user's home; a cache that is given is
    always used). Raises BuildError when they cannot be built or loaded, or when the processor
    cannot execute them. fixed_order, formats: see Library."""
    levels = cpu_levels()
    if level is not None:
        level = Level(level)
        if level not in levels:
            names = ", ".join(each.value for each in levels)
            raise BuildError(f"this processor cannot execute {level.value}; it can execute {names}")
        levels = (level,)
    made = partial(CpuKernels, fixed_order=fixed_order, formats=formats)
    *better, last = levels
    for own in better:
        try:
            return _load(own, cache, made)
        except CompilerError as error:
            logger.warning(
                "the compiler cannot build the CPU kernels for %s; those of a lower level take "
                "their place and may be slower. A newer compiler may know its instructions: %s",
                own.value,
                error,
            )
    return _load(last, cache, made)


def _load(level: Level, cache: Path | None, made: Callable[..., CpuKernels]) -> CpuKernels:
    if cache is None:
        prebuilt = find_prebuilt(level)
        if prebuilt is not None:
            return made(prebuilt, level=level)
        try:
            cache = Path.home() / ".cache" / "mmdeploy_llm" / "kernels"
        except RuntimeError as error:
            raise BuildError(f"there is no home directory to build them in: {error}") from error
    try:
        return made(build(level, cache), level=level)
    except ForeignError as error:
        logger.warning("%s. Until then the kernels are compiled for each process anew", error)
    with tempfile.TemporaryDirectory() as own:
        return made(build(level, Path(own)), level=level)
