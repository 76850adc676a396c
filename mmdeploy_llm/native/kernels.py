"""The library's functions on tensors. Shapes: T tokens, H query heads, K key/value heads, D head
size, B sequences, N blocks, P tokens in a block."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from ctypes import c_int32
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from .build import BuildError, build, cpu_level
from .memory import LargePages
from .recording import Memory, Recorder, Recording
from .signatures import SIGNATURES, AttentionArgs

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
INT8 = 2
PANEL = 64  # as in gemm.h
MAX_HEAD_DIM = 512  # as in attention.h
MAX_GROUP = 256  # TILE_ROWS in attention.h


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """Which keys the tokens of a call see.

    query_starts: [B + 1] int64, the first token of each sequence. first_seen, behind_seen: [T]
    int64, of the sequence's keys. block_tables: [B, M] int32; None when the keys lie in one piece,
    beside the queries.
    """

    query_starts: Tensor
    first_seen: Tensor
    behind_seen: Tensor
    block_tables: Tensor | None = None


class Kernels:
    """One loaded library. Tensors are float32 or bf16 on the CPU, unless said otherwise.

    memory: for weights.

    Methods check nothing that `takes` has answered. Each runs on torch's threads, as many as
    torch.get_num_threads says.
    """

    def __init__(self, path: Path) -> None:
        """Raises BuildError when the library or torch's OpenMP runtime cannot be loaded."""
        try:
            for runtime in _openmp_runtimes():
                ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise BuildError(f"the kernels cannot be loaded: {error}") from error
        for name, types in SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes = types
            function.restype = c_int32 if name == "mm_place_threads" else None
        self._library: ctypes.CDLL | Recorder = library
        self._empty: Callable[..., Tensor] = torch.empty
        self.memory = LargePages()
        self._recorded_memory = Memory()

    def record(
        self, function: Callable[..., Tensor], *inputs: Tensor
    ) -> tuple[Tensor, Recording | None]:
        """function(*inputs), and what makes the same kernel calls again; None when the function
        does more than kernel calls."""
        library = self._library
        assert isinstance(library, ctypes.CDLL), "recordings are not nested"
        recorder = Recorder(library, self._recorded_memory)
        self._library, self._empty = recorder, self._recorded_memory.empty
        try:
            return recorder.record(function, inputs)
        finally:
            self._library, self._empty = library, torch.empty

    def takes(self, *tensors: Tensor) -> bool:
        """Whether the kernels compute on tensors like these: on the CPU, of one dtype, with
        channels side by side."""
        dtype = tensors[0].dtype
        return dtype in DTYPES and all(
            x.is_cpu and x.dtype is dtype and x.stride(-1) == 1 for x in tensors
        )

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
        """norm(x) * weight of rows [T, size]; with a residual [T, size], which becomes
        residual + x, of that."""
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
            torch.get_num_threads(),
        )
        return out

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up, both [T, size]."""
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

    def rotate(self, x: Tensor, cosines: Tensor, sines: Tensor, *, is_interleaved: bool) -> None:
        """Turns the first 2 R channels of every head of `x` [T, heads, D] in place. cosines, sines:
        [T, R] float32, contiguous."""
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
        """As `rotate`, of the normed heads: the first ones with `q_weight` [D], the others with
        `k_weight`."""
        for heads, weight in ((x[:, :num_q_heads], q_weight), (x[:, num_q_heads:], k_weight)):
            self._library.mm_norm_heads(
                DTYPES[x.dtype],
                heads.data_ptr(),
                heads.stride(0),
                heads.shape[1],
                heads.stride(1),
                weight.data_ptr(),
                heads.shape[0],
                heads.shape[2],
                eps,
                torch.get_num_threads(),
            )
        self.rotate(x, cosines, sines, is_interleaved=is_interleaved)

    def write_cache(
        self, rows: Tensor, cache: Tensor, slots: Tensor, scales: Tensor | None = None
    ) -> None:
        """`rows` [T, K, D] to their slots [T] int64 of `cache` [N, P, K, D]: of the same dtype, or
        int8 with `scales` [N, P, K] float32."""
        self._library.mm_write_cache(
            DTYPES[rows.dtype],
            INT8 if scales is not None else DTYPES[cache.dtype],
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
        sequences: Sequences,
        *,
        scale: float,
        softcap: float | None = None,
        key_scales: Tensor | None = None,
        value_scales: Tensor | None = None,
    ) -> Tensor:
        """Attention of `q` [T, H, D] as [T, H, D]. keys, values: pages [N, P, K, D] of the same
        dtype (or int8, with scales [N, P, K]), or [T, K, D] in one piece."""
        out = self._empty(q.shape, dtype=q.dtype)
        tables = sequences.block_tables
        args = AttentionArgs(
            q=q.data_ptr(),
            q_stride=q.stride(0),
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            kv_stride=keys.stride(-3),
            key_scales=None if key_scales is None else key_scales.data_ptr(),
            value_scales=None if value_scales is None else value_scales.data_ptr(),
            out=out.data_ptr(),
            block_tables=None if tables is None else tables.data_ptr(),
            table_stride=0 if tables is None else tables.stride(0),
            block_size=0 if tables is None else keys.shape[1],
            query_starts=sequences.query_starts.data_ptr(),
            first_seen=sequences.first_seen.data_ptr(),
            behind_seen=sequences.behind_seen.data_ptr(),
            num_sequences=sequences.query_starts.shape[0] - 1,
            num_heads=q.shape[1],
            num_kv_heads=keys.shape[-2],
            head_dim=q.shape[2],
            scale=scale,
            softcap=softcap or 0.0,
            num_threads=torch.get_num_threads(),
        )
        cache_dtype = INT8 if key_scales is not None else DTYPES[keys.dtype]
        self._library.mm_attend(DTYPES[q.dtype], cache_dtype, args)
        return out

    def pack_bf16(self, weight: Tensor) -> Tensor:
        """bf16 `weight` [n, k], contiguous, k even, as `linear_bf16` reads it; in the same memory
        where that has room for it, so that a model needs no second copy of its weights."""
        n, k = weight.shape
        shape = (-(-n // PANEL), k // 2, PANEL, 2)
        packed = self.memory.empty(shape, dtype=weight.dtype) if n % PANEL else weight.view(shape)
        self._library.mm_pack_bf16(
            weight.data_ptr(), n, k, packed.data_ptr(), torch.get_num_threads()
        )
        return packed

    def linear_bf16(self, x: Tensor, packed: Tensor, n: int, bias: Tensor | None) -> Tensor:
        """bf16 `x` [T, k] times the packed weights -> [T, n]. bias: [n] bf16."""
        out = self._empty((x.shape[0], n), dtype=x.dtype)
        self._library.mm_linear_bf16(
            x.data_ptr(),
            x.stride(0),
            packed.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            n,
            x.shape[1],
            torch.get_num_threads(),
            None,
            0,
        )
        return out

    def pack_s8(self, weight: Tensor) -> Tensor:
        """int8 `weight` [n, k], contiguous, as `linear_s8` reads it."""
        weight = F.pad(weight, (0, -weight.shape[1] % 4))
        n, k = weight.shape
        packed = self.memory.empty((-(-n // PANEL), k // 4, PANEL, 4), dtype=torch.uint8)
        self._library.mm_pack_s8(
            weight.data_ptr(), n, k, packed.data_ptr(), torch.get_num_threads()
        )
        return packed

    def quantize_rows(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """`weight` [n, k], contiguous, as int8 [n, k] with a scale for each row [n] float32: the
        largest value of a row becomes 127."""
        n, k = weight.shape
        rounded = torch.empty(n, k, dtype=torch.int8)
        scales = torch.empty(n)
        self._library.mm_quantize_rows(
            DTYPES[weight.dtype],
            weight.data_ptr(),
            n,
            k,
            rounded.data_ptr(),
            scales.data_ptr(),
            torch.get_num_threads(),
        )
        return rounded, scales

    def linear_s8(self, x: Tensor, packed: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        """`x` [T, k], every 128 values of a row quantized with a scale of their own, times the
        packed weights -> [T, n]. scales: [n] float32, of the rows of the weights. bias: [n] of x's
        dtype."""
        out = self._empty((x.shape[0], scales.shape[0]), dtype=x.dtype)
        self._library.mm_linear_s8(
            DTYPES[x.dtype],
            x.data_ptr(),
            x.stride(0),
            packed.data_ptr(),
            scales.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            scales.shape[0],
            x.shape[1],
            torch.get_num_threads(),
            None,
            0,
        )
        return out

    def largest(self, logits: Tensor, num: int) -> tuple[Tensor, Tensor]:
        """The `num` largest values of each row of [R, V], falling [R, num] float32, and their
        indices [R, num]; which of equal ones is not specified. NaN counts as largest."""
        values = torch.empty(logits.shape[0], num)
        ids = torch.empty(logits.shape[0], num, dtype=torch.int64)
        self._library.mm_largest(
            DTYPES[logits.dtype],
            logits.data_ptr(),
            logits.stride(0),
            *logits.shape,
            num,
            values.data_ptr(),
            ids.data_ptr(),
            torch.get_num_threads(),
        )
        return values, ids

    def temper(self, logits: Tensor, temperature: Tensor) -> Tensor:
        """(logits - largest of the row) / temperature, [R, V] -> [R, V] float32. temperature: [R]
        float32."""
        out = torch.empty(logits.shape)
        self._library.mm_temper(
            DTYPES[logits.dtype],
            logits.data_ptr(),
            logits.stride(0),
            *logits.shape,
            temperature.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def cut(self, z: Tensor, probs: Tensor, least: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
        """The smallest z of each row that the rules keep, [R] float32: z >= least, then the top_k
        largest, then the largest that have top_p of the mass of what is left; what ties with the
        last one too. z, probs: [R, V] float32, contiguous, 0 at most and their softmax. least: [R]
        float32. top_k: [R] int64, 0 is off. top_p: [R] float64, 1 is off."""
        cuts = torch.empty(z.shape[0])
        self._library.mm_cut(
            z.data_ptr(),
            probs.data_ptr(),
            *z.shape,
            least.data_ptr(),
            top_k.data_ptr(),
            top_p.data_ptr(),
            cuts.data_ptr(),
            torch.get_num_threads(),
        )
        return cuts

    def invert(self, probs: Tensor, uniforms: Tensor) -> Tensor:
        """For each row of `probs` [R, V] float32, contiguous, in whole units of 2**-50: the first
        place at which their running sum passes the uniform's share of their sum; [R] int64.
        uniforms: [R] float64."""
        tokens = torch.empty(probs.shape[0], dtype=torch.int64)
        self._library.mm_invert(
            probs.data_ptr(),
            *probs.shape,
            uniforms.data_ptr(),
            tokens.data_ptr(),
            torch.get_num_threads(),
        )
        return tokens

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
        """Values of uint8 `pixels` [H, W, 3], looked up in `table` [3, 256] float32, as `frames` of
        the patch rows `out` [N, 3, T, P, P] float32, all contiguous. Patches come in blocks of
        merge_size x merge_size. Runs on the calling thread alone."""
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
        """From now on the calling thread runs on `cpus` alone, and so do the threads that it
        computes with: the i-th on pinned[i] alone unless `pinned` is empty. node: memory comes from
        there first.

        Raises OSError when the system refuses that.
        """
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


def _openmp_runtimes() -> list[str]:
    """The OpenMP libraries in torch's wheel; none where torch uses the system's."""
    root = Path(torch.__file__).parent
    folders = (root / "lib", root.parent / "torch.libs")
    return [str(path) for folder in folders for path in sorted(folder.glob("libgomp*.so*"))]


def load(cache: Path | None = None) -> Kernels:
    """The kernels for this processor, built on first use into `cache` (by default in the user's
    home). Raises BuildError."""
    if cache is None:
        try:
            cache = Path.home() / ".cache" / "mmdeploy_llm"
        except RuntimeError as error:
            raise BuildError(f"there is no home directory to build them in: {error}") from error
    return Kernels(build(cpu_level(), cache))
