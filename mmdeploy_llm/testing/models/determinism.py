"""The check of `ModelSpec.deterministic`: no bit of an answer depends on the batch."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch

from mmdeploy_llm.caches import longest_window
from mmdeploy_llm.engine.runner.runner import Runner
from mmdeploy_llm.engine.schedule.scheduler import SchedulerConfig
from mmdeploy_llm.kernels import Quantization
from mmdeploy_llm.kernels.cpu import BuildError, CpuKernels, load
from mmdeploy_llm.layers.fixed_order import undetermined
from mmdeploy_llm.layers.install import install_kernels
from mmdeploy_llm.request import Request
from mmdeploy_llm.testing.determinism.ways import Way, Ways
from mmdeploy_llm.testing.models.paged import BLOCK_SIZE, cpu_runner, greedy

from .base import Check, CheckSkipped, demand
from .models import ModelSubject

NUM_TOKENS = 8
WAYS = (Way.BATCH, Way.CHUNKS, Way.PREFIX, Way.PREEMPTED, Way.THREADS)
FORMATS: tuple[tuple[torch.dtype, Quantization | None], ...] = (
    (torch.float32, None),
    (torch.bfloat16, None),
    (torch.bfloat16, "int8"),
)


def no_bit_depends_on_the_batch(subject: ModelSubject) -> None:
    """A deterministic model yields the same bits alone and in any company, in every format."""
    if not subject.spec.deterministic:
        raise CheckSkipped("the spec does not promise it: it does not set `deterministic`")
    try:
        kernels = load(fixed_order=True)
    except BuildError as error:
        raise CheckSkipped(f"the promise holds with the C++ kernels only: {error}") from error
    for dtype, quantization in FORMATS:
        model = subject.build(dtype)
        install_kernels(model, kernels, quantization)
        torchs = undetermined(model)
        demand(
            not torchs,
            f"torch computes {', '.join(torchs)} in an order that depends on the number of rows; "
            "use the package's layers, or leave `deterministic` out of the spec",
        )
        name = quantization or str(dtype).removeprefix("torch.")
        for found in _ways(subject, model, kernels, dtype).compare(model, WAYS):
            assert found.has_happened, f"nothing happened {found.way}"
            demand(
                found.is_same,
                f"in {name} {found.num_other_logprobs} of {found.num_logprobs} log-probabilities "
                f"and {found.num_other_tokens} tokens differ {found.way}, from "
                f"{', '.join(found.causes)} on; compute each row, or each media item, alone",
            )


def _ways(subject: ModelSubject, model: Any, kernels: CpuKernels, dtype: torch.dtype) -> Ways:
    requests = [
        Request(
            request_id=name,
            prompt=None,
            prompt_token_ids=list(ids),
            params=greedy(NUM_TOKENS, None),
            media=tuple(media),
        )
        for name, (ids, media) in subject.prompts.items()
    ]
    spans = chain.from_iterable(request.media for request in requests)
    longest = max(len(request.prompt_token_ids) for request in requests) + NUM_TOKENS
    num_blocks = (len(requests) + 1) * (longest // BLOCK_SIZE + 2)
    config = SchedulerConfig(
        max_num_seqs=max(2, len(requests)),
        max_num_batched_tokens=(len(requests) + 1) * longest,
        max_model_len=longest,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        encoder_cache_tokens=sum(span.item.num_tokens for span in spans) or 1,
        atomic_media=subject.spec.atomic_media,
        window=longest_window(model),
        num_window_blocks=num_blocks,
    )

    def runner(limits: SchedulerConfig) -> Runner:
        return cpu_runner(model, limits, subject.vocab_size, kernels=kernels, dtype=dtype)

    return Ways(runner, config, requests)


CHECKS: tuple[Check, ...] = (no_bit_depends_on_the_batch,)
