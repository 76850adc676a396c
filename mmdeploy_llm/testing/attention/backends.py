"""Checks of an attention backend: what it computes, stores, refuses and keeps out."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mmdeploy_llm.forward import Alibi, SequenceAttention, SideBySideAttention
from mmdeploy_llm.hooks.objects.attention import NO_SLOT, KVCache
from mmdeploy_llm.layers.attention import int4
from mmdeploy_llm.layers.attention.layouts import decode_layout
from mmdeploy_llm.testing.models.base import Check, CheckSkipped, demand

from .cases import Shape, Step, random_shape, split
from .subject import DTYPES, BackendSubject, each_step

NUM_RANDOM = 24
MASK = "a token sees those before it and itself; block tables, lengths and slots say where they are"
CODED = {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}
SPANS = (
    Shape(query_lens=(9,), earlier=(0,), spans=((0, 2, 8),)),
    Shape(query_lens=(1, 7, 9), earlier=(5, 3, 0), spans=((1, 3, 9), (2, 0, 3), (2, 4, 9))),
    Shape(query_lens=(5, 12), earlier=(6, 9), spans=((0, 6, 11), (1, 10, 12), (1, 14, 21))),
    Shape(query_lens=(1, 4), earlier=(8, 0), spans=((0, 3, 9),)),  # a cached part, one row
)


def builds(subject: BackendSubject) -> None:
    """The factory builds an AttentionBackend for each declared dtype, named as its spec."""
    for dtype in subject.dtypes:
        subject.new(dtype)


def equals_plain_attention(subject: BackendSubject) -> None:
    """Prefill, chunks, decode and mixed steps equal plain attention, in each dtype and head size,
    for every ratio of query heads to key heads and several block sizes."""
    for dtype in subject.dtypes:
        for dim in subject.head_dims:
            step = subject.step(Shape(query_lens=(1, 6), earlier=(9, 3), head_dim=dim), dtype=dtype)
            subject.computes(step, MASK)
    for step in each_step(subject):
        subject.computes(step, MASK)
    multiple = subject.spec.block_multiple
    for seed in range(NUM_RANDOM):
        shape = random_shape(seed, head_dim=16, block_multiple=1)
        if multiple > 1 and shape.block_size > 2:
            continue  # blocks of thousands of tokens
        dtype = subject.dtypes[seed % len(subject.dtypes)]
        subject.computes(subject.step(shape, seed=seed, dtype=dtype), MASK)


def scale_is_a_factor(subject: BackendSubject) -> None:
    """`scale` is the factor of the scores in place of D ** -0.5."""
    for step in each_step(subject):
        subject.computes(step, "multiply scores by `scale` where it is given", scale=0.7)


def windows_are_computed_or_refused(subject: BackendSubject) -> None:
    """A token sees the last `window` tokens, itself included; not declared, it is refused."""
    steps = each_step(subject)
    if not subject.spec.windows:
        subject.refuses(steps[1], "window=3", "windows", window=3)
        return
    for step in steps:
        for window in (1, 6, 50):
            subject.computes(step, "the window includes the token itself", window=window)


def softcaps_are_computed_or_refused(subject: BackendSubject) -> None:
    """A score s becomes softcap * tanh(s / softcap); not declared, it is refused."""
    steps = each_step(subject)
    if not subject.spec.softcaps:
        subject.refuses(steps[1], "softcap=0.5", "softcaps", softcap=0.5)
        return
    for step in steps:
        subject.computes(step, "cap the scaled scores, before the mask", softcap=0.5)


def sinks_are_computed_or_refused(subject: BackendSubject) -> None:
    """Sinks take part in the softmax, without a value; not declared, they are refused."""
    for step in each_step(subject):
        heads = step.q.shape[1]
        sinks = torch.linspace(-6, 9, heads, device=step.q.device).bfloat16().float()
        if not subject.spec.sinks:
            subject.refuses(step, "sinks", "sinks", sinks=sinks)
            return
        subject.computes(step, "a sink is one more score, neither scaled nor capped", sinks=sinks)


def alibi_is_computed(subject: BackendSubject) -> None:
    """A bias for each key is added to the scores, rounded as the model says."""
    if not subject.spec.alibi:
        raise CheckSkipped("the spec does not declare `alibi`; no model with it is asked")
    for step in each_step(subject):
        slopes = 1.6 ** -torch.arange(1.0, step.q.shape[1] + 1, device=step.q.device)
        for dtype, window in ((None, None), (torch.bfloat16, 6)):
            alibi = Alibi(slopes=slopes, factor=0.7, dtype=dtype)
            advice = "add factor * (slope * index of the key) to the scaled scores"
            subject.computes(step, advice, alibi=alibi, window=window)


def media_see_both_ways_or_are_refused(subject: BackendSubject) -> None:
    """Tokens of a span see all of it, whatever the window; `causal()` is the same step as text. Not
    declared, the engine asks for no spans."""
    if not subject.spec.media_spans:
        raise CheckSkipped("the spec does not declare `media_spans`; no model with them is asked")
    for number, shape in enumerate(SPANS):
        step = subject.step(shape, seed=number, dtype=subject.dtypes[0])
        subject.computes(step, "tokens of a span see each other; those outside see it as text")
        if subject.spec.windows:
            advice = "a span is seen whole, also where it is longer than the window"
            subject.computes(step, advice, window=8)
        backend = subject.new(step.q.dtype)
        context = backend.begin(step.layout, step.cache).causal()
        found = context.attend(0, step.q, step.k, step.v)
        text = replace(step, layout=replace(step.layout, spans=()))
        subject.compare(found, text.expected(), f"causal() of {shape}", "drop the spans")


def stores_keys_and_values_in_place(subject: BackendSubject) -> None:
    """Keys and values are at their slots bit for bit, nothing else of the cache changes, and the
    rows that were passed in stay as they are."""
    for step in each_step(subject):
        before = [x.clone() for x in (step.cache.keys[0], step.cache.values[0])]
        rows = [x.clone() for x in (step.q, step.k, step.v)]
        subject.attend(subject.new(step.q.dtype), step)
        for pages, old, new in zip(
            (step.cache.keys[0], step.cache.values[0]), before, rows[1:], strict=True
        ):
            old.flatten(0, 1)[step.layout.slots] = new
            demand(
                torch.equal(pages, old),
                f"after attend of {step.shape} the cache is not the old one with `k`, `v` at "
                "layout.slots; store each row once, at its slot, in place",
            )
        same = all(map(torch.equal, rows, (step.q, step.k, step.v)))
        demand(same, "attend changes q, k or v; the model may use them again")


def reads_what_another_layer_stored(subject: BackendSubject) -> None:
    """A layer without k and v attends over what its cache holds; layers have their own caches."""
    for step in each_step(subject):
        other = step.cache.keys[0].clone().zero_(), step.cache.values[0].clone().zero_()
        cache = KVCache(
            keys=(other[0], step.cache.keys[0]), values=(other[1], step.cache.values[0])
        )
        context = subject.new(step.q.dtype).begin(step.layout, cache)
        context.attend(0, step.q, step.k, step.v)
        context.attend(1, step.q, step.k, step.v)
        found = context.attend(1, step.q, None, None)
        advice = "without k and v read cache.keys[layer], cache.values[layer] as they are"
        subject.compare(found, step.expected(), f"k = v = None in {step.shape}", advice)


def chunks_equal_the_whole(subject: BackendSubject) -> None:
    """A prompt in chunks, then one token, gives what it gives at once, with one backend for all
    steps."""
    whole = subject.step(Shape(query_lens=(23,), earlier=(0,)), dtype=subject.dtypes[0])
    backend, found, done = subject.new(whole.q.dtype), [], 0
    for count in (5, 8, 1, 8, 1):
        rows = slice(done, done + count)
        done += count
        layout = replace(
            whole.layout,
            num_decode=int(count == 1),
            query_lens=(count,),
            context_lens=(done,),
            slots=whole.layout.slots[rows],
        )
        context = backend.begin(layout, whole.cache)
        found.append(context.attend(0, whole.q[rows], whole.k[rows], whole.v[rows]))
    advice = "a chunk's rows are the last ones of its context"
    subject.compare(torch.cat(found), whole.expected(), "chunks of a prompt", advice)


def rows_do_not_depend_on_others(subject: BackendSubject) -> None:
    """A sequence gives the same alone and among others; the same bits where the spec says so."""
    shape = Shape(query_lens=(1, 1, 9, 5), earlier=(5, 40, 0, 13))
    step = subject.step(shape, dtype=subject.dtypes[0])
    together = split(subject.attend(subject.new(step.q.dtype), step), shape.query_lens)
    rows = [split(x, shape.query_lens) for x in (step.q, step.k, step.v, step.layout.slots)]
    for number, (q, k, v, slots) in enumerate(zip(*rows, strict=True)):
        layout = replace(
            step.layout,
            num_decode=int(len(q) == 1),
            query_lens=(len(q),),
            context_lens=(shape.totals[number],),
            block_tables=step.layout.block_tables[number : number + 1],
            slots=slots,
        )
        alone = subject.new(q.dtype).begin(layout, step.cache).attend(0, q, k, v)
        about = f"sequence {number} of {shape} alone"
        subject.compare(alone, together[number].double(), about, "a row reads no other sequence")
        if subject.spec.deterministic:
            same = torch.equal(alone, together[number])
            demand(same, f"{about} gives other bits; the spec declares `deterministic`")


def nothing_leaks_in(subject: BackendSubject) -> None:
    """NaN in other blocks, in what pads a table and after a sequence's end changes nothing."""
    options = {"window": 6} if subject.spec.windows else {}
    for number, shape in enumerate(
        (*(step.shape for step in each_step(subject)), Shape(query_lens=(1, 1), earlier=(2, 60)))
    ):
        shape = replace(shape, block_size=4)
        nan = float("nan")
        step = subject.step(shape, seed=number, dtype=subject.dtypes[0], garbage=nan)
        advice = "0 * NaN is NaN: gather or load no row beyond a sequence's end, or zero it"
        subject.computes(step, advice)
        if options:
            subject.computes(step, advice, **options)


