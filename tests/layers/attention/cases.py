"""Random ragged batches over a paged cache, and their plain dense attention. Tests on the CPU and
on GPUs load it with the fixture load_file("layers/attention/cases.py")."""

import dataclasses
import random

import torch

from mmdeploy_llm.hooks import BatchLayout, KVCache, StepLengths
from mmdeploy_llm.layers.attention import int4

BATCHES = [
    ([1], [0]),
    ([1, 1, 1], [0, 3, 40]),
    ([1, 1, 9], [5, 64, 0]),
    ([5, 8, 1], [0, 11, 7]),
    ([1, 7, 3], [15, 1, 4]),
    ([1] * 12, list(range(0, 120, 10))),
]
OPTIONS = [
    {"scale": 0.7},
    {"window": 1},
    {"window": 6},
    {"window": 50},
    {"softcap": 0.5},
    {"scale": 0.3, "window": 9, "softcap": 2.0},
]
SPANS = [  # (query_lens, earlier, spans): whole, after a prefix hit inside the span, two, decode
    ([9], [0], [(0, 2, 8)]),
    ([1, 7, 9], [5, 3, 0], [(1, 1, 9), (2, 0, 3), (2, 4, 9)]),
    ([5, 12], [6, 9], [(0, 6, 11), (1, 10, 12), (1, 14, 21)]),
    ([1, 4], [8, 0], [(0, 3, 9)]),
]
# Random cases cycle through these, so that together they cover every head size with every kind of
# batch (decode sequences, prefill chunks), and all ratios of query heads to key heads.
HEAD_SIZES = (64, 80, 96, 128, 256)
RATIOS = (1, 2, 3, 4, 7, 8, 16)
KINDS = ((0, 2), (2, 2), (3, 0), (4, 1), (1, 0), (0, 1))
NUM_RANDOM = len(HEAD_SIZES) * len(KINDS)
# Tolerances against dense attention in float64: rounding of q, k, v and of the weights.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def dense(
    q,
    k,
    v,
    *,
    scale=None,
    window=None,
    softcap=None,
    sinks=None,
    alibi=None,
    spans=(),
    is_causal=True,
):
    """Returns causal attention of the last len(q) tokens of one sequence, in float64. q [n, H, D],
    k, v [L, K, D]. Tokens of a span attend to each other."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("nhd,lhd->hnl", q.double(), k)
    scores *= q.shape[-1] ** -0.5 if scale is None else scale
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    queries = torch.arange(len(k) - len(q), len(k), device=q.device)[:, None]
    keys = torch.arange(len(k), device=q.device)[None]
    if alibi is not None:
        scores = scores + alibi.biases(keys)
    mask = (keys <= queries) | (not is_causal)
    if window is not None:
        mask = mask & (queries - window < keys)
    for a, b in spans:
        mask = mask | ((queries >= a) & (queries < b) & (keys >= a) & (keys < b))
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(q), 1)], -1)
    weights = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("hnl,lhd->nhd", weights, v)


class Case:
    """A random batch: contexts that are in the cache already, new tokens of this step, and
    scattered block tables."""

    def __init__(
        self,
        seed,
        query_lens,
        earlier,
        heads=4,
        kv_heads=2,
        head_dim=16,
        block_size=4,
        spans=(),
        dtype=torch.float32,
        device="cpu",
    ):
        generator = torch.Generator().manual_seed(seed)
        self.query_lens, self.earlier = query_lens, earlier
        totals = [n + e for n, e in zip(query_lens, earlier, strict=True)]
        needs = [-(-t // block_size) for t in totals]
        blocks = torch.randperm(sum(needs) + len(needs) + 2, generator=generator).tolist()
        tables = torch.zeros(len(totals), max(needs) + 1, dtype=torch.int32)
        self.full = []
        shape = (len(blocks), block_size, kv_heads, head_dim)
        keys, values = torch.full(shape, 7.0), torch.full(shape, -7.0)
        slots = []

        def noise(count, heads):
            made = torch.randn(count, heads, head_dim, generator=generator)
            return made.to(dtype).to(torch.float32)  # the input of dense attention is rounded too

        for row, (total, need, before) in enumerate(zip(totals, needs, earlier, strict=True)):
            own = [blocks.pop() for _ in range(need)]
            empty = [blocks.pop()]  # reserved for later tokens
            tables[row, : need + 1] = torch.tensor(own + empty, dtype=torch.int32)
            k, v = noise(total, kv_heads), noise(total, kv_heads)
            places = torch.tensor(
                [own[i // block_size] * block_size + i % block_size for i in range(total)]
            )
            keys.flatten(0, 1)[places[:before]] = k[:before]
            values.flatten(0, 1)[places[:before]] = v[:before]
            slots.append(places[before:])
            self.full.append((k.to(device), v.to(device)))
        self.q = noise(sum(query_lens), heads).to(device, dtype)
        self.k = torch.cat([k[e:] for (k, _), e in zip(self.full, earlier, strict=True)]).to(dtype)
        self.v = torch.cat([v[e:] for (_, v), e in zip(self.full, earlier, strict=True)]).to(dtype)
        self.cache = KVCache(keys=(keys.to(device, dtype),), values=(values.to(device, dtype),))
        num_decode = next((i for i, n in enumerate(query_lens) if n > 1), len(query_lens))
        self.layout = BatchLayout(
            num_decode=num_decode,
            query_lens=tuple(query_lens),
            context_lens=tuple(totals),
            block_tables=tables.to(device),
            slots=torch.cat(slots).to(device),
            spans=tuple(spans),
        )

    def expected(self, **options):
        """Returns dense attention, [T, H, D] float64."""
        outs = []
        for row, q in enumerate(torch.split(self.q, self.query_lens)):
            spans = [(a, b) for sequence, a, b in self.layout.spans if sequence == row]
            outs.append(dense(q, *self.full[row], spans=spans, **options))
        return torch.cat(outs)

    def check(self, backend, **options):
        """Compares the backend with dense attention twice, since the second layer of a step reuses
        the index tensors of the first. Also checks that keys and values are stored at their slots,
        bit for bit."""
        context = backend.begin(self.layout, self.cache)
        for _ in range(2):
            out = context.attend(0, self.q, self.k, self.v, **options)
            assert out.dtype == self.q.dtype
            assert out.shape == self.q.shape
            tolerance = TOLERANCE[self.q.dtype]
            torch.testing.assert_close(
                out.double(), self.expected(**options), atol=tolerance, rtol=tolerance
            )
        slots = self.layout.slots
        assert torch.equal(self.cache.keys[0].flatten(0, 1)[slots], self.k)
        assert torch.equal(self.cache.values[0].flatten(0, 1)[slots], self.v)

    def check_int4(self, backend, **options):
        """Compares attention over a cache of 4 bits with dense attention over the values that it
        holds, and its codes and scales with those of plain torch, bit for bit."""
        dtype, slots = self.q.dtype, self.layout.slots
        stored = [int4.encode(x[0]) for x in (self.cache.keys, self.cache.values)]
        (keys, key_scales), (values, value_scales) = stored
        expected = [[x.clone() for x in pair] for pair in stored]
        for pair, rows in zip(expected, (self.k, self.v), strict=True):
            for target, new in zip(pair, int4.encode(rows), strict=True):
                target.flatten(0, 1)[slots] = new
        cache = KVCache(
            keys=(keys,), values=(values,), key_scales=(key_scales,), value_scales=(value_scales,)
        )
        found = backend.begin(self.layout, cache).attend(0, self.q, self.k, self.v, **options)
        for pair, own in zip(stored, expected, strict=True):
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(pair, own, strict=True))
        self.full = [
            tuple(int4.decode(*int4.encode(x.to(dtype)), dtype).float() for x in pair)
            for pair in self.full
        ]
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(
            found.double(), self.expected(**options), atol=tolerance, rtol=tolerance
        )


def check_few_bits(backend, cache_dtype, dtype, heads, kv_heads, **options):
    """Compares attention with that over the values that a cache of "int8" or "int4" holds: decode
    over 1100 keys, which are two chunks, and a prefill chunk after a prefix."""
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": 64, "block_size": 16}
    whole = Case(3, [1100, 17], [0, 0], **sizes, dtype=dtype)
    cache = _empty(whole.cache, cache_dtype)
    backend.begin(whole.layout, cache).attend(0, whole.q, whole.k, whole.v)
    case = Case(3, [1, 5], [1099, 12], **sizes, dtype=dtype)
    found = backend.begin(case.layout, cache).attend(0, case.q, case.k, case.v, **options)
    keys, values = (_decoded(cache, x, dtype) for x in ("keys", "values"))
    for row, (k, _) in enumerate(case.full):
        blocks = case.layout.block_tables[row].long()
        held = [x[blocks].flatten(0, 1)[: len(k)] for x in (keys, values)]
        case.full[row] = tuple(held)
    tolerance = TOLERANCE[dtype]
    wanted = case.expected(**options)
    torch.testing.assert_close(found.double(), wanted, atol=tolerance, rtol=tolerance)


def _empty(like, dtype):
    """Returns an empty cache of few bits with as many blocks."""
    shape = like.keys[0].shape
    if dtype == "int8":
        made = [(torch.zeros(shape, dtype=torch.int8), torch.zeros(shape[:3])) for _ in range(2)]
    else:
        codes, scales = int4.encode(torch.zeros(shape))
        made = [(codes.clone(), scales.clone()) for _ in range(2)]
    (keys, key_scales), (values, value_scales) = made
    return KVCache(
        keys=(keys,), values=(values,), key_scales=(key_scales,), value_scales=(value_scales,)
    )


def _decoded(cache, which, dtype):
    """Returns the keys or the values of a cache as numbers."""
    codes = getattr(cache, which)[0]
    scales = cache.scales(0)[0 if which == "keys" else 1]
    if codes.dtype is torch.int8:
        return codes.float() * scales[..., None]
    return int4.decode(codes, scales, dtype).float()


def with_lengths(layout, max_context=None):
    """Returns the layout as a GPU gets it. max_context: an upper bound in place of the largest
    context."""
    starts = torch.tensor([0, *layout.query_lens]).cumsum(0, dtype=torch.int32)
    device = layout.slots.device
    lengths = StepLengths(
        query_starts=starts.to(device),
        context_lens=torch.tensor(layout.context_lens, dtype=torch.int32, device=device),
        max_query=max(layout.query_lens),
        max_context=max_context or max(layout.context_lens),
    )
    return dataclasses.replace(layout, lengths=lengths)


def random_case(seed, *, longest=70, block_sizes=(1, 4, 16, 24), **fixed):
    """Returns a case and its options, drawn by the seed: decode, prefill and mixed batches; with
    and without prefixes in the cache; contexts that end with a block or inside one; windows,
    softcap, scales and sinks."""
    draw = random.Random(seed)
    head_dim, ratio = HEAD_SIZES[seed % len(HEAD_SIZES)], RATIOS[seed % len(RATIOS)]
    kv_heads = draw.choice((1, 2, 3) if ratio < 7 else (1, 2))
    heads = ratio * kv_heads
    block_size = draw.choice(block_sizes)
    num_decode, num_prefill = KINDS[seed // len(HEAD_SIZES) % len(KINDS)]
    query_lens = [1] * num_decode + [draw.randint(2, longest // 3) for _ in range(num_prefill)]
    earlier = [_earlier(draw, n, block_size, longest) for n in query_lens]
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block_size": block_size}
    options = {}
    if draw.random() < 0.3:
        options["window"] = draw.choice((1, 5, 17, 64))
    if draw.random() < 0.3:
        options["softcap"] = draw.choice((0.7, 5.0, 30.0))
    if draw.random() < 0.2:
        options["scale"] = 0.3
    case = Case(seed, query_lens, earlier, **(shape | fixed))
    if draw.random() < 0.3:
        options["sinks"] = sinks_of(heads, case.q.device)
    return case, options


def sinks_of(heads, device="cpu"):
    """Returns sinks [heads], smaller and larger than scores are, that bfloat16 holds."""
    return torch.linspace(-6, 9, heads, device=device).bfloat16().float()


def _earlier(draw, query_len, block_size, longest):
    """Draws the number of tokens before the step: none, whole blocks (a prefix hit), as many as
    fill the last block in this step, or any number."""
    kind = draw.choice(("none", "prefix", "full", "any"))
    if kind == "none":
        return 0
    if kind == "prefix":
        return block_size * draw.randint(1, max(1, longest // block_size))
    if kind == "full":
        return -query_len % block_size + block_size * draw.randint(0, max(1, 20 // block_size))
    return draw.randint(1, longest)


def check_replays(
    backend,
    recording,
    decode_layout,
    options,
    block_size,
    num_seqs=5,
    dtype=torch.float32,
    device="cpu",
):
    """Records a decode step of padding only, then fills its tensors with real batches, one after
    the other, and compares the replayed attention."""
    shape = {"heads": 6, "kv_heads": 2, "head_dim": 64, "block_size": block_size}
    shape |= {"dtype": dtype, "device": device}
    batches = [[3, 40, 0], [31, 7, 15, 16, 2], [63]]
    replayed = [Case(20 + i, [1] * len(b), b, **shape) for i, b in enumerate(batches)]
    width = max(case.layout.block_tables.shape[1] for case in replayed)
    layout = decode_layout(
        block_tables=torch.zeros(num_seqs, width, dtype=torch.int32, device=device),
        slots=torch.full((num_seqs,), -1, device=device),
        context_lens=torch.ones(num_seqs, dtype=torch.int32, device=device),
        max_context=64,
    )
    num_blocks = max(len(case.cache.keys[0]) for case in replayed)
    pages = (num_blocks, *replayed[0].cache.keys[0].shape[1:])
    keys, values = (torch.zeros(pages, dtype=dtype, device=device) for _ in range(2))
    cache = KVCache(keys=(keys,), values=(values,))
    q, k, v = (torch.zeros(num_seqs, n, 64, dtype=dtype, device=device) for n in (6, 2, 2))
    for _ in range(2 if device == "cuda" else 0):  # kernels are compiled before the capture
        backend.begin(layout, cache).attend(0, q, k, v, **options)
    with recording:
        out = backend.begin(layout, cache).attend(0, q, k, v, **options)
    for case in replayed:
        count, own = len(case.q), case.layout
        for target, source, padding in (
            (q, case.q, 0),
            (k, case.k, 9),  # a write to it would show in the cache
            (v, case.v, 9),
            (layout.slots, own.slots, -1),
            (layout.lengths.context_lens, torch.tensor(own.context_lens), 1),
        ):
            target[:count], target[count:] = source, padding
        layout.block_tables.zero_()
        layout.block_tables[:count, : own.block_tables.shape[1]] = own.block_tables
        for target, source in ((keys, case.cache.keys[0]), (values, case.cache.values[0])):
            target[: len(source)] = source
        recording.replay()
        torch.testing.assert_close(
            out[:count].double(),
            case.expected(**options),
            atol=TOLERANCE[dtype],
            rtol=TOLERANCE[dtype],
        )
        assert out.isfinite().all()
        written = (keys, case.cache.keys[0], case.k), (values, case.cache.values[0], case.v)
        for target, cached, new in written:
            cached.flatten(0, 1)[own.slots] = new
            assert torch.equal(target[: len(cached)], cached)
