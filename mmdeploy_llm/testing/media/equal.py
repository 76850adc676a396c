"""Checks of a media processor against its reference, by default transformers' processor of the
checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from mmdeploy_llm.hooks import ITEM_NUMBER, MediaInput
from mmdeploy_llm.testing.models.base import Check, CheckSkipped, attributed, demand

from . import layouts
from .subject import ProcessorSubject
from .truth import AROUND, GIVE_YOUR_OWN, MediaTruth


def pixels_equal_the_reference(subject: ProcessorSubject) -> None:
    """Tensors of all samples equal the reference's, whatever the order of patches."""
    for name, truth in _truths(subject):
        demand_same_tensors(subject, f"sample {name!r}", subject.made(name), truth)


def options_equal_the_reference(subject: ProcessorSubject) -> None:
    """Tensors and tokens equal the reference's with options of an item too."""
    if not subject.reference_options:
        raise CheckSkipped(
            "no option of an item is known to have the same name and meaning in the reference; add "
            "such options to `reference_options`"
        )
    for name, options in subject.reference_options:
        made = subject.run(name, options=options)
        truth = subject.truth(name, options)
        what = f"sample {name!r} with {dict(options)!r}"
        demand_same_tensors(subject, what, made, truth)
        _demand_same_text(subject, what, made, truth)


def tokens_equal_the_reference(subject: ProcessorSubject) -> None:
    """A prompt with an item has the token ids of the reference."""
    checked = False
    for name, truth in _truths(subject):
        checked |= _demand_same_text(subject, f"sample {name!r}", subject.made(name), truth)
    if not checked:
        reason = getattr(subject.reference, "reason", "") or "it gives none"
        raise CheckSkipped(f"the reference has no token ids or texts ({reason}); {GIVE_YOUR_OWN}")


def _truths(subject: ProcessorSubject) -> Iterator[tuple[str, MediaTruth]]:
    """Yields the samples that the reference takes, with what it makes of them. Raises CheckSkipped
    when it takes none."""
    num_taken, reason = 0, None
    for name in subject.sources():
        try:
            truth = subject.truth(name)
            if truth.has_own_size:
                _skip_another_size(subject.made(name), truth)
        except CheckSkipped as error:
            reason = error
            continue
        num_taken += 1
        yield name, truth
    if not num_taken and reason is not None:
        raise reason


def _skip_another_size(made: MediaInput, truth: MediaTruth) -> None:
    ours, theirs = largest(made.tensors), largest(truth.tensors)
    sizes = [0 if pixels is None else pixels.numel() for pixels in (ours, theirs)]
    if sizes[0] != sizes[1]:
        raise CheckSkipped(
            f"the item has {sizes[0]:,} values, by transformers' defaults {sizes[1]:,}; "
            f"{GIVE_YOUR_OWN}"
        )


def demand_same_tensors(
    subject: ProcessorSubject, what: str, made: MediaInput, truth: MediaTruth
) -> None:
    """Demands that the tensors of an item equal the reference's."""
    named = {name: tensor for name, tensor in truth.tensors.items() if name in made.tensors}
    tolerance = subject.pixel_tolerance if truth.tolerance is None else truth.tolerance
    for name, expected in named.items():
        found = made.tensors[name]
        demand(
            found.shape == expected.shape
            and torch.allclose(found.double(), expected.double(), rtol=0, atol=tolerance),
            f"{what}: tensors[{name!r}] differs from the reference's: shape {tuple(found.shape)}, "
            f"not {tuple(expected.shape)}, or other values",
        )
    if not named and truth.tensors:
        pixels, expected = largest(made.tensors), next(iter(truth.tensors.values()))
        demand(pixels is not None, f"{what}: there is no tensor of pixels; return one")
        assert pixels is not None
        problem = layouts.difference(pixels, expected, made.grid_thw, tolerance)
        demand(problem is None, f"{what}: compared with the reference's pixels, {problem}")


def largest(tensors: Mapping[str, Any]) -> torch.Tensor | None:
    """Returns the largest tensor of floats, which holds the pixels."""
    found = [x for x in tensors.values() if isinstance(x, torch.Tensor) and x.is_floating_point()]
    return max(found, key=lambda tensor: tensor.numel(), default=None)


def _demand_same_text(
    subject: ProcessorSubject, what: str, made: MediaInput, truth: MediaTruth
) -> bool:
    """Compares counts, texts and ids, those that the reference has; returns whether it has any."""
    if truth.num_tokens is not None:
        demand(
            made.num_tokens == truth.num_tokens,
            f"{what} has {made.num_tokens} tokens, the reference has {truth.num_tokens}",
        )
    if truth.prompt_text is not None:
        demand(
            _text_of(subject, made) == truth.prompt_text,
            f"{what} is written as {_text_of(subject, made)!r:.300} in a prompt, by the reference "
            f"as {truth.prompt_text!r:.300}",
        )
    if truth.token_ids is not None:
        with attributed("the checkpoint's tokenizer", "write it to the checkpoint's folder"):
            # A processor may add to its tokenizer what the checkpoint's has in its files.
            theirs = getattr(getattr(subject.reference, "processor", None), "tokenizer", None)
            tokenizer = theirs or _tokenizer(subject.checkpoint.folder)
        ids = list(tokenizer(_text_of(subject, made).join(AROUND))["input_ids"])
        expected = list(truth.token_ids)
        shown = (tokenizer.decode(found) for found in (ids, expected))
        demand(
            ids == expected,
            f"{what}: the prompt has {len(ids)} tokens, by the reference {len(expected)}: "
            + ", not ".join(f"{text!r:.300}" for text in shown)
            + "; correct num_tokens, `token`, or prompt_text with its tags",
        )
    return (truth.num_tokens, truth.prompt_text, truth.token_ids) != (None, None, None)


def _text_of(subject: ProcessorSubject, made: MediaInput) -> str:
    """Returns the text of an item that is the first of its prompt."""
    processor = subject.processor
    text = processor.token * made.num_tokens if made.prompt_text is None else made.prompt_text
    if processor.written_token is not None:
        text = text.replace(processor.token, processor.written_token)
    return text.replace(ITEM_NUMBER, "0")


def _tokenizer(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )


CHECKS: tuple[Check, ...] = (
    pixels_equal_the_reference,
    tokens_equal_the_reference,
    options_equal_the_reference,
)
