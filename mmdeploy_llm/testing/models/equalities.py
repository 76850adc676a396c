"""Checks that a model computes the same in every way that the engine may run it.

transformers == dense == paged == in chunks == in a batch == from the prefix cache == preempted
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mmdeploy_llm.hooks import MediaSpan
from mmdeploy_llm.testing.models.dense import DenseRunner, DenseSequence
from mmdeploy_llm.testing.models.paged import BLOCK_SIZE, Generated

from .base import Check, CheckSkipped, attributed, demand
from .first_difference import first_difference
from .models import ModelSubject

NUM_TOKENS = 20  # number of greedy tokens that must agree
CHUNK_SIZES = (3, 11)  # tokens; smaller than most images
PAGED_CHUNK = 9  # tokens per step, prompts and decoding together


def logits_equal_the_reference(subject: ModelSubject) -> None:
    """The logits of all prompt tokens, computed in one step, equal those of transformers."""
    for name, (ids, media) in subject.prompts.items():
        expected = subject.reference.logits(ids, media)
        error = max_difference(subject.runner.run(subject.runner.add(ids, media)), expected)
        demand(
            error < subject.tolerance,
            f"case {name!r}: logits differ from the reference by {error:.2g}, "
            f"{subject.tolerance:g} is allowed; "
            + ("" if error < subject.tolerance else _where(subject, ids, media)),
        )


def _where(subject: ModelSubject, ids: Sequence[int], media: Sequence[MediaSpan]) -> str:
    """Names the module that differs first, or says how to find it."""
    inner = getattr(subject.reference, "model", None)
    found = None
    if isinstance(inner, torch.nn.Module):
        with suppress(Exception):  # of modules that no hook knows
            found = first_difference(
                subject.model,
                inner,
                lambda: subject.runner.run(subject.runner.add(ids, media)),
                lambda: subject.reference.logits(ids, media),
                subject.tolerance,
            )
    return found or (
        "compare layer by layer with transformers' model (norms and their epsilon, rotary layout, "
        "biases, scales of embeddings and scores)"
    )


def greedy_tokens_equal_the_reference(subject: ModelSubject) -> None:
    """Greedy decoding yields the tokens of transformers."""
    for name, (ids, media) in subject.prompts.items():
        expected = list(subject.reference.generate(ids, NUM_TOKENS, media))
        found = subject.runner.generate(subject.runner.add(ids, media), NUM_TOKENS)
        demand(
            found == expected,
            f"case {name!r}: greedy tokens differ from the reference from index "
            f"{_first_difference(found, expected)} on, {found} is not {expected}; if the logits "
            "of the prompt agree, the positions of generated tokens are the usual cause",
        )


def positions_equal_the_reference(subject: ModelSubject) -> None:
    """M-RoPE positions equal those of transformers; skipped for a model without them."""
    if subject.model.positions(1, ()) is None:
        raise CheckSkipped("the model has no M-RoPE: token i has position i")
    inner = getattr(getattr(subject.reference, "model", None), "model", None)
    if not hasattr(inner, "get_rope_index"):
        raise CheckSkipped("the reference has no get_rope_index")
    for name, (ids, media) in subject.prompts.items():
        if not media:
            continue
        expected = subject.reference.positions(ids, media)
        found = subject.model.positions(len(ids), media)
        same = torch.equal(found, expected)
        where = "" if same else f" from token {int((found != expected).any(0).int().argmax())} on"
        demand(
            same,
            f"case {name!r}: positions differ from the reference{where}; see get_rope_index in "
            "transformers' model",
        )


def chunks_equal_the_whole(subject: ModelSubject) -> None:
    """A prompt split at any token yields the same logits; also inside media, unless atomic."""
    for name, (ids, media) in subject.prompts.items():
        whole = subject.runner.run(subject.runner.add(ids, media))
        for size in CHUNK_SIZES:
            chunked = _run_in_chunks(subject, subject.runner.add(ids, media), size)
            error = max_difference(chunked, whole)
            demand(
                error < subject.tolerance,
                f"case {name!r}: in chunks of {size} tokens the logits differ by {error:.2g} from "
                "the whole; take positions from inputs.positions, media from inputs.media_rows, "
                "and attend only through inputs.attn, which has the tokens of earlier chunks",
            )


def a_packed_batch_equals_single_sequences(subject: ModelSubject) -> None:
    """One forward of several sequences, decoding and prefill mixed, equals one per sequence."""
    runner, prompts = subject.runner, list(subject.prompts.values())
    decoding, single = runner.add(*prompts[0]), runner.add(*prompts[0])
    for sequence in (decoding, single):
        runner.generate(sequence, 2)
    expected = [runner.run(single), *(runner.run(runner.add(*prompt)) for prompt in prompts)]
    packed = [(decoding, 1), *((runner.add(*prompt), len(prompt[0])) for prompt in prompts)]
    with attributed("a batch of several sequences", "forward gets [tokens] of any sequences"):
        error = max_difference(runner.step(packed), torch.cat(expected))
    demand(
        error < subject.tolerance,
        f"in a batch the logits differ by {error:.2g} from those of single sequences; rows of "
        "other sequences must not count: do not sum, normalise or shift over tokens",
    )


def paged_equals_dense(subject: ModelSubject) -> None:
    """The real scheduler, runner and paged cache yield what dense attention yields."""
    paged = subject.paged()
    for name, (ids, media) in subject.prompts.items():
        (found,) = paged.generate([(ids, media)], NUM_TOKENS)
        expected = _dense(subject.runner, ids, media)
        _demand_equal(
            subject,
            f"case {name!r}: the paged cache",
            found,
            expected,
            "pass each layer's own index to inputs.attn.attend, store keys nowhere else, and set "
            "num_layers, num_kv_heads and head_dim to the values that attend receives",
        )


def paged_equals_the_reference(subject: ModelSubject) -> None:
    """A batch of all prompts, whole and in chunks, yields the tokens of transformers from the real
    scheduler, runner and paged cache, and the prompts' log-probabilities."""
    reference, prompts = subject.reference, subject.prompts
    scores = {
        name: _scores(reference.logits(*prompt), prompt[0]) for name, prompt in prompts.items()
    }
    tokens = {
        name: list(reference.generate(ids, NUM_TOKENS, media))
        for name, (ids, media) in prompts.items()
    }
    for how, limits in (("whole", {}), ("chunked", {"max_num_batched_tokens": PAGED_CHUNK})):
        together = subject.paged(**limits).generate(list(prompts.values()), NUM_TOKENS)
        for name, found in zip(prompts, together, strict=True):
            _demand_equal(
                subject,
                f"case {name!r}: the paged cache ({how} prompts), compared with the reference,",
                found,
                replace(found, token_ids=tokens[name], prompt_logprobs=scores[name]),
                "the checks of ModelConformance say where the difference begins",
            )


