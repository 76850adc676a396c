"""Checks of a media processor."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from mmdeploy_llm.errors import ConfigError, MediaError, MediaLimitError
from mmdeploy_llm.hooks import MediaInput, MediaLimits
from mmdeploy_llm.model_checks.base import Check, CheckFailed, CheckSkipped, attributed, demand

from .processor_subject import ProcessorSubject

NUM_THREADS = 6
NUM_DAMAGED = 4  # variants of each sample with changed bytes, and as many truncated ones


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
    """count_tokens returns num_tokens, also from the result of `peek` if the processor has one."""
    processor = subject.processor
    for name, source in subject.sources().items():
        made = subject.made(name)
        finders = {"decode": processor.decode}
        if callable(getattr(processor, "peek", None)):
            finders["peek"] = processor.peek  # type: ignore[attr-defined]
        for method, find in finders.items():
            with attributed(f"sample {name!r}: {method} and count_tokens", "correct count_tokens"):
                count = processor.count_tokens(find(source, subject.limits), {})
            demand(
                count == made.num_tokens,
                f"sample {name!r}: count_tokens of the result of {method} is {count!r}, but "
                f"process returns {made.num_tokens} tokens; compute both from one function of the "
                "size",
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
        raise CheckSkipped("no sample has a prompt_text")


def keys_are_deterministic(subject: ProcessorSubject) -> None:
    """The same source yields the same key and tensors, in another processor too."""
    other = subject.build()
    for name in subject.sources():
        first = subject.made(name)
        for made in (subject.run(name), subject.run(name, other)):
            problem = _difference(first, made)
            demand(
                problem is None,
                f"sample {name!r}: processed again, {problem}; the result may depend only on the "
                "content and the options (no time, id() or random value)",
            )


def keys_change_with_the_content(subject: ProcessorSubject) -> None:
    """Samples of different content have different keys."""
    seen: dict[str, str] = {}
    if len(subject.sources()) < 2:
        raise CheckSkipped("there is only one sample; add one of different content to `samples`")
    for name in subject.sources():
        twin = seen.setdefault(subject.made(name).key, name)
        demand(
            twin == name,
            f"samples {twin!r} and {name!r} have the same key, so a cache would return one's "
            "embeddings for the other; hash the content, its shape and type into the key",
        )


def keys_change_with_the_options(subject: ProcessorSubject) -> None:
    """Options that change the result change the key."""
    if subject.other_options is None and subject.item_options is None:
        raise CheckSkipped("neither `other_options` nor `item_options` were given")
    name = next(iter(subject.sources()))
    key = subject.made(name).key
    for field_name, options in (("other_options", True), ("item_options", False)):
        given = getattr(subject, field_name)
        if given is None:
            continue
        made = (
            subject.run(name, subject.build({**subject.options, **given}))
            if options
            else subject.run(name, options=given)
        )
        demand(
            made.key != key,
            f"sample {name!r} has the same key with {field_name} {dict(given)!r}; hash all "
            "resolved options into the key",
        )


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


def corrupt_bytes_are_media_errors(subject: ProcessorSubject) -> None:
    """Bytes that cannot be read raise MediaError."""
    assert subject.corrupt is not None
    for name, blob in subject.corrupt.items():
        found = _outcome(subject, blob, {}, f"corrupt bytes {name!r} ({len(blob)} bytes)")
        demand(
            isinstance(found, MediaError),
            f"corrupt bytes {name!r} ({len(blob)} bytes) were processed without an error; raise "
            "MediaError from mmdeploy_llm.errors for sources that cannot be read",
        )


def damaged_samples_raise_nothing_else(subject: ProcessorSubject) -> None:
    """A sample truncated or damaged anywhere is processed or raises MediaError."""
    encoded = subject.encoded()
    if not encoded:
        raise CheckSkipped("no sample is bytes; add an encoded one to `samples`")
    for name, blob in encoded.items():
        for how, broken in _damaged(blob):
            _outcome(subject, broken, {}, f"sample {name!r} {how}")


def limits_are_respected(subject: ProcessorSubject) -> None:
    """A source over a limit raises MediaLimitError."""
    encoded, large = subject.encoded(), subject.too_large
    assert large is not None
    if not encoded and not large:
        raise CheckSkipped("no sample is bytes, and `too_large` is empty; add cases to it")
    by_bytes = {
        f"bytes of sample {name!r}": (blob, MediaLimits(max_bytes=len(blob) - 1))
        for name, blob in encoded.items()
    }
    for name, (source, limits) in {**by_bytes, **large}.items():
        found = _outcome(subject, source, {"limits": limits}, f"too_large {name!r}")
        how = f"raised {type(found).__name__}: {found}" if found else "was processed"
        demand(
            isinstance(found, MediaLimitError),
            f"too_large {name!r} is over its limits, but {how}; raise MediaLimitError in `decode`, "
            "by the header, before the content is decoded",
        )


def threads_do_not_disturb_each_other(subject: ProcessorSubject) -> None:
    """Concurrent threads on one processor get the results of a single one."""
    names = tuple(subject.sources()) * NUM_THREADS
    expected = {name: subject.made(name) for name in subject.sources()}
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for name, made in zip(names, pool.map(subject.run, names), strict=True):
            problem = _difference(expected[name], made)
            demand(
                problem is None,
                f"sample {name!r}: with {NUM_THREADS} concurrent threads, {problem}; keep the "
                "state of an item in local variables, not in `self`",
            )


def closes_twice(subject: ProcessorSubject) -> None:
    """`close` may be called before any use, after use, and repeatedly."""
    unused, used = subject.build(), subject.build()
    subject.run(next(iter(subject.sources())), used)
    for processor, when in ((unused, "before any use"), (used, "after use")):
        for number in ("first", "second"):
            with attributed(f"the {number} close() {when}", "allow close() at any time"):
                processor.close()


CHECKS: tuple[Check, ...] = (
    builds,
    token_and_markers_are_texts,
    samples_are_processed,
    tensors_are_ready,
    count_tokens_equals_process,
    prompt_text_holds_the_tokens,
    keys_are_deterministic,
    keys_change_with_the_content,
    keys_change_with_the_options,
    budgets_are_kept,
    corrupt_bytes_are_media_errors,
    damaged_samples_raise_nothing_else,
    limits_are_respected,
    threads_do_not_disturb_each_other,
    closes_twice,
)


def _outcome(
    subject: ProcessorSubject, source: Any, given: Mapping[str, Any], what: str
) -> MediaError | None:
    """Returns the MediaError of a source, or None if it is processed. Raises CheckFailed for any
    other exception."""
    processor, limits = subject.processor, given.get("limits", subject.limits)
    try:
        processor.process(processor.decode(source, limits), {})
    except MediaError as error:
        demand(str(error), f"{what}: the {type(error).__name__} has no message; say what was wrong")
        return error
    except (Exception, SystemExit) as error:
        raise CheckFailed(
            f"{what} raised {type(error).__name__}: {error}; raise MediaError instead, which "
            "reports to the caller what is wrong with the item"
        ) from error
    return None


def _damaged(blob: bytes) -> Iterator[tuple[str, bytes]]:
    """Yields truncated copies, and copies with eight bytes changed at random positions."""
    rng = random.Random(len(blob))
    for number in range(NUM_DAMAGED):
        end = len(blob) * (number + 1) // (NUM_DAMAGED + 1)
        yield f"truncated at byte {end}", blob[:end]
        broken = bytearray(blob)
        for at in rng.sample(range(len(blob)), min(len(blob), 8)):
            broken[at] = rng.randrange(256)
        yield f"damaged (variant {number})", bytes(broken)


def _difference(first: MediaInput, other: MediaInput) -> str | None:
    """Describes the first difference; None when they are equal."""
    for name in ("key", "num_tokens", "grid_thw", "prompt_text"):
        one, two = getattr(first, name), getattr(other, name)
        if one != two:
            return f"{name} was {one!r} and is {two!r}"
    if first.tensors.keys() != other.tensors.keys():
        return f"the tensors were {sorted(first.tensors)} and are {sorted(other.tensors)}"
    for name, tensor in first.tensors.items():
        if not _is_same(tensor, other.tensors[name]):
            return f"tensors[{name!r}] has other values"
    return None


def _is_same(one: Any, two: Any) -> bool:
    """Returns whether two tensors are equal; ignores those that tensors_are_ready reports."""
    if _tensor_problem(one) is not None:
        return True
    return isinstance(two, torch.Tensor) and one.dtype == two.dtype and torch.equal(one, two)
