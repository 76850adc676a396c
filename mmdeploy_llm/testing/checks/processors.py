"""The checks of a media processor."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from mmdeploy_llm.errors import MediaError, MediaLimitError
from mmdeploy_llm.hooks import (
    Checkpoint,
    MediaInput,
    MediaLimits,
    MediaProcessor,
    MediaProcessorSpec,
)
from mmdeploy_llm.testing import samples as generated

from .base import Check, CheckFailed, CheckSkipped, attributed, demand, factory_of

NUM_THREADS = 6
NUM_DAMAGED = 4  # of each sample's bytes, and as many cut off


@dataclass(kw_only=True)
class ProcessorSubject:
    """A processor to check; see MediaProcessorConformance for the fields."""

    spec: MediaProcessorSpec
    checkpoint: Checkpoint
    samples: Mapping[str, Any] | None = None
    corrupt: Mapping[str, bytes] | None = None
    too_large: Mapping[str, tuple[Any, MediaLimits]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    other_options: Mapping[str, Any] | None = None
    item_options: Mapping[str, Any] | None = None
    limits: MediaLimits = field(default_factory=MediaLimits)

    def __post_init__(self) -> None:
        self._built: list[MediaProcessor] = []
        self._made: dict[str, MediaInput] = {}
        if self.too_large is None:
            self.too_large = {} if self.samples is not None else generated.too_large(self.spec.kind)
        if self.samples is None:
            self.samples = generated.samples(self.spec.kind)
        if self.corrupt is None:
            self.corrupt = generated.CORRUPT

    @cached_property
    def processor(self) -> MediaProcessor:
        """The processor that all checks share, as an engine's threads do."""
        return self.build()

    def build(self, options: Mapping[str, Any] | None = None) -> MediaProcessor:
        """Another processor; `close` closes it."""
        given = dict(self.options if options is None else options)
        with attributed(
            f"{self.spec.factory}(checkpoint, {given!r})",
            "a processor's factory is called as factory(checkpoint, options); where it needs files "
            "or a config, the test class gives them in `checkpoint`",
        ):
            built = factory_of(self.spec)(self.checkpoint, given)
        demand(
            isinstance(built, MediaProcessor),
            f"{self.spec.factory} builds a {type(built).__name__}; derive it from "
            "mmdeploy_llm.hooks.MediaProcessor",
        )
        self._built.append(built)
        return built  # type: ignore[no-any-return]

    def sources(self) -> Mapping[str, Any]:
        """The samples."""
        if not self.samples:
            raise CheckSkipped("no samples were given; add some to `samples`")
        return self.samples

    def encoded(self) -> dict[str, bytes]:
        """The samples that are bytes."""
        return {name: it for name, it in self.sources().items() if isinstance(it, bytes)}

    def made(self, name: str) -> MediaInput:
        """The model inputs of a sample, made once for all checks that look at them."""
        if name not in self._made:
            self._made[name] = self.run(name)
        return self._made[name]

    def run(
        self,
        name: str,
        processor: MediaProcessor | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> MediaInput:
        """The model inputs of a sample."""
        processor = processor or self.processor
        with attributed(f"sample {name!r}: decode and process", "a sample must be processed"):
            item = processor.decode(self.sources()[name], self.limits)
            made = processor.process(item, dict(options or {}))
        demand(
            isinstance(made, MediaInput),
            f"sample {name!r}: process gives a {type(made).__name__}; return a MediaInput",
        )
        return made

    def close(self) -> None:
        """Closes all processors that were built."""
        while self._built:
            self._built.pop().close()


def builds(subject: ProcessorSubject) -> None:
    """The factory gives a MediaProcessor of the spec's kind."""
    found = getattr(subject.processor, "kind", None)
    demand(
        found == subject.spec.kind,
        f"`kind` is {found!r}, but the spec says {subject.spec.kind!r}; make them equal",
    )


def token_and_markers_are_texts(subject: ProcessorSubject) -> None:
    """`token` is one text, `markers` a tuple of texts, each once."""
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
        "`markers` is empty; name the texts that stand for one item in a prompt, `token` itself "
        "where there is no other",
    )
    demand(
        len(set(markers)) == len(markers), f"`markers` {markers!r} holds a text twice; remove one"
    )


