"""Checks of a media processor by itself, and the list of all checks of one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.testing.models.base import Check, CheckSkipped, attributed, demand

from . import company, equal, hearing, keys, limits, links, pixel_limits
from .subject import ProcessorSubject

MIN_KEY_LENGTH = 16  # characters: 64 bits of a digest in hexadecimal


def builds(subject: ProcessorSubject) -> None:
    """The factory returns a MediaProcessor of the spec's kind."""
    found = getattr(subject.processor, "kind", None)
    demand(
        found == subject.spec.kind,
        f"`kind` is {found!r}, but the spec says {subject.spec.kind!r}; make them equal",
    )


def token_and_markers_are_texts(subject: ProcessorSubject) -> None:
    """`token` is a string, `markers` a tuple of distinct strings."""
    token = getattr(subject.processor, "token", None)
    markers = getattr(subject.processor, "markers", None)
    demand(
        isinstance(token, str) and token,
        f"`token` is {token!r}; set it to the text of the placeholder token in the model's prompts",
    )
    is_texts = isinstance(markers, tuple) and all(isinstance(m, str) and m for m in markers)
    demand(is_texts, f"`markers` is {markers!r}; make it a tuple of texts that are not empty")
    assert isinstance(markers, tuple)
    demand(
        markers,
        "`markers` is empty; list the texts that mark the position of one item in a prompt, "
        "`token` itself if there is no other",
    )
    demand(
        len(set(markers)) == len(markers), f"`markers` {markers!r} holds a text twice; remove one"
    )


def samples_are_processed(subject: ProcessorSubject) -> None:
    """Every sample is processed to a MediaInput that keeps its contract."""
    for name in subject.sources():
        made = subject.made(name)
        demand(
            made.kind == subject.spec.kind,
            f"sample {name!r}: the MediaInput has kind {made.kind!r}; set {subject.spec.kind!r}",
        )
        demand(
            type(made.num_tokens) is int and made.num_tokens > 0,
            f"sample {name!r}: num_tokens is {made.num_tokens!r}; set it to an int above 0",
        )
        demand(
            isinstance(made.key, str) and made.key,
            f"sample {name!r}: key is {made.key!r}; set it to a digest of content and options",
        )
        demand(
            len(made.key) >= MIN_KEY_LENGTH,
            f"sample {name!r}: key {made.key!r} has {len(made.key)} characters, so that one of "
            f"many items has the key of another; keep at least {MIN_KEY_LENGTH} of the digest",
        )


def tensors_are_ready(subject: ProcessorSubject) -> None:
    """Tensors are on the CPU, contiguous, finite and without gradient."""
    for name in subject.sources():
        tensors = subject.made(name).tensors
        demand(
            isinstance(tensors, Mapping),
            f"sample {name!r}: `tensors` is a {type(tensors).__name__}; use a dict of tensors",
        )
        for key, tensor in tensors.items():
            problem = _tensor_problem(tensor)
            demand(problem is None, f"sample {name!r}: tensors[{key!r}] {problem}")


def _tensor_problem(tensor: Any) -> str | None:
    """Returns what is wrong with a tensor and what to do, or None."""
    if not isinstance(tensor, torch.Tensor):
        return f"is a {type(tensor).__name__}; make it a tensor with torch.from_numpy or as_tensor"
    if tensor.device.type != "cpu":
        return f"is on {tensor.device}; leave it on the CPU, the engine copies it to the device"
    if tensor.requires_grad:
        return "requires a gradient; detach it"
    if tensor.dtype in (torch.float64, torch.complex64, torch.complex128):
        return f"is {tensor.dtype}, which no model uses; convert it to float32"
    if not tensor.is_contiguous():
        return "is not contiguous; call .contiguous()"
    if tensor.is_floating_point() and not tensor.isfinite().all():
        return "contains NaN or infinity, which attention would spread to every token"
    return None


def count_tokens_equals_process(subject: ProcessorSubject) -> None:
    """count_tokens and the method prompt_text return what `process` does, also from the result of
    `peek` if the processor has one."""
    processor = subject.processor
    for name, source in subject.sources().items():
        made = subject.made(name)
        finders = {"decode": processor.decode}
        if callable(getattr(processor, "peek", None)):
            finders["peek"] = processor.peek  # type: ignore[attr-defined]
        for method, find in finders.items():
            with attributed(f"sample {name!r}: {method} and count_tokens", "correct count_tokens"):
                item = find(source, subject.limits)
                count, text = processor.count_tokens(item, {}), processor.prompt_text(item, {})
            demand(
                count == made.num_tokens,
                f"sample {name!r}: count_tokens of the result of {method} is {count!r}, but "
                f"process returns {made.num_tokens} tokens; compute both from one function of the "
                "size",
            )
            demand(
                text is None or text == made.prompt_text,
                f"sample {name!r}: the method prompt_text of the result of {method} is "
                f"{text!r:.200}, but process returns {made.prompt_text!r:.200}; write both by one "
                "function",
            )


def prompt_text_holds_the_tokens(subject: ProcessorSubject) -> None:
    """`prompt_text`, if there is one, contains `token` num_tokens times."""
    token, checked = subject.processor.token, False
    for name in subject.sources():
        made = subject.made(name)
        if made.prompt_text is None:
            continue
        checked = True
        count = made.prompt_text.count(token)
        demand(
            count == made.num_tokens,
            f"sample {name!r}: prompt_text contains {token!r} {count} times, but num_tokens is "
            f"{made.num_tokens}; each embedding needs one placeholder token in it",
        )
    if not checked:
        raise CheckSkipped("no sample has a prompt_text: nothing to add")


def budgets_are_kept(subject: ProcessorSubject) -> None:
    """No sample has more tokens than a budget, and one with a budget has a key of its own."""
    processor = subject.processor
    if processor.auto_tokens is None:
        raise CheckSkipped("the processor names no `auto_tokens`, so it takes no budget")
    counts = {name: subject.made(name).num_tokens for name in subject.sources()}
    demand(
        type(processor.auto_tokens) is int and processor.auto_tokens > 0,
        f"`auto_tokens` is {processor.auto_tokens!r}; set it to an int above 0, or None",
    )
    for tokens in (processor.auto_tokens, max(counts.values()) // 2 or 1):
        try:
            limited = processor.with_budget(tokens)
        except ConfigError:  # the family has a least number
            continue
        for name, before in counts.items():
            made = subject.run(name, limited)
            demand(
                made.num_tokens <= min(tokens, before),
                f"sample {name!r} has {made.num_tokens} tokens with the budget {tokens}, and "
                f"{before} without; a budget may only lower the number unless may_raise is True",
            )
            demand(
                made.num_tokens == before or made.key != subject.made(name).key,
                f"sample {name!r} has the same key with the budget {tokens}; hash all resolved "
                "options into the key",
            )


CHECKS: tuple[Check, ...] = (
    builds,
    token_and_markers_are_texts,
    samples_are_processed,
    tensors_are_ready,
    count_tokens_equals_process,
    prompt_text_holds_the_tokens,
    budgets_are_kept,
    *equal.CHECKS,
    *keys.CHECKS,
    *hearing.CHECKS,
    *limits.CHECKS,
    *pixel_limits.CHECKS,
    *links.OF_PROCESSORS,
    *company.CHECKS,
)
