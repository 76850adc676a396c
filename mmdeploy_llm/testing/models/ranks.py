"""Checks of a model under tensor parallelism, with ranks in threads."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.layers.tp_plan import tp_plan
from mmdeploy_llm.system.sharding import shares_of
from mmdeploy_llm.testing.models.dense import DenseRunner, DenseSequence
from mmdeploy_llm.testing.models.rank_threads import ThreadRanks, on_ranks, thread_ranks

from .base import Check, CheckSkipped, attributed, demand
from .equalities import max_difference
from .models import ModelSubject

NUM_RANKS = 2
NUM_TOKENS = 3  # generated tokens, so that keys of earlier steps are read
ADVICE = (
    "in `tp_plan` of the ModelSpec give a style to layers that are not from mmdeploy_llm.layers, "
    "and read the numbers of heads and channels in forward, from shapes or attributes"
)


def two_ranks_equal_one(subject: ModelSubject) -> None:
    """A model sharded over two ranks yields the logits of the whole model, but for rounding: ranks
    add what a sum is made of in another order, which changes logits in proportion to their size.
    """
    with attributed("a model sharded over two ranks", ADVICE):
        ranks = thread_ranks(NUM_RANKS)
        try:  # one after the other: transformers' config classes are not thread-safe
            runners = [_runner_of_rank(subject, own) for own in ranks]
        except ConfigError as reason:
            raise CheckSkipped(str(reason)) from reason
        found = on_ranks(ranks, lambda own: _all_logits(runners[own.rank], subject))
    for name, (ids, media) in subject.prompts.items():
        expected = _logits(subject.runner, subject.runner.add(ids, media))
        for rank, logits in enumerate(found):
            difference = max_difference(logits[name], expected)
            demand(
                difference < subject.tolerance * max(1.0, float(expected.abs().max())),
                f"case {name!r}: on rank {rank} the logits differ by {difference:.2g} "
                f"from those of the whole model; {ADVICE}",
            )


def _runner_of_rank(subject: ModelSubject, ranks: ThreadRanks) -> DenseRunner:
    plan = partial(tp_plan, own=subject.spec.tp_plan)
    split = shares_of(plan, ranks, subject.spec.name)
    model = subject.build(torch.float32, split=split)
    return DenseRunner(model, has_atomic_media=subject.spec.atomic_media)


def _all_logits(runner: DenseRunner, subject: ModelSubject) -> dict[str, Tensor]:
    """Returns name of a case -> logits."""
    return {
        name: _logits(runner, runner.add(ids, media))
        for name, (ids, media) in subject.prompts.items()
    }


def _logits(runner: DenseRunner, sequence: DenseSequence) -> Tensor:
    """Returns the logits of the prompt and of NUM_TOKENS greedy tokens after it."""
    logits = runner.run(sequence)
    for _ in range(NUM_TOKENS):
        sequence.token_ids.append(int(logits[-1].argmax()))
        logits = torch.cat([logits, runner.run(sequence)])
    return logits


CHECKS: tuple[Check, ...] = (two_ranks_equal_one,)