def takes_views(subject: BackendSubject) -> None:
    """q, k and v may be views of one tensor, whose tokens and heads lie apart."""
    for step in each_step(subject):
        heads, kv_heads = step.q.shape[1], step.k.shape[1]
        joined = torch.cat((step.q, step.k, step.v), 1)
        q, k, v = (joined[:, :heads], joined[:, heads:-kv_heads], joined[:, -kv_heads:])
        own = replace(step, q=q, k=k, v=v)
        subject.computes(own, "read the strides of q, k and v, or make them contiguous")


def caches_of_other_dtypes(subject: BackendSubject) -> None:
    """A cache of each declared dtype holds the keys to its precision, and attention is that over
    what it holds."""
    if not subject.spec.cache_dtypes:
        raise CheckSkipped("the spec declares no `cache_dtypes`")
    for name in subject.spec.cache_dtypes:
        _check_cache(subject, name)


def _check_cache(subject: BackendSubject, name: str) -> None:
    dtype = subject.dtypes[0]
    whole = subject.step(Shape(query_lens=(11, 6), earlier=(0, 0), head_dim=64), dtype=dtype)
    backend, cache = subject.new(dtype, name), _empty(whole.cache, name)
    backend.begin(whole.layout, cache).attend(0, whole.q, whole.k, whole.v)
    slots = whole.layout.slots
    held = [_decoded(cache, which, name).flatten(0, 1)[slots] for which in ("keys", "values")]
    bound = {"int4": 0.5, "float8_e4m3fn": 0.3}.get(name, 0.06)
    for found, rows in zip(held, (whole.k, whole.v), strict=True):
        apart = (found - rows.float()).abs().max()
        demand(
            apart <= bound,
            f"a cache in {name} holds keys or values that are {apart:.3g} away; see KVCache and "
            "attention/int4.py for the form of scales",
        )
    pairs = zip(*(split(x, whole.shape.query_lens) for x in held), strict=True)
    stored = replace(whole, known=tuple(pairs))
    context = backend.begin(whole.layout, cache)
    found = context.attend(0, whole.q, None, None)
    advice = "read back what is stored, in the dtype of the queries"
    wanted = stored.expected()
    bound = 0.03
    apart = (found.double() - wanted).abs().max()
    demand(apart <= bound, f"attention over a cache in {name} is {apart:.3g} away; {advice}")


