"""Kernels that choose the next token of every row of logits: rules, penalties, and the draw.

    survey   a program for each tile of each row: its largest logit after the rules; in rows that
             are drawn, up to 128 of its largest logits are stored as candidates
    weigh    the probability mass of each tile, for rows drawn from the whole vocabulary
    choose   a program for each row: the token

Which tokens are kept and which is drawn is defined in engine/runner/sampling/draw.py, with
z = (logit - largest) / temperature; cutoffs are found by bisection among the values of z, and one
uniform by seed and position picks a token by inverse CDF, in the order of the vocabulary. Here the
mass of a token is a multiple of 2**-42 of the largest one's, so that sums are exact in any order: a
row gets the same token in every batch. A cutoff is searched for among the candidates first, and,
where it may lie below all of them, in the whole row, which takes several passes.

Falling keys are integers whose ascending order is the descending order of the floats. Shapes: N
rows, V vocabulary, S tiles of a row, C candidates of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Columns of Rules.ints and Rules.reals; see choose.py.
SEED = tl.constexpr(0)  # hashed, as uniform.first_states returns it
NUM_OUTPUTS = tl.constexpr(1)
MIN_OUTPUTS = tl.constexpr(2)  # outputs before stop tokens are allowed
NUM_EDITS = tl.constexpr(3)  # without the edits that ban stop tokens, which come last
NUM_ALL_EDITS = tl.constexpr(4)
TOP_K = tl.constexpr(5)
IS_RANDOM = tl.constexpr(6)  # the token is drawn; otherwise the largest logit wins
HAS_COUNTS = tl.constexpr(7)
NUM_INTS = tl.constexpr(8)
TEMPERATURE = tl.constexpr(0)
LEAST = tl.constexpr(1)  # log(min_p)
TOP_P = tl.constexpr(2)
REPETITION = tl.constexpr(3)
FREQUENCY = tl.constexpr(4)
PRESENCE = tl.constexpr(5)
NUM_REALS = tl.constexpr(8)

MAX_COUNT = tl.constexpr(2**15 - 1)

UNITS = tl.constexpr(2.0**42)  # mass of the largest token; a vocabulary has less than 2**21
INFINITE = tl.constexpr(0x7F800000)  # the key of z = -inf
FINITE = tl.constexpr(0x7F7FFFFF)
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
MULTIPLIER_0 = tl.constexpr(0xBF58476D1CE4E5B9)
MULTIPLIER_1 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _adjusted(raw, columns, row, vocab_size):
    """Applies bias, bans and penalties as engine/runner/sampling/adjust.py does. row: pointers to
    the row's logits, ints, reals, edit ids, edit values, counts."""
    _, ints, reals, edit_ids, edit_values, counts = row
    x = raw
    is_held = tl.load(ints + NUM_OUTPUTS) < tl.load(ints + MIN_OUTPUTS)
    num_edits = tl.load(ints + tl.where(is_held, NUM_ALL_EDITS, NUM_EDITS)).to(tl.int32)
    for place in range(0, num_edits):
        is_named = columns == tl.load(edit_ids + place)
        x = tl.where(is_named, x + tl.load(edit_values + place), x)
    if tl.load(ints + HAS_COUNTS) != 0:
        seen = tl.load(counts + columns, mask=columns < vocab_size, other=0).to(tl.float32)
        repetition = tl.load(reals + REPETITION).to(tl.float32)
        penalized = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
        penalized -= tl.load(reals + FREQUENCY).to(tl.float32) * tl.maximum(seen - 1.0, 0.0)
        penalized -= tl.where(seen > 1, tl.load(reals + PRESENCE).to(tl.float32), 0.0)
        x = tl.where(seen > 0, penalized, x)
    return x


@triton.jit
def _row(logits, stride, slots, rules, edits, has_table, place, vocab_size):
    """Returns the row's pointers for _adjusted. rules: pointers as in Rules. edits: how many a slot
    can hold. has_table: whether there are counts."""
    ints, reals, edit_ids, edit_values, counts = rules
    slot = tl.load(slots + place).to(tl.int64)
    return (
        logits + place.to(tl.int64) * stride,
        ints + slot * NUM_INTS,
        reals + slot * NUM_REALS,
        edit_ids + slot * edits,
        edit_values + slot * edits,
        counts + slot * vocab_size * has_table,
    )


