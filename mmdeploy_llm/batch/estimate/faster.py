"""Finds what would take less time, and how much less: measured where that is cheap."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from mmdeploy_llm.data.records.item import Item
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.data.rows.rows import BadItem

from .steps import Machine, StepCosts, Work

IMAGE_TOKENS = (1024, 256, 64)  # budgets to try, at most MAX_TRIED of them
MAX_TRIED = 2
NUM_TRIED = 6  # items for which a budget is tried
WORTH = 1.1  # ways that are not this many times as fast are not named
SHORTER = 0.9  # share of the answers that a smaller max_tokens leaves whole


class Adds(Protocol):
    """Adds up what all items take, from records of some."""

    @property
    def costs(self) -> StepCosts: ...

    @property
    def machine(self) -> Machine: ...

    def work(self, records: Sequence[Record]) -> Work:
        """Returns the work of all items if they are like these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faster:
    """A way to take less time. option: as the program has it. times: how many times as fast.
    effect: what else it does, "" for nothing. is_measured: whether it was tried."""

    option: str
    times: float
    effect: str = ""
    is_measured: bool = False


def fewer_image_tokens(
    items: Sequence[Item | BadItem],
    records: Sequence[Record],
    total: Adds,
    answer: Callable[[Sequence[Item | BadItem]], list[Record]],
) -> list[Faster]:
    """Answers some of the pictures again with fewer tokens, and compares what the prompts cost with
    what they cost before. The lengths of answers, which differ by chance, are left as they were."""
    pairs = [
        (item, record)
        for item, record in zip(items, records, strict=True)
        if isinstance(item, Item) and record.is_ok and record.num_image_tokens
    ]
    if not pairs:
        return []
    typical = statistics.median(record.num_image_tokens for _, record in pairs)
    tried = [budget for budget in IMAGE_TOKENS if budget * WORTH < typical][-MAX_TRIED:]
    pairs.sort(key=lambda pair: pair[1].num_image_tokens)
    some = pairs[len(pairs) // (2 * NUM_TRIED) :: max(1, len(pairs) // NUM_TRIED)][:NUM_TRIED]
    found = []
    for budget in tried:
        again = answer([_with_budget(item, budget) for item, _ in some])
        if all(record.is_ok for record in again):
            times = _times([record for _, record in some], again, records, total)
            found.append(Faster(option=f"--image-tokens {budget}", times=times, is_measured=True))
    return [way for way in found if way.times >= WORTH]


def _with_budget(item: Item, budget: int) -> Item:
    kwargs = {**(item.prompt.processor_kwargs or {}), "image_tokens": budget}
    prompt = replace(item.prompt, processor_kwargs=kwargs)
    params = item.params.model_copy(update={"max_tokens": 1, "min_tokens": 0})
    return replace(item, prompt=prompt, params=params)


def _times(
    before: Sequence[Record], after: Sequence[Record], records: Sequence[Record], total: Adds
) -> float:
    """Returns how many times as fast all items are, when tokens of prompts and media, and seconds
    of preparation, change as those of some items did."""
    media = _ratio([r.num_media_tokens for r in after], [r.num_media_tokens for r in before])
    tokens = _ratio([r.num_prompt_tokens for r in after], [r.num_prompt_tokens for r in before])
    seconds = _ratio(
        [r.timings.preprocess or 0 for r in after], [r.timings.preprocess or 0 for r in before]
    )
    now = total.work(records)
    less = replace(
        now,
        prompt_tokens=now.prompt_tokens * tokens,
        num_media=now.num_media * media,  # encoding an image goes with its tokens
        preprocess=now.preprocess * min(1.0, seconds),
    )
    cost = total.costs.seconds
    return cost(now, total.machine) / max(1e-9, cost(less, total.machine))


def _ratio(after: Sequence[float], before: Sequence[float]) -> float:
    return sum(after) / max(1e-9, sum(before))


def fewer_answer_tokens(records: Sequence[Record], total: Adds) -> list[Faster]:
    """Computes what a smaller max_tokens would save: the length that most answers keep to."""
    outputs = sorted(record.num_output_tokens for record in records)
    limit = max(1, outputs[min(len(outputs) - 1, int(SHORTER * len(outputs)))])
    shorter = [min(limit, num) for num in outputs]
    cut = sum(num > limit for num in outputs) / len(outputs)
    now = total.work(records)
    less = replace(
        now,
        output_tokens=now.output_tokens * sum(shorter) / max(1, sum(outputs)),
        longest=min(limit, now.longest),
    )
    cost = total.costs.seconds
    times = cost(now, total.machine) / max(1e-9, cost(less, total.machine))
    if times < WORTH or not cut:
        return []
    return [
        Faster(option=f"--max-tokens {limit}", times=times, effect=f"cuts off {cut:.0%} of answers")
    ]
