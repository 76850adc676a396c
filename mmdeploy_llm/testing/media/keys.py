"""Checks of a media processor: the key stands for all that changes the result, and nothing that it
is given is changed."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import combinations
from typing import Any

import numpy as np
import torch

from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.hooks import MediaInput, MediaProcessor
from mmdeploy_llm.testing.models.base import Check, CheckSkipped, attributed, demand

from .subject import ProcessorSubject


def keys_are_deterministic(subject: ProcessorSubject) -> None:
    """The same source yields the same key and tensors, in another processor too."""
    other = subject.build()
    for name in subject.sources():
        first = subject.made(name)
        for made in (subject.run(name), subject.run(name, other)):
            problem = difference(first, made)
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


def keys_change_with_every_byte(subject: ProcessorSubject) -> None:
    """Sources that differ only in their last, middle or first bytes have different keys and
    results, and so have those that differ in their shape."""
    pairs = dict(subject.twins or {})
    if not pairs and not subject.encoded():
        raise CheckSkipped(
            "there are no two sources that differ in a few bytes; add such pairs to `twins`"
        )
    for name, sources in pairs.items():
        try:
            one, two = (subject.within(source, subject.limits) for source in sources)
        except MediaError:
            continue  # not every processor reads every form
        demand(
            difference(one, two, with_key=False) is not None,
            f"{name} are processed to the same values; use all of the content, or give `twins` "
            "that differ where the processor looks, such as in a frame that it samples",
        )
        _demand_other_keys(name, one, two)
    for name, blob in subject.encoded().items():
        for back in (1, 20, len(blob) // 4):
            if not 0 < back <= len(blob):
                continue
            other = bytearray(blob)
            other[-back] ^= 0x55
            try:
                two = subject.within(bytes(other), subject.limits)
            except MediaError:
                continue
            what = f"sample {name!r} and itself with byte -{back} changed"
            _demand_other_keys(what, subject.made(name), two)


def _demand_other_keys(what: str, one: MediaInput, two: MediaInput) -> None:
    demand(
        one.key != two.key or difference(one, two, with_key=False) is None,
        f"{what} have the same key but other values, so a cache would return one's embeddings for "
        "the other; hash all of the content, not a part of it",
    )


def keys_change_with_the_options(subject: ProcessorSubject) -> None:
    """Options that change the result change the key, each of them."""
    if not subject.item_choices and not subject.other_choices:
        raise CheckSkipped(
            "no options were given; add `other_options` of an engine, or `item_options` of an item"
        )
    others = [(it, subject.build({**subject.options, **it})) for it in subject.other_choices]
    has_effect: dict[str, bool] = {}
    for name in subject.sources():
        known = {"without options": subject.made(name)}
        for options in subject.item_choices:
            made = _with_own(subject, name, options)
            if made is not None:
                known[f"item_options {dict(options)!r}"] = made
        for options, processor in others:
            known[f"other_options {dict(options)!r}"] = subject.run(name, processor)
        for (how, made), (other_how, other) in combinations(known.items(), 2):
            demand(
                made.key != other.key or difference(made, other, with_key=False) is None,
                f"sample {name!r} has the same key with {other_how} as {how}, but other values; "
                "hash all resolved options into the key",
            )
        for how, made in known.items():
            field_name = how.partition(" ")[0]
            has_effect[field_name] = has_effect.get(field_name) or (
                made.key != subject.made(name).key
            )
    for field_name, choices in (
        ("item_options", subject.item_choices),
        ("other_options", subject.other_choices),
    ):
        demand(
            has_effect.get(field_name) or not choices,
            f"every sample has the same key with and without {field_name}; hash all resolved "
            "options into the key, or give options that have an effect",
        )


def _with_own(
    subject: ProcessorSubject, name: str, options: Mapping[str, Any]
) -> MediaInput | None:
    """Returns a sample with options of its own, checked; None where this sample cannot have
    them."""
    processor = subject.processor
    item = processor.decode(subject.sources()[name], subject.limits)
    given = dict(options)
    try:
        made = processor.process(item, given)
    except MediaError:
        return None
    demand(
        given == dict(options),
        f"sample {name!r}: process changes the options {dict(options)!r} that it is given to "
        f"{given!r}; copy them",
    )
    _demand_same_counts(processor, item, options, made, f"sample {name!r} with {dict(options)!r}")
    return made


def _demand_same_counts(
    processor: MediaProcessor, item: Any, options: Mapping[str, Any], made: MediaInput, what: str
) -> None:
    with attributed(f"{what}: count_tokens and prompt_text", "correct them"):
        count, text = processor.count_tokens(item, options), processor.prompt_text(item, options)
    demand(
        count == made.num_tokens,
        f"{what}: count_tokens is {count!r}, but process returns {made.num_tokens} tokens; compute "
        "both with the item's options",
    )
    demand(
        text is None or text == made.prompt_text,
        f"{what}: the method prompt_text returns {text!r:.200}, but process returns "
        f"{made.prompt_text!r:.200}; compute both with the item's options",
    )


def sources_are_left_as_they_are(subject: ProcessorSubject) -> None:
    """Neither the source nor the decoded item is changed, and the result is no view of them."""
    for name, source in subject.sources().items():
        before = copy.deepcopy(source)
        processor = subject.processor
        with attributed(f"sample {name!r}: decode, then process twice", "keep the item as it is"):
            item = processor.decode(source, subject.limits)
            first, second = (processor.process(item, {}) for _ in range(2))
        demand(isinstance(first, MediaInput), f"sample {name!r}: process returns no MediaInput")
        problem = difference(first, second)
        demand(
            problem is None,
            f"sample {name!r}: the same decoded item processed twice differs, {problem}; do not "
            "change the item",
        )
        demand(
            _is_equal(source, before), f"sample {name!r}: the caller's source was changed; copy it"
        )
        if isinstance(source, np.ndarray) and source.size:
            own = source.copy()
            item = processor.decode(own, subject.limits)
            own[...] = 0
            problem = difference(first, processor.process(item, {}))
            demand(
                problem is None,
                f"sample {name!r}: after the caller has changed the array that was decoded, "
                f"{problem}; copy it in `decode`",
            )


def _is_equal(one: Any, two: Any) -> bool:
    """Whether a source is as its copy, of the types that can be changed."""
    if isinstance(one, list | tuple):
        return all(map(_is_equal, one, two))
    if isinstance(one, torch.Tensor):
        return torch.equal(one, two)
    return not hasattr(one, "tobytes") or one.tobytes() == two.tobytes()


def difference(first: MediaInput, other: MediaInput, *, with_key: bool = True) -> str | None:
    """Describes the first difference; None when they are equal."""
    for name in ("key", "num_tokens", "grid_thw", "prompt_text")[0 if with_key else 1 :]:
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
    if not isinstance(one, torch.Tensor) or one.device.type != "cpu" or not one.isfinite().all():
        return True
    return isinstance(two, torch.Tensor) and one.dtype == two.dtype and torch.equal(one, two)


CHECKS: tuple[Check, ...] = (
    keys_are_deterministic,
    keys_change_with_the_content,
    keys_change_with_every_byte,
    keys_change_with_the_options,
    sources_are_left_as_they_are,
)