def _empty(like: KVCache, name: str) -> KVCache:
    pages = like.keys[0]
    if name in DTYPES:
        keys, values = (torch.zeros_like(pages, dtype=DTYPES[name]) for _ in range(2))
        return KVCache(keys=(keys,), values=(values,))
    made: list[tuple[Tensor, Tensor]] = []
    for _ in range(2):
        if name == "int4":
            codes, scales = int4.encode(torch.zeros_like(pages))
            made.append((codes.clone(), scales.clone()))
        else:
            scales = torch.zeros(pages.shape[:3], device=pages.device)
            made.append((torch.zeros(pages.shape, device=pages.device).to(CODED[name]), scales))
    return KVCache(
        keys=(made[0][0],),
        values=(made[1][0],),
        key_scales=(made[0][1],),
        value_scales=(made[1][1],),
    )


def _decoded(cache: KVCache, which: str, name: str) -> Tensor:
    pages: Tensor = getattr(cache, which)[0]
    scales = cache.scales(0)[0 if which == "keys" else 1]
    if scales is None:
        return pages.float()
    if name == "int4":
        return int4.decode(pages, scales, torch.float32)
    return pages.float() * scales[..., None]


def recorded_decode_reads_tensors_only(subject: BackendSubject) -> None:
    """A backend with `can_capture` computes a decode step without host lists, padded with rows of
    slot -1; the padding is finite and stores nothing."""
    backend = subject.new(subject.dtypes[0])
    if not backend.can_capture:
        raise CheckSkipped("can_capture is False: decode steps are not recorded")
    step = subject.step(Shape(query_lens=(1, 1), earlier=(9, 30)), dtype=subject.dtypes[0])
    padded, before = _padded(step), step.cache.keys[0].clone()
    found = subject.new(step.q.dtype).begin(padded.layout, step.cache)
    out = found.attend(0, padded.q, padded.k, padded.v)
    subject.compare(out[:2], step.expected(), "a recorded decode step", "read layout.lengths")
    demand(out.isfinite().all(), "the rows that pad a recorded step are not finite")
    before.flatten(0, 1)[step.layout.slots] = step.k
    demand(torch.equal(step.cache.keys[0], before), "a row with slot -1 was stored; leave it out")