@triton.jit
def _falling(x):
    """Returns the falling keys of floats."""
    bits = x.to(tl.int32, bitcast=True)
    return ~(bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _threshold(keys, is_in, C: tl.constexpr):
    """Finds a key up to which at most C of the keys lie: C / 2 to C of them, or fewer where many
    are equal."""
    low = tl.min(tl.where(is_in, keys, 0x7FFFFFFF)).to(tl.int64) - 1  # always at most C up to low
    high = tl.max(tl.where(is_in, keys, -0x80000000)).to(tl.int64)
    count = tl.sum(is_in.to(tl.int32))
    if count <= C:
        low = high
    while (high - low > 1) & ((count > C) | (count < C // 2)):
        middle = low + (high - low) // 2
        is_below = is_in & (keys <= middle.to(tl.int32))
        count = tl.sum(is_below.to(tl.int32))
        if count > C:
            high = tl.max(tl.where(is_below, keys, -0x80000000)).to(tl.int64)
        else:
            low = tl.min(tl.where(is_in & (is_below == 0), keys, 0x7FFFFFFF)).to(tl.int64) - 1
    return low


@triton.jit(do_not_specialize=["edits", "has_table", "num_tiles"])
def survey(
    logits_ptr, stride, slots_ptr, rules, edits, has_table, vocab_size, num_tiles,
    raw_peaks_ptr, peaks_ptr, places_ptr, limits_ptr, num_kept_ptr, kept_ptr, kept_ids_ptr,
    BLOCK: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row = _row(logits_ptr, stride, slots_ptr, rules, edits, has_table, tl.program_id(0), vocab_size)
    tile = tl.program_id(0).to(tl.int64) * num_tiles + tl.program_id(1)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = columns < vocab_size
    raw = tl.load(row[0] + columns, mask=is_in, other=float("-inf")).to(tl.float32)
    tl.store(raw_peaks_ptr + tile, tl.max(tl.where(raw == raw, raw, float("inf"))))
    x = _adjusted(raw, columns, row, vocab_size)
    peak = tl.max(x)
    tl.store(peaks_ptr + tile, peak)
    tl.store(places_ptr + tile, tl.min(tl.where(x == peak, columns, vocab_size)))
    if tl.load(row[1] + IS_RANDOM) != 0:
        keys = _falling(x)
        is_kept = is_in & (keys <= _threshold(keys, is_in, C))
        order = tl.cumsum(is_kept.to(tl.int32), 0) - 1
        tl.store(kept_ptr + tile * C + order, x, mask=is_kept)
        tl.store(kept_ids_ptr + tile * C + order, columns, mask=is_kept)
        tl.store(num_kept_ptr + tile, tl.sum(is_kept.to(tl.int32)))
        tl.store(limits_ptr + tile, tl.max(tl.where(is_kept, float("-inf"), x)))


@triton.jit
def _key(x, peak, temperature):
    """Returns the keys of z <= 0: 0 for the peak, INFINITE for a banned token."""
    z = tl.div_rn(x - peak, tl.zeros_like(x) + temperature)
    return tl.abs(z).to(tl.int32, bitcast=True)


@triton.jit
def _mass(keys):
    """Returns the mass of keys: 0 for NaN too, which occurs only in rows that fail."""
    z = -tl.minimum(keys, INFINITE).to(tl.float32, bitcast=True)
    return (tl.exp(z) * UNITS).to(tl.int64)


@triton.jit(do_not_specialize=["edits", "has_table", "num_tiles"])
def weigh(
    logits_ptr, stride, slots_ptr, rules, edits, has_table, vocab_size, num_tiles, peaks_ptr,
    masses_ptr, BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    row = _row(logits_ptr, stride, slots_ptr, rules, edits, has_table, tl.program_id(0), vocab_size)
    if tl.load(row[1] + IS_RANDOM) != 0:
        first = tl.program_id(0).to(tl.int64) * num_tiles
        tiles = tl.arange(0, TILES)
        peaks = tl.load(peaks_ptr + first + tiles, mask=tiles < num_tiles, other=float("-inf"))
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        raw = tl.load(row[0] + columns, mask=columns < vocab_size, other=float("-inf"))
        x = _adjusted(raw.to(tl.float32), columns, row, vocab_size)
        keys = _key(x, tl.max(peaks), tl.load(row[2] + TEMPERATURE).to(tl.float32))
        tl.store(masses_ptr + first + tl.program_id(1), tl.sum(_mass(keys)))


@triton.jit
def _keys(
    start, is_few, row, few, vocab_size, peak, temperature, C: tl.constexpr, TILE: tl.constexpr
):
    """Returns the keys of the next TILE candidates of the row (is_few), or of its next TILE tokens.
    few: pointers to the candidates and to their number in each tile, and the capacity of all
    tiles."""
    kept, num_kept, capacity = few
    places = start + tl.arange(0, TILE)
    if is_few:
        num = tl.load(num_kept + places // C, mask=places < capacity, other=0)
        x = tl.load(kept + places, mask=places % C < num, other=float("-inf"))
    else:
        raw = tl.load(row[0] + places, mask=places < vocab_size, other=float("-inf"))
        x = _adjusted(raw.to(tl.float32), places, row, vocab_size)
    return _key(x, peak, temperature)


@triton.jit
def _share(keys, cut, BY_MASS: tl.constexpr):
    """Returns how many keys are at most the cut, or their mass."""
    if BY_MASS:
        found = tl.sum(tl.where(keys <= cut, _mass(keys), 0))
    else:
        found = tl.sum((keys <= cut).to(tl.int64))
    return found


@triton.jit
def _search(
    goal, is_few, row, few, vocab_size, peak, temperature,
    BY_MASS: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Finds the smallest key up to which there are `goal` keys, or keys of that mass; INFINITE when
    all keys do not reach it."""
    end = tl.where(is_few, few[2], vocab_size)
    low = tl.zeros((), dtype=tl.int32)
    high = low + INFINITE
    while low < high:
        middle = low + (high - low) // 2
        share = tl.zeros((), dtype=tl.int64)
        below = tl.zeros((), dtype=tl.int32)
        above = high
        for start in range(0, end, TILE):
            keys = _keys(start, is_few, row, few, vocab_size, peak, temperature, C, TILE)
            is_below = keys <= middle
            share += _share(keys, middle, BY_MASS)
            below = tl.maximum(below, tl.max(tl.where(is_below, keys, 0)))
            above = tl.minimum(above, tl.min(tl.where(is_below, INFINITE, keys)))
        if share >= goal:
            high = below
        else:
            low = above
    return low


@triton.jit
def _cut_at(
    goal, limit, row, few, vocab_size, peak, temperature,
    BY_MASS: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Searches as _search does, among the candidates if the result is below `limit`: they hold all
    keys below it."""
    cut = tl.zeros((), dtype=tl.int32)
    is_few = tl.full((), 1, dtype=tl.int1)
    is_open = tl.full((), 1, dtype=tl.int1)
    while is_open:
        cut = _search(goal, is_few, row, few, vocab_size, peak, temperature, BY_MASS, C, TILE)
        is_open = is_few & (cut >= limit) & (limit < INFINITE)
        is_few = tl.full((), 0, dtype=tl.int1)
    return cut


@triton.jit
def _mass_up_to(
    cut, is_few, row, few, vocab_size, peak, temperature, C: tl.constexpr, TILE: tl.constexpr
):
    mass = tl.zeros((), dtype=tl.int64)
    for start in range(0, tl.where(is_few, few[2], vocab_size), TILE):
        keys = _keys(start, is_few, row, few, vocab_size, peak, temperature, C, TILE)
        mass += _share(keys, cut, True)
    return mass


@triton.jit
def _find(
    target, begin, before, cut, is_few, row, few, vocab_size, peak, temperature,
    C: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Finds the first index, from `begin` on, at which the cumulative mass exceeds the target.
    before: the cumulative mass of the indices before `begin`."""
    found = tl.full((), -1, dtype=tl.int32)
    for start in range(begin, tl.where(is_few, few[2], vocab_size), TILE):
        if found < 0:
            keys = _keys(start, is_few, row, few, vocab_size, peak, temperature, C, TILE)
            masses = tl.where(keys <= cut, _mass(keys), 0)
            sums = before + tl.cumsum(masses, 0)
            before += tl.sum(masses)
            if before > target:
                found = start + tl.sum((sums <= target).to(tl.int32))
    return found


@triton.jit
def _mix(value):
    value = (value ^ (value >> 30)) * MULTIPLIER_0
    value = (value ^ (value >> 27)) * MULTIPLIER_1
    return value ^ (value >> 31)


@triton.jit
def _target(ints, mass):
    """Returns floor(uniform * mass), with the uniform of engine/runner/sampling/draw.py."""
    seed = tl.load(ints + SEED).to(tl.uint64, bitcast=True)
    position = tl.load(ints + NUM_OUTPUTS).to(tl.uint64, bitcast=True)
    # uniform = bits / 2^64, with 53 random bits; umulhi gives floor(bits * mass / 2^64).
    bits = (_mix(seed + (position + 1) * GOLDEN) >> 11) << 11
    return tl.umulhi(bits, mass.to(tl.uint64, bitcast=True)).to(tl.int64, bitcast=True)


@triton.jit
def _draw(
    row, few, few_ids, limit, masses, vocab_size, peak,
    BLOCK: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Draws a token id. masses: [S], of the tiles, for rows without top_k and min_p. Returns -1 if
    these masses, from another launch, exceed those summed here: only possible if exp rounds
    differently in the two and the uniform is close to 1."""
    temperature = tl.load(row[2] + TEMPERATURE).to(tl.float32)
    least = tl.load(row[2] + LEAST).to(tl.float32)
    top_p = tl.load(row[2] + TOP_P)
    top_k = tl.load(row[1] + TOP_K)
    limit = _key(limit, peak, temperature)
    cut = tl.minimum(tl.abs(least).to(tl.int32, bitcast=True), FINITE)
    is_whole = (top_k == 0) & (cut == FINITE)  # no rule before top_p drops tokens
    if top_k > 0:
        found = _cut_at(top_k, limit, row, few, vocab_size, peak, temperature, False, C, TILE)
        cut = tl.minimum(cut, found)
    mass = tl.sum(masses)
    begin = tl.zeros((), dtype=tl.int32)
    before = tl.zeros((), dtype=tl.int64)
    if is_whole == 0:
        mass = _mass_up_to(cut, cut < limit, row, few, vocab_size, peak, temperature, C, TILE)
    if top_p < 1:
        goal = tl.maximum(tl.ceil(top_p * mass.to(tl.float64)).to(tl.int64), 1)
        cut = _cut_at(goal, limit, row, few, vocab_size, peak, temperature, True, C, TILE)
        mass = _mass_up_to(cut, cut < limit, row, few, vocab_size, peak, temperature, C, TILE)
    target = _target(row[1], mass)
    is_few = cut < limit
    if is_whole & (top_p >= 1):  # the tiles' masses select the tile
        sums = tl.cumsum(masses, 0)
        begin = tl.sum((sums <= target).to(tl.int32)) * BLOCK
        before = tl.sum(tl.where(sums <= target, masses, 0))
        is_few = tl.full((), 0, dtype=tl.int1)
    place = _find(
        target, begin, before, cut, is_few, row, few, vocab_size, peak, temperature, C, TILE
    )
    if is_few:
        place = tl.load(few_ids + place, mask=place >= 0, other=-1)
    return place


@triton.jit
def _advance(ints, counts, token):
    """Appends the token to the state of the slot."""
    tl.store(ints + NUM_OUTPUTS, tl.load(ints + NUM_OUTPUTS) + 1)
    if tl.load(ints + HAS_COUNTS) != 0:
        seen = tl.load(counts + token).to(tl.int32)
        tl.store(counts + token, tl.minimum(tl.maximum(seen, 1) + 1, MAX_COUNT).to(tl.int16))


@triton.jit(do_not_specialize=["edits", "has_table", "num_tiles", "num_rows"])
def choose(
    logits_ptr, stride, slots_ptr, rules, edits, has_table, vocab_size, num_tiles, num_rows,
    forced_ptr, raw_peaks_ptr, peaks_ptr, places_ptr, limits_ptr, num_kept_ptr, kept_ptr,
    kept_ids_ptr, masses_ptr, out_ptr,
    HAS_FORCED: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr, TILES: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    row = _row(logits_ptr, stride, slots_ptr, rules, edits, has_table, place, vocab_size)
    first = place.to(tl.int64) * num_tiles
    tiles = tl.arange(0, TILES)
    is_tile = tiles < num_tiles
    least = float("-inf")
    raw_peak = tl.max(tl.load(raw_peaks_ptr + first + tiles, mask=is_tile, other=least))
    peaks = tl.load(peaks_ptr + first + tiles, mask=is_tile, other=least)
    peak = tl.max(peaks)
    places = tl.load(places_ptr + first + tiles, mask=is_tile, other=0)
    token = tl.min(tl.where(is_tile & (peaks == peak), places, vocab_size))
    status = tl.where(peak > least, 0, 2)
    forced = tl.full((), -1, dtype=tl.int64)
    if HAS_FORCED:
        forced = tl.load(forced_ptr + place)
        status = tl.where(forced < 0, status, 0)
    status = tl.where((raw_peak > least) & (raw_peak < float("inf")), status, 1)
    if (tl.load(row[1] + IS_RANDOM) != 0) & (status == 0) & (forced < 0):
        limit = tl.max(tl.load(limits_ptr + first + tiles, mask=is_tile, other=least))
        masses = tl.load(masses_ptr + first + tiles, mask=is_tile, other=0)
        few = (kept_ptr + first * C, num_kept_ptr + first, num_tiles * C)
        ids = kept_ids_ptr + first * C
        drawn = _draw(row, few, ids, limit, masses, vocab_size, peak, BLOCK, C, TILE)
        token = tl.where(drawn < 0, token, drawn)
    token = tl.where(forced < 0, token.to(tl.int64), forced)
    token = tl.where(status == 0, token, 0)
    tl.store(out_ptr + place, token)
    tl.store(out_ptr + num_rows + place, status.to(tl.int64))
    tl.debug_barrier()  # all threads have read the slot
    if status == 0:
        _advance(row[1], row[5], token)
