"""Answers a few items of a batch and says what all of them will take."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

from mmdeploy_llm.batch.questions.gathering import Gathering, asks_of, item_of
from mmdeploy_llm.batch.settings import BatchJob
from mmdeploy_llm.batch.sources import Source
from mmdeploy_llm.data.records.ids import Selection
from mmdeploy_llm.data.records.item import Item
from mmdeploy_llm.data.records.making import bad_record
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.data.rows.rows import BadItem, Lines
from mmdeploy_llm.engine.desk.answerer import Answerer, LoadedModel
from mmdeploy_llm.engine.desk.ask import Ask
from mmdeploy_llm.system.portable import limits

from . import NUM_ITEMS
from .census import Tokens, count_tokens, kinds_of, name_of
from .draw import Chosen, Drawn, draw
from .faster import fewer_answer_tokens, fewer_image_tokens
from .result import Estimate, Range
from .steps import Machine, StepCosts, StepLog, Work, share_filled

MIN_SECONDS = 5.0  # of measuring, as long as there are items
NUM_DRAWS = 400  # samples drawn from the sample, for the range
MODEL_SHARE = 0.15  # of the seconds: how far the costs of steps may be off
UNKNOWN_SHARE = 0.5  # the same where steps could not be measured
WARM_UP_TOKENS = 4


def estimate(
    source: Source,
    selection: Selection,
    llm: LoadedModel,
    *,
    num_items: int = NUM_ITEMS,
    seed: int = 0,
) -> Estimate:
    """Answers `num_items` items of the source, drawn at random, and returns what all will take.
    Writes nothing. Raises ConfigError as `draw` does."""
    drawn = draw(source, selection, num_items, seed)
    tokens = count_tokens(source, drawn, seed, llm.count_tokens)
    names = _names(source, drawn)
    begin = time.perf_counter()
    with _logged(llm) as log:
        _warm_up(drawn, llm)
        log.steps.clear()
        begin = time.perf_counter()
        found = _answered(drawn.items, llm, drawn.more)
        spent = time.perf_counter() - begin
        steps = list(log.steps)
        costs = StepCosts.of(steps) or _without_steps(found, spent, llm)
        machine = replace(_machine(llm, found), filled=share_filled(steps))
        total = _Total(drawn.total, tokens, costs, machine)
        records = found[: len(drawn.items)]
        faster = (
            *fewer_image_tokens(drawn.items, records, total, lambda asked: _answered(asked, llm)),
            *fewer_answer_tokens(found, total),
        )
    lines = [len(record.to_json().encode("utf-8", "replace")) + 1 for record in found]
    return Estimate(
        total=drawn.total,
        kinds=kinds_of(drawn, names),
        tokens=tokens if tokens is not None and tokens.largest else None,
        records=tuple(records),
        seconds=total.range(found, MODEL_SHARE if steps else UNKNOWN_SHARE, seed),
        seconds_spent=spent,
        memory_bytes=_peak_bytes(),
        output_bytes=round(statistics.fmean(lines) * drawn.total),
        faster=tuple(sorted(faster, key=lambda way: -way.times)),
        are_steps_known=bool(steps),
        unit=source.unit,
        is_left=isinstance(source, LeftSource),
        skipped=(source.skipped.text, *source.skipped.notes),
    )


@dataclass(frozen=True, slots=True)
class _Total:
    """Adds up what all items take, from records of some. tokens: of many more items, if known."""

    num_items: int
    tokens: Tokens | None
    costs: StepCosts
    machine: Machine

    def seconds(self, records: Sequence[Record]) -> float:
        """Returns the seconds for all items if they are like these."""
        work = self.work(records)
        # Many prompts are known from their headers; what the sample drew by chance is corrected.
        if self.tokens is not None and work.prompt_tokens:
            work = replace(work, prompt_tokens=self.tokens.prompt * self.num_items)
        return self.costs.seconds(work, self.machine)

    def work(self, records: Sequence[Record]) -> Work:
        """Returns the work of all items if they are like these."""
        share = self.num_items / len(records)
        outputs = [record.num_output_tokens for record in records]
        computed = [record.num_prompt_tokens - record.num_cached_tokens for record in records]
        return Work(
            num_items=self.num_items,
            prompt_tokens=share * sum(computed),
            output_tokens=share * sum(outputs),
            num_media=share * sum(bool(record.media_tokens) for record in records),
            longest=max(outputs),
            preprocess=share * sum(record.timings.preprocess or 0 for record in records),
        )

    def range(self, records: Sequence[Record], model_share: float, seed: int) -> Range:
        """Returns the seconds with their range: of samples drawn from the sample, and of costs that
        are off by `model_share`."""
        rng = random.Random(seed)
        middle = self.seconds(records)
        found = sorted(self.seconds(rng.choices(records, k=len(records))) for _ in range(NUM_DRAWS))
        low, high = found[NUM_DRAWS // 20], found[-NUM_DRAWS // 20]
        below = ((middle - low) ** 2 + (middle * model_share) ** 2) ** 0.5
        above = ((high - middle) ** 2 + (middle * model_share) ** 2) ** 0.5
        return Range(low=max(0.0, middle - below), middle=middle, high=middle + above)


@contextmanager
def _logged(llm: LoadedModel) -> Iterator[StepLog]:
    log = StepLog()
    llm.plugins.register(log, f"estimate {id(log):x}")
    try:
        yield log
    finally:
        log.close()


def _warm_up(drawn: Drawn, llm: LoadedModel) -> None:
    """Has a short answer computed, so that what is made at first use counts in no step."""
    first = next((item for item in drawn.items if isinstance(item, Item)), None)
    if first is not None and first.wanted is not None:  # generates nothing
        _answered([first], llm)
    elif first is not None:
        params = first.params.model_copy(update={"max_tokens": WARM_UP_TOKENS, "min_tokens": 0})
        _answered([replace(first, params=params)], llm)


def _answered(
    items: Sequence[Item | BadItem], llm: Answerer, more: Sequence[Item | BadItem] = ()
) -> list[Record]:
    """Returns the records of items, in their order, and of as many others as MIN_SECONDS allow: a
    short measurement says little."""
    end = time.perf_counter() + MIN_SECONDS
    found: dict[int, Record] = {}
    asked: list[int] = []

    def asks() -> Iterator[Ask]:
        for number, item in enumerate((*items, *more)):
            if number >= len(items) and time.perf_counter() > end:
                return
            asked.append(item.line)
            if isinstance(item, BadItem):
                found[item.line] = bad_record(item)
            else:
                yield from asks_of(item)

    gathering = Gathering("")
    with closing(llm.answer_each(asks())) as answers:
        for answer in answers:
            record = gathering.add(answer)
            if record is not None:
                found[item_of(answer.ask).line] = record
    return [found[line] for line in asked]


def _machine(llm: LoadedModel, records: Sequence[Record]) -> Machine:
    """Returns what computes. The cache holds so many sequences of the mean length at once."""
    runtime = llm.runtime
    lengths = [record.num_prompt_tokens + record.num_output_tokens for record in records]
    room = llm.num_kv_blocks * runtime.block_size / max(1.0, statistics.fmean(lengths))
    return Machine(
        max_seqs=max(1, min(runtime.max_num_seqs, int(room))),
        num_threads=max(1, runtime.num_intake_threads),
    )


def _without_steps(records: Sequence[Record], spent: float, llm: LoadedModel) -> StepCosts:
    """Returns costs for engines in other processes, whose steps are not seen: all time goes with
    the tokens that were generated, shared by as many sequences as were computed at once."""
    tokens = sum(record.num_output_tokens for record in records)
    busy = sum(record.timings.total or 0.0 for record in records)
    at_once = max(1.0, busy / max(spent, 1e-9))
    machine = _machine(llm, records)
    gain = max(1.0, min(machine.max_seqs, 2 * at_once) / at_once)
    if not tokens:  # vectors: it goes with the tokens of prompts
        prompts = max(1, sum(record.num_prompt_tokens for record in records))
        return StepCosts(fixed=0.0, token=0.0, prefill=spent / prompts / gain, media=0.0)
    return StepCosts(fixed=0.0, token=spent / tokens / gain, prefill=0.0, media=0.0)


def _peak_bytes() -> int:
    return limits.peak_memory()


def _names(source: Source, drawn: Drawn) -> Mapping[int, str]:
    """Returns the names of all files by line."""
    if not drawn.sizes:
        return {}
    return {item.line: name_of(item) for item in source.read(Chosen(drawn.sizes))}


class LeftSource:
    """The items of a job that are left to do. Those of rows can be iterated once, and their number
    is known then; see Source."""

    total: int | None = None
    mean_size: float | None = None

    def __init__(self, job: BatchJob) -> None:
        self._source, self._items = job.source, job.items
        self.unit, self.about, self.skipped = self._source.unit, "", self._source.skipped
        sizes = self._source.sizes()
        lines = {item.line for item in job.items} if sizes else set()
        self._sizes = {line: size for line, size in sizes.items() if line in lines}

    def __iter__(self) -> Iterator[Item | BadItem]:
        """Yields the items."""
        return self._items

    def read(self, lines: Lines) -> Iterator[Item | BadItem]:
        """Yields the items of these lines."""
        return self._source.read(lines)

    def sizes(self) -> Mapping[int, int]:
        """Returns the bytes of the file of every item by its line."""
        return self._sizes

    def kinds(self) -> Mapping[int, str]:
        """Returns the kind of the file of every item by its line."""
        return self._source.kinds()

    def place_of(self, record: Record) -> int | None:
        """Returns the position of the record's item in the whole input."""
        return self._source.place_of(record)

    def counted(self) -> int | None:
        """Returns the number of files; None for rows."""
        return len(self._sizes) or None