def _padded(step: Step) -> Step:
    """Returns a decode step as it is recorded, with a row of padding."""
    device, layout = step.q.device, step.layout
    rows = [torch.cat((x, torch.full_like(x[:1], 9))) for x in (step.q, step.k, step.v)]
    tables = torch.cat((layout.block_tables, torch.zeros_like(layout.block_tables[:1])))
    lens = torch.tensor([*layout.context_lens, 1], dtype=torch.int32, device=device)
    slots = torch.cat((layout.slots, torch.tensor([NO_SLOT], device=device)))
    recorded = decode_layout(block_tables=tables, slots=slots, context_lens=lens, max_context=64)
    return replace(step, q=rows[0], k=rows[1], v=rows[2], layout=recorded)


def gives_the_cache_by_sequence(subject: BackendSubject) -> None:
    """A backend with `sequences` has `extend`, which stores a sequence's keys and returns all."""
    if not subject.spec.sequences:
        raise CheckSkipped("the spec does not declare `sequences`")
    for step in each_step(subject):
        context = subject.new(step.q.dtype).begin(step.layout, step.cache)
        demand(isinstance(context, SequenceAttention), "its contexts lack `sequences`, `extend`")
        assert isinstance(context, SequenceAttention)
        for number, rows in enumerate(context.sequences):
            own = step.k[rows.start : rows.end], step.v[rows.start : rows.end]
            found = context.extend(number, 0, *own)
            same = all(map(torch.equal, found, step.known[number]))
            demand(same, f"extend of sequence {number} of {step.shape} returns other keys")
        if isinstance(context, SideBySideAttention):
            _extends_each(context, step)


def _extends_each(context: SideBySideAttention, step: Step) -> None:
    """Compares `extend_each` with `extend`, for sequences that get one token."""
    single = [n for n, rows in enumerate(context.sequences) if rows.end - rows.start == 1]
    if not single:
        return
    own = [context.sequences[number].start for number in single]
    for num_kept in (None, 3):
        keys, values = context.extend_each(single, 0, step.k[own], step.v[own], num_kept)
        demand(bool(keys.isfinite().all() & values.isfinite().all()), "extend_each returns NaN")
        for row, number in enumerate(single):
            known_k, known_v = step.known[number]
            count = len(known_k) if num_kept is None else min(len(known_k), num_kept + 1)
            pairs = (keys[row, -count:], known_k[-count:]), (values[row, -count:], known_v[-count:])
            same = all(torch.equal(*pair) for pair in pairs)
            demand(same, f"extend_each of sequence {number} of {step.shape} returns other keys")


CHECKS: tuple[Check, ...] = (
    builds,
    equals_plain_attention,
    scale_is_a_factor,
    windows_are_computed_or_refused,
    softcaps_are_computed_or_refused,
    sinks_are_computed_or_refused,
    alibi_is_computed,
    media_see_both_ways_or_are_refused,
    stores_keys_and_values_in_place,
    reads_what_another_layer_stored,
    chunks_equal_the_whole,
    rows_do_not_depend_on_others,
    nothing_leaks_in,
    takes_views,
    caches_of_other_dtypes,
    recorded_decode_reads_tensors_only,
    gives_the_cache_by_sequence,
)