def samples_are_processed(subject: ProcessorSubject) -> None:
    """Every sample becomes a MediaInput that keeps its contract."""
    for name in subject.sources():
        made = subject.made(name)
        demand(
            made.kind == subject.spec.kind,
            f"sample {name!r}: the MediaInput has kind {made.kind!r}; set {subject.spec.kind!r}",
        )
        demand(
            type(made.num_tokens) is int and made.num_tokens > 0,
            f"sample {name!r}: num_tokens is {made.num_tokens!r}; give an int above 0",
        )
        demand(
            isinstance(made.key, str) and made.key,
            f"sample {name!r}: key is {made.key!r}; give a digest of the content and the options",
        )


def tensors_are_ready(subject: ProcessorSubject) -> None:
    """Tensors lie contiguous on the CPU, are finite and need no gradient."""
    for name in subject.sources():
        tensors = subject.made(name).tensors
        demand(
            isinstance(tensors, Mapping),
            f"sample {name!r}: `tensors` is a {type(tensors).__name__}; give a dict of tensors",
        )
        for key, tensor in tensors.items():
            problem = _tensor_problem(tensor)
            demand(problem is None, f"sample {name!r}: tensors[{key!r}] {problem}")


def _tensor_problem(tensor: Any) -> str | None:
    """What is wrong with a tensor, and what to do."""
    if not isinstance(tensor, torch.Tensor):
        return f"is a {type(tensor).__name__}; make it a tensor with torch.from_numpy or as_tensor"
    if tensor.device.type != "cpu":
        return f"lies on {tensor.device}; leave it on the CPU, the engine moves it"
    if tensor.requires_grad:
        return "requires a gradient; detach it"
    if tensor.dtype in (torch.float64, torch.complex64, torch.complex128):
        return f"is {tensor.dtype}, which no model reads; convert it to float32"
    if not tensor.is_contiguous():
        return "is not contiguous; call .contiguous()"
    if tensor.is_floating_point() and not tensor.isfinite().all():
        return "holds NaN or infinity; a model would pass it on to every token"
    return None


def count_tokens_equals_process(subject: ProcessorSubject) -> None:
    """count_tokens gives num_tokens, from `peek` too where the processor has one."""
    processor = subject.processor
    for name, source in subject.sources().items():
        made = subject.made(name)
        finders = {"decode": processor.decode}
        if callable(getattr(processor, "peek", None)):
            finders["peek"] = processor.peek  # type: ignore[attr-defined]
        for method, find in finders.items():
            with attributed(f"sample {name!r}: {method} and count_tokens", "mend count_tokens"):
                count = processor.count_tokens(find(source, subject.limits), {})
            demand(
                count == made.num_tokens,
                f"sample {name!r}: count_tokens of what {method} gave is {count!r}, but process "
                f"gives {made.num_tokens} tokens; compute both from one function of the size",
            )


def prompt_text_holds_the_tokens(subject: ProcessorSubject) -> None:
    """`prompt_text`, where there is one, holds `token` num_tokens times."""
    token, checked = subject.processor.token, False
    for name in subject.sources():
        made = subject.made(name)
        if made.prompt_text is None:
            continue
        checked = True
        count = made.prompt_text.count(token)
        demand(
            count == made.num_tokens,
            f"sample {name!r}: prompt_text holds {token!r} {count} times, but num_tokens is "
            f"{made.num_tokens}; each embedding needs one placeholder token in it",
        )
    if not checked:
        raise CheckSkipped("no sample has a prompt_text")


def keys_are_deterministic(subject: ProcessorSubject) -> None:
    """The same source gives the same key and tensors, in another processor too."""
    other = subject.build()
    for name in subject.sources():
        first = subject.made(name)
        for made in (subject.run(name), subject.run(name, other)):
            problem = _difference(first, made)
            demand(
                problem is None,
                f"sample {name!r}: processed again, {problem}; nothing but the content and the "
                "options may count (no time, id() or random value)",
            )


def keys_change_with_the_content(subject: ProcessorSubject) -> None:
    """Samples of different content have different keys."""
    seen: dict[str, str] = {}
    if len(subject.sources()) < 2:
        raise CheckSkipped("there is one sample only; add one of other content to `samples`")
    for name in subject.sources():
        twin = seen.setdefault(subject.made(name).key, name)
        demand(
            twin == name,
            f"samples {twin!r} and {name!r} have the same key, so that one would be answered with "
            "the other's embeddings; hash the content, its shape and type into the key",
        )