def a_paged_batch_equals_singles(subject: ModelSubject) -> None:
    """A batch of all prompts yields the tokens that each prompt yields alone."""
    together = subject.paged().generate(list(subject.prompts.values()), NUM_TOKENS)
    for name, found in zip(subject.prompts, together, strict=True):
        (alone,) = subject.paged().generate([subject.prompts[name]], NUM_TOKENS)
        _demand_equal(
            subject,
            f"case {name!r}: a batch",
            found,
            alone,
            "a row must depend on its own sequence only",
        )


def paged_chunks_equal_the_whole(subject: ModelSubject) -> None:
    """Few tokens per step, which mix prompt chunks and decoding, yield the same tokens."""
    chunked = subject.paged(max_num_batched_tokens=PAGED_CHUNK)
    found = chunked.generate(list(subject.prompts.values()), NUM_TOKENS)
    whole = subject.paged().generate(list(subject.prompts.values()), NUM_TOKENS)
    for name, one, other in zip(subject.prompts, found, whole, strict=True):
        _demand_equal(
            subject,
            f"case {name!r}: {PAGED_CHUNK} tokens per step",
            one,
            other,
            "only inputs.attn gives access to tokens of earlier steps",
        )


def a_prefix_hit_equals_a_cold_start(subject: ModelSubject) -> None:
    """A repeated prompt whose prefix comes from the prefix cache yields the same tokens."""
    for name, prompt in subject.prompts.items():
        paged = subject.paged()
        (cold,) = paged.generate([prompt], NUM_TOKENS, has_prompt_logprobs=False)
        (hit,) = paged.generate([prompt], NUM_TOKENS, has_prompt_logprobs=False)
        assert hit.num_cached_tokens > 0, "the prefix cache did not hit"
        _demand_equal(
            subject,
            f"case {name!r}: a prefix hit of {hit.num_cached_tokens} tokens",
            hit,
            cold,
            "the model must not rely on seeing the prefix of a prompt: a prompt's first step can "
            "start at any token (see inputs.positions)",
        )


