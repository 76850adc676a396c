"""Helpers: request and scheduler makers, and a loop whose executor checks every plan it is given.

The executor has a fake KV cache of cells [block, offset]. A cell holds a hash of its content and of
the cell before it, as keys and values depend on all tokens before them; the first one follows the
adapter. The next token is a hash of all cells that the block table leads to. So a wrong block, a
stale prefix, a missed or doubled token, a foreign media item or a foreign adapter gives wrong
tokens. The layers with a window have cells of their own: all that a token attends to there must be
those of its own request.
"""

import zlib
from collections import Counter
from types import SimpleNamespace

import pytest

from mmdeploy_llm.engine.runner.states import Places
from mmdeploy_llm.engine.schedule.prefix import PrefixKeys
from mmdeploy_llm.engine.schedule.scheduler import Scheduler, SchedulerConfig
from mmdeploy_llm.request import MediaInput, MediaSpan, Request
from mmdeploy_llm.values.outputs.request_output import (
    CompletionOutput,
    Completions,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.plan import RequestFailure, StepResult

IMAGE_TOKEN = 999
NUM_TOKENS = 60  # the fake model's vocabulary
POISON = -1
FIELDS = ("prompt_token_ids", "output_token_ids")
SHORT, LONG = 0, 1  # the cell before the first one, by the length of the sequence
NO_ADAPTER = ""


def make_media(key, num_tokens):
    return MediaInput(kind="image", tensors={}, num_tokens=num_tokens, key=key)


def make_request(request_id, prompt, *, media=(), max_tokens=4, eos=(), **options):
    """Builds a request. prompt: token ids or their count; media: (offset, key, num_tokens)s, with
    the rows of a span as a fourth where there is text between."""
    if isinstance(prompt, int):
        base = zlib.crc32(request_id.encode()) % 500 + 100
        prompt = [base + index for index in range(prompt)]
    params = {
        name: options.pop(name) for name in list(options) if name in SamplingParams.model_fields
    }
    spans = tuple(
        MediaSpan(offset=at, item=make_media(key, size), rows=rows[0] if rows else None)
        for at, key, size, *rows in media
    )
    prompt = list(prompt)
    for span in spans:
        for first, last in span.runs:
            prompt[first:last] = [IMAGE_TOKEN] * (last - first)
    return Request(
        request_id=request_id,
        prompt=None,
        prompt_token_ids=prompt,
        params=SamplingParams(max_tokens=max_tokens, **params),
        eos_token_ids=frozenset(eos),
        media=spans,
        **options,
    )


def make_config(**changes):
    return SchedulerConfig(
        **{
            "max_num_seqs": 4,
            "max_num_batched_tokens": 16,
            "max_model_len": 64,
            "num_blocks": 32,
            "block_size": 4,
            "encoder_cache_tokens": 16,
            **changes,
        }
    )


def content_of(request, position):
    """Returns what the fake model reads at `position`: every token sees items that stand outside of
    the prompt."""
    outside = [span.item.key for span in request.media if span.rows == ()]
    if outside:
        rest = SimpleNamespace(**{name: getattr(request, name) for name in FIELDS})
        rest.media = [span for span in request.media if span.rows != ()]
        return hash((zlib.crc32(repr(outside).encode()), content_of(rest, position)))
    for span in request.media:
        if span.offset <= position < span.end:
            return zlib.crc32(span.item.key.encode()) * 1000 + position - span.offset
    num_prompt = len(request.prompt_token_ids)
    if position < num_prompt:
        return request.prompt_token_ids[position]
    return request.output_token_ids[position - num_prompt]


def next_cell(previous, content):
    return hash((previous, content)) % 2**61


def root_of(is_long, adapter):
    """Returns the cell before the first one. adapter: its key."""
    root = LONG if is_long else SHORT
    return next_cell(root, zlib.crc32(adapter.encode())) if adapter else root


def next_token(cells):
    return hash(tuple(cells)) % NUM_TOKENS


def expected_tokens(request, num_tokens, long_after=None):
    """Returns the `num_tokens` tokens that the fake model generates when nothing interferes. All
    cells of a sequence of more than `long_after` tokens are others."""
    clone = make_request("clone", request.prompt_token_ids)
    clone.media = request.media
    adapter = request.adapter.key if request.adapter else NO_ADAPTER
    cells, is_long, root = [], False, root_of(False, adapter)
    for _ in range(num_tokens):
        if not is_long and long_after is not None and clone.num_tokens > long_after:
            cells, is_long, root = [], True, root_of(True, adapter)
        for position in range(len(cells), clone.num_tokens):
            cells.append(next_cell(cells[-1] if cells else root, content_of(clone, position)))
        clone.output_token_ids.append(next_token(cells))
    return clone.output_token_ids


def expected_states(request, long_after=None):
    """Returns the cells of the tokens that a request for a vector needs."""
    num_tokens, cells = request.num_tokens, []
    is_long = long_after is not None and num_tokens > long_after
    root = root_of(is_long, request.adapter.key if request.adapter else NO_ADAPTER)
    for position in range(num_tokens):
        cells.append(next_cell(cells[-1] if cells else root, content_of(request, position)))
    return cells[request.wanted.first_needed(num_tokens) :]


class Slot:
    """The executor's state of one request."""

    def __init__(self, new, long_after=None):
        is_long = long_after is not None and len(new.token_ids) > long_after
        self.root, self.adapter = root_of(is_long, new.adapter), new.adapter
        self.most_tokens = long_after if long_after is not None and not is_long else 10**9
        self.view = SimpleNamespace(
            prompt_token_ids=list(new.token_ids), output_token_ids=[], media=new.media
        )
        self.params = new.params
        self.prompt_len = new.prompt_len
        self.table, self.window_table = [], []
        self.wanted, self.states = new.wanted, {}  # position -> cell, since it has started
        self.num_computed = None  # unknown until the first item: the prefix cache decides

    @property
    def num_tokens(self):
        return len(self.view.prompt_token_ids) + len(self.view.output_token_ids)


class CheckingExecutor:
    """Runs plans on fake caches; raises AssertionError for a plan that breaks the contract."""

    def __init__(self, config):
        self.config = config
        self.slots = {}
        self.cells, self.window_cells = {}, {}
        self.encoded = {}  # key -> number of tokens
        self.num_encodes = Counter()
        self.adapters = {}  # key -> ref, of those in memory
        self.states = {0: 0}  # row -> the cell after which its state is; 0: before the first
        self.places = Places(config.num_state_rows) if config.num_state_rows else None
        self.matrices = {0: 0}  # place -> the cell after which its matrix is
        self.num_computed_tokens = self.num_drafts = self.num_accepted = 0
        self.may_miss = False  # after a step that raised, drop and forget may name unknown ids

    def run(self, plan, failing=(), breaks=None):
        """Runs a plan. Requests in `failing` fail; breaks: the step raises "before" or "after"."""
        if breaks is not None:
            self.may_miss = True
        if breaks == "before":
            raise RuntimeError("broken step")
        self._drop_and_forget(plan)
        self._load_adapters(plan)
        self._start(plan)
        self._encode(plan)
        self._check_items(plan)
        self._check_rows(plan)
        for item in plan.scheduled:
            slot = self.slots[item.request_id]
            if slot.num_computed is None:
                slot.num_computed = item.start
            self._poison_new_blocks(slot, item)
        self._check_tables(plan)
        if breaks == "after":
            raise RuntimeError("broken step")
        result = StepResult(
            step_id=plan.step_id, sampled={}, prompt_logprobs={}, errors={}, later={}, vectors={}
        )
        for item in plan.scheduled:
            if item.request_id in failing:
                result.errors[item.request_id] = RequestFailure(code=500, message="injected")
            else:
                self._compute(item, result)
        self._check_windows(item for item in plan.scheduled if item.request_id not in failing)
        self.may_miss = False
        return result

    def _drop_and_forget(self, plan):
        assert len(set(plan.drop)) == len(plan.drop)
        assert len(set(plan.forget)) == len(plan.forget)
        for request_id in plan.drop:
            assert request_id in self.slots or self.may_miss, f"drop of unknown {request_id}"
            self.slots.pop(request_id, None)
        for key in plan.forget:
            assert key in self.encoded or self.may_miss, f"forget of unknown {key}"
            self.encoded.pop(key, None)

    def _load_adapters(self, plan):
        for key in plan.unload:
            assert key in self.adapters or self.may_miss, f"unload of unknown {key}"
            self.adapters.pop(key, None)
        for ref in plan.load:
            assert ref.key not in self.adapters, f"{ref.key} is read twice"
            self.adapters[ref.key] = ref
        assert len(self.adapters) <= self.config.max_adapters
        if self.config.adapter_bytes is not None:
            num_bytes = sum(ref.num_bytes for ref in self.adapters.values())
            assert num_bytes <= self.config.adapter_bytes

    def _start(self, plan):
        for new in plan.new:
            assert new.request_id not in self.slots, f"{new.request_id} starts twice"
            self.slots[new.request_id] = Slot(new, self.config.long_after)
        assert {new.request_id for new in plan.new} <= {item.request_id for item in plan.scheduled}
        assert len(self.slots) <= self.config.max_num_seqs

    def _encode(self, plan):
        sizes = [item.num_tokens for item in plan.encode]
        if self.config.enable_chunked_prefill and len(sizes) > 1:
            assert sum(sizes) <= self.config.max_num_batched_tokens
        for item in plan.encode:
            assert item.key not in self.encoded, f"{item.key} encoded though it is cached"
            self.encoded[item.key] = item.num_tokens
            self.num_encodes[item.key] += 1
        assert sum(self.encoded.values()) <= self.config.encoder_cache_tokens

    def _check_items(self, plan):
        ids = [item.request_id for item in plan.scheduled]
        assert len(set(ids)) == len(ids)
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        is_decode = [item.samples and item.num_tokens == 1 for item in plan.scheduled]
        assert is_decode == sorted(is_decode, reverse=True), "decode items are not first"
        for item in plan.scheduled:
            slot = self.slots[item.request_id]
            end = item.start + item.num_tokens
            assert not slot.adapter or slot.adapter in self.adapters, "its adapter is not in memory"
            assert item.num_tokens > 0
            assert slot.num_computed in (None, item.start), "tokens skipped or repeated"
            assert end - len(item.drafts) <= slot.num_tokens
            assert end <= slot.most_tokens, "computed as a short sequence"
            is_end = end - len(item.drafts) == slot.num_tokens
            assert item.samples == (is_end and slot.wanted is None)
            assert item.samples or not item.drafts
            assert is_end or self.config.enable_chunked_prefill
            for span in slot.view.media:
                if span.offset < end and item.start < span.end:
                    assert span.item.key in self.encoded, "media computed but not encoded"
                    if self.config.atomic_media:
                        for first, last in span.runs:
                            if first < end and item.start < last:
                                is_hit = slot.num_computed is None
                                assert item.start <= first or is_hit, "a run in two steps"
                                assert last <= end

    def _check_rows(self, plan):
        rows = [item.state_rows for item in plan.scheduled]
        if not self.config.num_state_rows:
            assert set(rows) <= {None}
            return
        writes = [write for _, write in rows]
        assert len(set(writes)) == len(writes), "two requests write one row"
        assert not {read for read, _ in rows} & set(writes), "a row both read and written"
        assert all(2 <= row < self.config.num_state_rows for row in writes)

    def _poison_new_blocks(self, slot, item):
        size = self.config.block_size
        for block in item.new_block_ids:
            if len(slot.table) * size >= slot.num_computed:  # not from the prefix cache
                self.cells.update({(block, offset): POISON for offset in range(size)})
            slot.table.append(block)
        for block in item.new_window_ids:
            if len(slot.window_table) * size >= slot.num_computed:
                self.window_cells.update({(block, offset): POISON for offset in range(size)})
            slot.window_table.append(block)

    def _first_seen(self, slot, item):
        """Returns the first token of the step, or window - 1 after that of the atomic run that it
        goes on with: the run's tokens attend to all of it."""
        if not self.config.atomic_media:
            return item.start
        runs = [run for span in slot.view.media for run in span.runs]
        begins = [first for first, last in runs if first < item.start < last]
        return min([item.start, *(first + self.config.window - 1 for first in begins)])

    def _check_windows(self, items):
        """Runs after the step, so that no request wrote what another one attends to."""
        window, size = self.config.window, self.config.block_size
        for item in items:
            slot, end = self.slots[item.request_id], item.start + item.num_tokens
            if window is None:
                assert not slot.window_table
                continue
            for position in range(max(0, self._first_seen(slot, item) + 1 - window), end):
                place = slot.window_table[position // size], position % size
                assert self.window_cells[place] == self._cell(slot, position), "foreign window"

    def _check_tables(self, plan):
        size = self.config.block_size
        places = {}
        for slot in self.slots.values():
            for index, block in enumerate(slot.table):
                assert 0 <= block < self.config.num_blocks
                places.setdefault(block, []).append((index, slot))
        for block, users in places.items():
            if len(users) > 1:
                assert len({index for index, _ in users}) == 1, f"block {block} at two places"
                for index, slot in users:
                    assert (index + 1) * size <= slot.num_computed, f"block {block} is not full"
        for item in plan.scheduled:
            table = self.slots[item.request_id].table
            assert len(table) * size >= item.start + item.num_tokens, "tokens without a block"

    def _compute(self, item, result):
        slot, size = self.slots[item.request_id], self.config.block_size
        end = item.start + item.num_tokens
        known = list(slot.view.output_token_ids)
        slot.view.output_token_ids += item.drafts
        for position in range(item.start, end):
            previous = self._cell(slot, position - 1) if position else slot.root
            place = (slot.table[position // size], position % size)
            self.cells[place] = next_cell(previous, content_of(slot.view, position))
            slot.states[position] = self.cells[place]
            if self.config.window is not None:
                place = slot.window_table[position // size], position % size
                self.window_cells[place] = self._cell(slot, position)
        slot.view.output_token_ids = known
        if item.state_rows is not None:
            read, write = item.state_rows
            before = self._cell(slot, item.start - 1) if item.start else 0
            assert self.states[read] == before, "the state of other tokens"
            self.states[write] = self._cell(slot, end - 1)
            earlier = self._cell(slot, item.start - 2) if item.start > 1 else 0
            source, target = self.places.move(read, write, item.num_tokens)
            assert self.matrices[source] in (before, earlier), "the matrix of other tokens"
            self.matrices[target] = before if source == target else self._cell(slot, end - 1)
        self.num_computed_tokens += item.num_tokens
        slot.num_computed = end - len(item.drafts)
        if slot.params.prompt_logprobs is not None and item.start < slot.prompt_len:
            result.prompt_logprobs[item.request_id] = tuple(
                {position: Logprob(logprob=0.0, rank=1)}
                for position in range(item.start, min(end, slot.prompt_len))
            )
        if slot.wanted is not None:
            assert not item.samples, "a vector is no token"
            if end == slot.prompt_len:
                needed = range(slot.wanted.first_needed(end), end)
                result.vectors[item.request_id] = [slot.states[each] for each in needed]
        if item.samples:
            cells = [self._cell(slot, position) for position in range(end)]
            assert POISON not in cells, "read of a token that was never computed"
            self._sample(item, slot, cells, result)

    def _sample(self, item, slot, cells, result):
        """Samples after the last known token and after each draft that is right."""
        tokens, num_known = slot.view.output_token_ids, item.num_tokens - len(item.drafts)
        sampled = [next_token(cells[: item.start + num_known])]
        for count, draft in enumerate(item.drafts, 1):
            if sampled[-1] != draft:
                break
            sampled.append(next_token(cells[: item.start + num_known + count]))
        tokens += sampled
        num_accepted = len(sampled) - 1
        if item.state_rows is not None and num_accepted < len(item.drafts):
            slot.num_computed = item.start
        else:
            slot.num_computed += num_accepted
        self.num_drafts += len(item.drafts)
        self.num_accepted += num_accepted
        result.sampled[item.request_id] = sampled[0]
        result.later[item.request_id] = tuple(sampled[1:])

    def _cell(self, slot, position):
        size = self.config.block_size
        return self.cells[slot.table[position // size], position % size]


class Loop:
    """Scheduler, checking executor and a delivery that ends requests when `stops` says so."""

    def __init__(self, config, stops=lambda request, tokens: False):
        self.config = config
        self.seconds = 0.0  # on the scheduler's clock
        self.cost = lambda plan: 1.0  # plan -> seconds of its step
        self.scheduler = Scheduler(config, lambda: self.seconds)
        self.executor = CheckingExecutor(config)
        self.stops = stops
        self.now = 1000.0
        self.plans = []
        self.tokens = {}  # request id -> delivered tokens
        self.prompt_logprobs = {}  # request id -> delivered positions
        self.ended = {}  # request id -> the last update
        self.vectors = {}  # request id -> the states of its tokens
        self.reasons = {}  # request id -> finish reason

    def add(self, *requests):
        for request in requests:
            self.scheduler.add(request)
        return requests[0]

    def step(self, aborts=(), failing=(), breaks=None):
        """Does one step as the engine does; returns its plan."""
        self.now += 1.0
        updates = self.scheduler.abort(aborts) + self.scheduler.expire(self.now)
        plan = self.scheduler.plan(self.now)
        self.plans.append(plan)
        self.seconds += self.cost(plan)
        self.scheduler.check_integrity()
        try:
            result = self.executor.run(plan, failing, breaks)
        except RuntimeError as error:
            updates += self.scheduler.fail(plan, RequestFailure(code=500, message=str(error)))
        else:
            updates += self.scheduler.commit(plan, result, self.now)
        self.scheduler.check_integrity()
        assert plan.scheduled or updates or not self.scheduler.has_work, "a step without progress"
        self.scheduler.release(self._deliver(updates))
        self.scheduler.check_integrity()
        return plan

    def run(self, max_steps=500):
        """Steps until nothing is left to do."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"not idle after {max_steps} steps")

    def _deliver(self, updates):
        outputs = []
        for update in updates:
            request = update.request
            assert request.request_id not in self.ended, "an update after the end"
            tokens = self.tokens.setdefault(request.request_id, [])
            is_stopped = False
            for token in update.new_token_ids:
                tokens.append(token)
                is_stopped = self.stops(request, tokens)
                if is_stopped:
                    break
            positions = self.prompt_logprobs.setdefault(request.request_id, [])
            positions.extend(next(iter(entry)) for entry in update.prompt_logprobs)
            reason = update.finish_reason
            if is_stopped and (reason is None or len(tokens) < len(request.output_token_ids)):
                reason = "stop"
            if update.vector is not None:
                self.vectors[request.request_id] = update.vector
            if reason is not None:
                self.ended[request.request_id] = update
                self.reasons[request.request_id] = reason
            outputs.append(
                RequestOutput(
                    request_id=request.request_id,
                    prompt=None,
                    outputs=Completions([CompletionOutput(finish_reason=reason)]),
                    finished=reason is not None,
                    metrics=RequestMetrics(arrival_time=request.arrival_time),
                )
            )
        return outputs


def prefix_key(prompt, index, block_size=4):
    """Returns the key of a full block of a prompt."""
    return PrefixKeys(make_request("keys", prompt), block_size).key(index)


@pytest.fixture
def kit():
    """The helpers of this module, because test modules cannot import each other."""
    return SimpleNamespace(
        Loop=Loop,
        expected_states=expected_states,
        expected_tokens=expected_tokens,
        keys=prefix_key,
        make_config=make_config,
        make_media=make_media,
        make_request=make_request,
    )
