"""Mixture of experts in five launches after the router's product. The host need not know how many
tokens an expert has.

    logits [T, E] --route--> weights [T, k], expert ids [R]
    routes [R] --rank--> order: routes sorted by expert; ends: the end of each expert's routes
    x [T, S] --gather, gate and up, silu * up--> [R, I] --down, scatter--> [R, S]
             --weigh, add--> [T, S]

A program of the products computes one tile of one expert: tiles are counted from `ends` on the
device, and the grid is as large as the worst case. Routes to expert E or above are skipped.

Shapes: T tokens, E experts, k routes of a token, R = T k routes, S size of the hidden states, I
width of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .rows import silu_mul, silu_times

RANKED = 64  # routes and experts that one program of _rank computes
MAX_RANKED = 4096  # routes; with more, sorting costs less than comparing all with all
COMBINED = 1024  # channels that one program of _combine computes
# From this many routes per expert, and this compute capability, torch's grouped product is faster.
MIN_TORCH_ROUTES = 128
TORCH_CAPABILITY = (9, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tile:
    """Tile sizes of a grouped product. depth: terms of a sum that are loaded at once, for 16-bit
    values."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


TILES = (
    _Tile(rows=16, columns=32, depth=128, num_warps=4, num_stages=4),
    _Tile(rows=32, columns=64, depth=64, num_warps=4, num_stages=4),
    _Tile(rows=64, columns=64, depth=64, num_warps=4, num_stages=3),
    _Tile(rows=128, columns=64, depth=64, num_warps=8, num_stages=3),
)


@triton.jit(do_not_specialize=["num_routes"])
def _rank(ids_ptr, num_routes, num_experts, order_ptr, ends_ptr, BLOCK: tl.constexpr):
    """Sorts routes stably by expert: order[rank of route i] = i, and ends[e] = number of routes to
    the experts 0 .. e."""
    own = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + own, mask=own < num_routes, other=0).to(tl.int32)[:, None]
    experts = own[:, None]
    ranks = tl.zeros((BLOCK,), dtype=tl.int32)
    ends = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, num_routes, BLOCK):
        others = start + tl.arange(0, BLOCK)
        is_in = (others < num_routes)[None, :]
        other_ids = tl.load(ids_ptr + others, mask=others < num_routes, other=0).to(tl.int32)[
            None, :
        ]
        is_before = (other_ids < ids) | ((other_ids == ids) & (others[None, :] < own[:, None]))
        ranks += tl.sum((is_before & is_in).to(tl.int32), axis=1)
        ends += tl.sum(((other_ids <= experts) & is_in).to(tl.int32), axis=1)
    tl.store(order_ptr + ranks, own, mask=own < num_routes)
    tl.store(ends_ptr + own, ends, mask=own < num_experts)