def keys_change_with_the_options(subject: ProcessorSubject) -> None:
    """Options that shape the result are part of the key."""
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


def corrupt_bytes_are_media_errors(subject: ProcessorSubject) -> None:
    """What cannot be read raises MediaError."""
    assert subject.corrupt is not None
    for name, blob in subject.corrupt.items():
        found = _outcome(subject, blob, {}, f"corrupt bytes {name!r} ({len(blob)} bytes)")
        demand(
            isinstance(found, MediaError),
            f"corrupt bytes {name!r} ({len(blob)} bytes) were processed without an error; raise "
            "MediaError from mmdeploy_llm.errors for what cannot be read",
        )


def damaged_samples_raise_nothing_else(subject: ProcessorSubject) -> None:
    """A sample cut off or damaged anywhere is processed or raises MediaError."""
    encoded = subject.encoded()
    if not encoded:
        raise CheckSkipped("no sample is bytes; add an encoded one to `samples`")
    for name, blob in encoded.items():
        for how, broken in _damaged(blob):
            _outcome(subject, broken, {}, f"sample {name!r} {how}")


def limits_are_respected(subject: ProcessorSubject) -> None:
    """What is over a limit raises MediaLimitError."""
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
            "from the header, before the content is decoded",
        )


def threads_do_not_disturb_each_other(subject: ProcessorSubject) -> None:
    """Many threads on one processor get what one alone gets."""
    names = tuple(subject.sources()) * NUM_THREADS
    expected = {name: subject.made(name) for name in subject.sources()}
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for name, made in zip(names, pool.map(subject.run, names), strict=True):
            problem = _difference(expected[name], made)
            demand(
                problem is None,
                f"sample {name!r}: with {NUM_THREADS} threads at work, {problem}; keep what "
                "belongs to one item in local variables, not in `self`",
            )


def closes_twice(subject: ProcessorSubject) -> None:
    """`close` may be called before any use, after use, and again."""
    unused, used = subject.build(), subject.build()
    subject.run(next(iter(subject.sources())), used)
    for processor, when in ((unused, "before any use"), (used, "after use")):
        for number in ("first", "second"):
            with attributed(f"the {number} close() {when}", "let close() be called any time"):
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
    corrupt_bytes_are_media_errors,
    damaged_samples_raise_nothing_else,
    limits_are_respected,
    threads_do_not_disturb_each_other,
    closes_twice,
)


def _outcome(
    subject: ProcessorSubject, source: Any, given: Mapping[str, Any], what: str
) -> MediaError | None:
    """The MediaError of a source, None where it is processed; anything else is a CheckFailed."""
    processor, limits = subject.processor, given.get("limits", subject.limits)
    try:
        processor.process(processor.decode(source, limits), {})
    except MediaError as error:
        demand(str(error), f"{what}: the {type(error).__name__} has no message; say what was wrong")
        return error
    except (Exception, SystemExit) as error:
        raise CheckFailed(
            f"{what} raised {type(error).__name__}: {error}; raise MediaError instead, so that the "
            "caller is told what is wrong with the item"
        ) from error
    return None


def _damaged(blob: bytes) -> Iterator[tuple[str, bytes]]:
    """Cut off, and with bytes changed, at places spread over the whole."""
    rng = random.Random(len(blob))
    for number in range(NUM_DAMAGED):
        place = len(blob) * (number + 1) // (NUM_DAMAGED + 1)
        yield f"cut off at byte {place}", blob[:place]
        broken = bytearray(blob)
        for at in rng.sample(range(len(blob)), min(len(blob), 8)):
            broken[at] = rng.randrange(256)
        yield f"damaged (variant {number})", bytes(broken)


def _difference(first: MediaInput, other: MediaInput) -> str | None:
    """In words, None where they are equal."""
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
    """What is no tensor on the CPU is for tensors_are_ready to report."""
    if _tensor_problem(one) is not None:
        return True
    return isinstance(two, torch.Tensor) and one.dtype == two.dtype and torch.equal(one, two)