def a_preempted_request_equals_an_uninterrupted_one(subject: ModelSubject) -> None:
    """A request that is preempted and computes its tokens again yields the same tokens."""
    name, prompt = min(subject.prompts.items(), key=lambda item: len(item[1][0]))
    # Both prompts fit with two tokens each, and one block more: not two whole answers.
    num_blocks = 2 * -(-(len(prompt[0]) + 2) // BLOCK_SIZE) + 1
    pressed = subject.paged(num_blocks=num_blocks)
    twice = pressed.generate([prompt, prompt], NUM_TOKENS, has_prompt_logprobs=False)
    assert sum(found.num_preemptions for found in twice) > 0, "nothing was preempted"
    (expected,) = subject.paged().generate([prompt], NUM_TOKENS, has_prompt_logprobs=False)
    for found in twice:
        _demand_equal(
            subject,
            f"case {name!r}: a preempted request",
            found,
            expected,
            "generated tokens that are computed again come in one step with the prompt; only "
            "inputs.in_prompt distinguishes them",
        )


def bf16_stays_near_float32(subject: ModelSubject) -> None:
    """Logits in bfloat16 stay close to those in float32."""
    half = DenseRunner(subject.build(torch.bfloat16), has_atomic_media=subject.spec.atomic_media)
    for name, (ids, media) in subject.prompts.items():
        expected = subject.runner.run(subject.runner.add(ids, media))
        with attributed(
            f"case {name!r} in bfloat16", "cast back to the dtype of the weights after float32"
        ):
            hidden = half.hidden([(half.add(ids, media), len(ids))])
            with torch.inference_mode():
                found = half.model.logits(hidden)
        demand(
            hidden.dtype is torch.bfloat16,
            f"case {name!r}: hidden states of a bfloat16 model are {hidden.dtype}; cast back after "
            "computing in float32",
        )
        error = float((found.float() - expected).std() / expected.std())
        demand(
            error < subject.bf16_tolerance,
            f"case {name!r}: the error of bfloat16 logits is {error:.0%} of their standard "
            f"deviation, {subject.bf16_tolerance:.0%} is allowed; compute norms, rotary angles, "
            "softmax and router scores in float32",
        )


CHECKS: tuple[Check, ...] = (
    logits_equal_the_reference,
    greedy_tokens_equal_the_reference,
    positions_equal_the_reference,
    chunks_equal_the_whole,
    a_packed_batch_equals_single_sequences,
    paged_equals_dense,
    paged_chunks_equal_the_whole,
    a_paged_batch_equals_singles,
    a_prefix_hit_equals_a_cold_start,
    a_preempted_request_equals_an_uninterrupted_one,
    bf16_stays_near_float32,
)


def max_difference(found: Tensor, expected: Tensor) -> float:
    """Returns the largest absolute difference. Raises CheckFailed when the shapes differ."""
    demand(
        found.shape == expected.shape,
        f"the shape is {tuple(found.shape)}, must be {tuple(expected.shape)}",
    )
    return float((found.float() - expected.float()).abs().max())


def _dense(runner: DenseRunner, ids: Sequence[int], media: Sequence[MediaSpan]) -> Generated:
    sequence = runner.add(ids, media)
    logits = runner.run(sequence)
    scores = logits.float().log_softmax(-1)
    generated = Generated(prompt_logprobs=_scores(logits, ids))
    for _ in range(NUM_TOKENS):
        token = int(scores[-1].argmax())
        generated.token_ids.append(token)
        generated.logprobs.append(float(scores[-1, token]))
        sequence.token_ids.append(token)
        scores = runner.run(sequence).float().log_softmax(-1)
    return generated


def _scores(logits: Tensor, ids: Sequence[int]) -> list[float]:
    """Returns the log-probability of each token of a prompt except the first."""
    scores = logits.float().log_softmax(-1)
    return [float(scores[at, token]) for at, (_, token) in enumerate(pairwise(ids))]


def _run_in_chunks(subject: ModelSubject, sequence: DenseSequence, size: int) -> Tensor:
    logits = []
    while sequence.num_computed < len(sequence.token_ids):
        start = sequence.num_computed
        end = min(start + size, len(sequence.token_ids))
        if subject.spec.atomic_media:
            ends = [span.end for span in sequence.media if span.offset < end < span.end]
            end = max([end, *ends])
        logits.append(subject.runner.step([(sequence, end - start)]))
    return torch.cat(logits)


def _demand_equal(
    subject: ModelSubject, what: str, found: Generated, expected: Generated, advice: str
) -> None:
    error = max(_differences(found, expected), default=0.0)
    demand(
        error < 2 * subject.tolerance,  # a log-probability changes by up to twice as much as logits
        f"{what} changes log-probabilities by {error:.2g}; {advice}",
    )
    demand(
        found.token_ids == expected.token_ids,
        f"{what} changes the tokens from index "
        f"{_first_difference(found.token_ids, expected.token_ids)} on; {advice}",
    )


def _differences(found: Generated, expected: Generated) -> Iterator[float]:
    """Yields differences of log-probabilities: of prompt tokens, and of generated tokens up to the
    first that differs."""
    for one, other in zip(found.prompt_logprobs, expected.prompt_logprobs, strict=True):
        yield abs(one - other)
    same = _first_difference(found.token_ids, expected.token_ids)
    for one, other in zip(found.logprobs[:same], expected.logprobs[:same], strict=True):
        yield abs(one - other)


def _first_difference(found: Sequence[Any], expected: Sequence[Any]) -> int:
    pairs = enumerate(zip(found, expected, strict=False))
    return next((at for at, (one, two) in pairs if one != two), min(len(found), len(expected)))