@triton.jit
def _place(tile, ends_ptr, num_experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Returns the expert of a tile, its first row and the end of the expert's rows. A surplus tile
    has no rows."""
    experts = tl.arange(0, EXPERTS)
    is_expert = experts < num_experts
    ends = tl.load(ends_ptr + experts, mask=is_expert, other=0)
    starts = tl.load(ends_ptr + experts - 1, mask=is_expert & (experts > 0), other=0)
    num_tiles = tl.where(is_expert, tl.cdiv(ends - starts, ROWS), 0)
    expert = tl.sum((tl.cumsum(num_tiles, 0) <= tile).to(tl.int32))
    place = tile - tl.sum(tl.where(experts < expert, num_tiles, 0))
    start = tl.sum(tl.where(experts == expert, starts, 0))
    return expert, start + place * ROWS, tl.sum(tl.where(experts == expert, ends, 0))


@triton.jit
def _grouped_product(
    a_ptr, a_stride, b_ptr, out_ptr, order_ptr, ends_ptr, num_columns, depth, num_experts,
    ROUTES_PER_ROW: tl.constexpr, IS_GATED: tl.constexpr, EXPERTS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Multiplies rows of `a` by their experts' matrices. ROUTES_PER_ROW: routes of a row of `a`;
    0: its rows are in the sorted order. IS_GATED: computes silu(a gate') * (a up') in the sorted
    order; otherwise a b' in the order of the routes."""
    expert, first, end = _place(tl.program_id(1), ends_ptr, num_experts, EXPERTS, ROWS)
    rows = first + tl.arange(0, ROWS)
    is_row = rows < end
    if first < end:
        routes = tl.load(order_ptr + rows, mask=is_row, other=0)
        a_rows = rows if ROUTES_PER_ROW == 0 else routes // ROUTES_PER_ROW
        columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        is_column = columns < num_columns
        a_start = a_ptr + a_rows.to(tl.int64)[:, None] * a_stride
        weights = expert.to(tl.int64) * num_columns * (2 if IS_GATED else 1) + columns
        b_start = b_ptr + weights[None, :] * depth
        sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        if IS_GATED:
            up_start = b_ptr + (weights + num_columns)[None, :] * depth
            up_sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for start in range(0, depth, DEPTH):
            inner = start + tl.arange(0, DEPTH)
            is_inner = inner < depth
            is_value = is_row[:, None] & is_inner[None, :]
            is_weight = is_inner[:, None] & is_column[None, :]
            a = tl.load(a_start + inner[None, :], mask=is_value, other=0.0)
            b = tl.load(b_start + inner[:, None], mask=is_weight, other=0.0)
            sums = tl.dot(a, b, sums, input_precision="ieee")
            if IS_GATED:
                up = tl.load(up_start + inner[:, None], mask=is_weight, other=0.0)
                up_sums = tl.dot(a, up, up_sums, input_precision="ieee")
        if IS_GATED:
            sums = silu_times(sums, up_sums, out_ptr.dtype.element_ty)
        out_rows = rows if IS_GATED else routes
        places = out_ptr + out_rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
        is_out = is_row[:, None] & is_column[None, :]
        tl.store(places, sums.to(out_ptr.dtype.element_ty), mask=is_out)


@triton.jit
def _combine(
    routed_ptr, weights_ptr, ids_ptr, out_ptr, size, num_experts,
    K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes the weighted sum over the routes of a token."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dtype = out_ptr.dtype.element_ty
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for j in range(K):
        is_run = tl.load(ids_ptr + token * K + j) < num_experts
        weight = tl.load(weights_ptr + token * K + j).to(tl.float32)
        place = routed_ptr + (token * K + j) * size + columns
        routed = tl.load(place, mask=(columns < size) & is_run, other=0.0).to(tl.float32)
        total += (routed * weight).to(dtype).to(tl.float32)
    tl.store(out_ptr + token * size + columns, total.to(dtype), mask=columns < size)


@triton.jit
def _route(
    logits_ptr, bias_ptr, weights_ptr, ids_ptr, num_experts, norm_min,
    HAS_BIAS: tl.constexpr, IS_NORMED: tl.constexpr, K: tl.constexpr, CHOSEN: tl.constexpr,
    EXPERTS: tl.constexpr,
):  # fmt: skip
    """Chooses the K experts of one token one by one, the largest first, and of equal ones the
    lowest id."""
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, EXPERTS)
    is_expert = experts < num_experts
    logits = tl.load(logits_ptr + token * num_experts + experts, mask=is_expert, other=-1e30)
    scores = tl.where(is_expert, logits.to(tl.float32), float("-inf"))
    scores = tl.exp(scores - tl.max(scores))
    scores = scores / tl.sum(scores)
    left = scores
    if HAS_BIAS:
        left += tl.load(bias_ptr + experts, mask=is_expert, other=0.0)
    left = tl.where(is_expert, left, float("-inf"))
    places = tl.arange(0, CHOSEN)
    weights = tl.zeros((CHOSEN,), dtype=tl.float32)
    ids = tl.zeros((CHOSEN,), dtype=tl.int32)
    for place in range(K):
        chosen = tl.min(tl.where(left == tl.max(left), experts, EXPERTS))
        weight = tl.sum(tl.where(experts == chosen, scores, 0.0))
        weights = tl.where(places == place, weight, weights)
        ids = tl.where(places == place, chosen, ids)
        left = tl.where(experts == chosen, float("-inf"), left)
    if IS_NORMED:
        weights = weights / tl.maximum(tl.sum(weights), norm_min)
    is_place = places < K
    tl.store(weights_ptr + token * K + places, weights.to(weights_ptr.dtype.element_ty), is_place)
    tl.store(ids_ptr + token * K + places, ids, is_place)


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """Routes by expert. order: [R] int32, the routes sorted by expert. ends: [E] int32, the end of
    each expert's routes in `order`."""

    order: Tensor
    ends: Tensor


def route(
    logits: Tensor, bias: Tensor | None, top_k: int, dtype: torch.dtype, norm_min: float | None
) -> tuple[Tensor, Tensor]:
    """Chooses experts by logits [T, E]: weights [T, k] and ids [T, k] int32; see
    kernels.Kernels."""
    num_tokens, num_experts = logits.shape
    weights = torch.empty((num_tokens, top_k), dtype=dtype, device=logits.device)
    ids = torch.empty((num_tokens, top_k), dtype=torch.int32, device=logits.device)
    if num_tokens:
        _route[(num_tokens,)](
            logits.contiguous(), logits if bias is None else bias, weights, ids, num_experts,
            norm_min or 0.0, HAS_BIAS=bias is not None, IS_NORMED=norm_min is not None, K=top_k,
            CHOSEN=triton.next_power_of_2(top_k), EXPERTS=triton.next_power_of_2(num_experts),
            num_warps=1,
        )  # fmt: skip
    return weights, ids


def sort_routes(ids: Tensor, num_experts: int) -> Routes:
    """Sorts routes by expert. ids: [R]; an id of `num_experts` or more is no expert."""
    num_routes = ids.shape[0]
    if num_routes > MAX_RANKED:
        found, order = ids.to(torch.int32).sort(stable=True)
        numbers = torch.arange(num_experts, dtype=torch.int32, device=ids.device)
        ends = torch.searchsorted(found, numbers, right=True, out_int32=True)
        return Routes(order=order.to(torch.int32), ends=ends)
    order = torch.empty(num_routes, dtype=torch.int32, device=ids.device)
    ends = torch.empty(num_experts, dtype=torch.int32, device=ids.device)
    grid = (triton.cdiv(max(num_routes, num_experts), RANKED),)
    _rank[grid](ids, num_routes, num_experts, order, ends, BLOCK=RANKED, num_warps=4)
    return Routes(order=order, ends=ends)


def run_experts(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """Returns [T, S], the sum over a token's routes of weight * down(silu(gate(x)) * up(x)): x
    [T, S], weights [T, k], ids [T, k], gate_up [E, 2 I, S], down [E, S, I]. An id of E or
    more adds nothing."""
    num_tokens, top_k = experts.shape
    num_experts = down.shape[0]
    assert gate_up.is_contiguous()
    assert down.is_contiguous()
    if num_tokens == 0:
        return torch.empty_like(x)
    ids = experts.contiguous().view(-1)
    routes = sort_routes(ids, num_experts)
    if _can_use_torch(x, ids.shape[0], down):
        routed = _run_in_torch(x, routes, top_k, gate_up, down)
    else:
        hidden = _product(x, gate_up, routes, routes_per_row=top_k, is_gated=True)
        routed = _product(hidden, down, routes, routes_per_row=0, is_gated=False)
    size = x.shape[1]
    out = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
    _combine[(num_tokens, triton.cdiv(size, COMBINED))](
        routed, weights.contiguous(), ids, out, size, num_experts, K=top_k, BLOCK=COMBINED
    )
    return out


def _product(
    a: Tensor, b: Tensor, routes: Routes, *, routes_per_row: int, is_gated: bool
) -> Tensor:
    """Multiplies the routes' rows of `a` by their experts' matrices in `b` [E, n or 2 n, k] ->
    [R, n]: in the sorted order if gated, otherwise in the order of the routes."""
    num_routes, num_experts = routes.order.shape[0], b.shape[0]
    num_columns = b.shape[1] // 2 if is_gated else b.shape[1]
    tile = _tile(num_routes, num_experts)
    num_used = min(num_experts, num_routes)
    # Every expert in use wastes at most tile.rows - 1 rows of its last tile.
    max_tiles = min(num_routes, (num_routes + num_used * (tile.rows - 1)) // tile.rows)
    out = torch.empty((num_routes, num_columns), dtype=a.dtype, device=a.device)
    _grouped_product[(triton.cdiv(num_columns, tile.columns), max_tiles)](
        a, a.stride(0), b, out, routes.order, routes.ends, num_columns, b.shape[2], num_experts,
        **_product_options(tile, a, b, routes_per_row=routes_per_row, is_gated=is_gated),
    )  # fmt: skip
    return out


def _product_options(
    tile: _Tile, a: Tensor, b: Tensor, *, routes_per_row: int, is_gated: bool
) -> dict[str, int]:
    """Returns the constants of the product's kernel."""
    return {
        "ROUTES_PER_ROW": routes_per_row,
        "IS_GATED": is_gated,
        "EXPERTS": triton.next_power_of_2(b.shape[0]),
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "DEPTH": 2 * tile.depth // a.element_size(),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def compile_products(x: Tensor, top_k: int, gate_up: Tensor, down: Tensor) -> None:
    """Compiles the products for every tile, so that no later step waits for the compiler."""
    hidden = x.new_empty((1, down.shape[2]))
    ints = torch.empty(1, dtype=torch.int32, device=x.device)
    for a, b, per_row, is_gated in ((x, gate_up, top_k, True), (hidden, down, 0, False)):
        num_columns = b.shape[1] // 2 if is_gated else b.shape[1]
        for tile in TILES:
            _grouped_product.warmup(
                a, a.stride(0), b, hidden, ints, ints, num_columns, b.shape[2], b.shape[0],
                grid=(1,),
                **_product_options(tile, a, b, routes_per_row=per_row, is_gated=is_gated),
            )  # fmt: skip


def _tile(num_routes: int, num_experts: int) -> _Tile:
    """Chooses a tile by the average number of routes per expert."""
    each = num_routes / num_experts
    return next((tile for tile in TILES if each <= tile.rows), TILES[-1])


def _can_use_torch(x: Tensor, num_routes: int, down: Tensor) -> bool:
    """Whether to call torch's grouped product. It accepts bf16 rows of a multiple of 16 bytes; on
    cards before TORCH_CAPABILITY it copies the counts to the host."""
    is_aligned = x.shape[1] % 8 == 0 and down.shape[2] % 8 == 0
    if not (x.is_cuda and x.dtype is torch.bfloat16 and is_aligned):
        return False
    is_large = num_routes >= MIN_TORCH_ROUTES * down.shape[0]
    return is_large and torch.cuda.get_device_capability(x.device) >= TORCH_CAPABILITY


def _run_in_torch(x: Tensor, routes: Routes, top_k: int, gate_up: Tensor, down: Tensor) -> Tensor:
    """Runs the experts with torch's grouped product; returns [R, S] in the order of the routes."""
    rows = x.index_select(0, routes.order // top_k)
    gate, up = F.grouped_mm(rows, gate_up.transpose(1, 2), offs=routes.ends).chunk(2, -1)
    found = F.grouped_mm(silu_mul(gate, up), down.transpose(1, 2), offs=routes.ends)
    return torch.empty_like(found).index_copy_(0, routes.order.long(), found)
