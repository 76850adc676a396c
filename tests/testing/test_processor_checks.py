"""Each broken media processor fails its check, whose message says what to do."""

import threading
import time
import uuid
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.hooks import Checkpoint, MediaLimits, MediaProcessorSpec
from mmdeploy_llm.testing import FakeMediaProcessor
from mmdeploy_llm.testing.media.processors import CHECKS
from mmdeploy_llm.testing.media.subject import ProcessorSubject
from mmdeploy_llm.testing.media.truth import MediaTruth
from mmdeploy_llm.testing.plugins import left_over

from .test_document_checks import BUGS

NAMES = [check.__name__ for check in CHECKS]
SAMPLES = {"one": b"FAKE 12x8 one", "two": b"FAKE 12x8 two", "large": b"FAKE 40x80 three"}
TOO_LARGE = {"a claim": (b"FAKE 9999x9999 ", MediaLimits(max_pixels=1000))}


def changed(**fields):
    """Returns a processor that changes fields of its MediaInputs; a function gets the right
    value."""

    class Changed(FakeMediaProcessor):
        def process(self, item, options):
            made = super().process(item, options)
            new = {
                name: value(getattr(made, name)) if callable(value) else value
                for name, value in fields.items()
            }
            return replace(made, **new)

    return Changed


def with_tensor(make):
    return changed(tensors=lambda tensors: {"bytes": make(tensors["bytes"])})


class OtherKind(FakeMediaProcessor):
    kind = "video"

    def process(self, item, options):
        return replace(super().process(item, options), kind="image")


class NoToken(FakeMediaProcessor):
    token = None


class NoMarkers(FakeMediaProcessor):
    markers = ()


class GivesATuple(FakeMediaProcessor):
    def process(self, item, options):
        return (torch.zeros(1), 3)


class NoTokens(FakeMediaProcessor):
    def count_tokens(self, item, options):
        return 0


class CountsOtherwise(FakeMediaProcessor):
    def process(self, item, options):
        return replace(super().process(item, options), num_tokens=7)


class PeeksOtherwise(FakeMediaProcessor):
    def peek(self, source, limits):
        num_pixels, content = super().decode(source, limits)
        return num_pixels * 2, content


class ForgetsOptions(FakeMediaProcessor):
    def __init__(self, checkpoint, options):
        super().__init__(checkpoint, {})


class ForgetsBudgets(FakeMediaProcessor):
    auto_tokens = 4

    def with_budget(self, tokens, *, may_raise=False):
        return self


class TakesAnything(FakeMediaProcessor):
    def decode(self, source, limits):
        try:
            return super().decode(source, limits)
        except MediaError as error:
            if "must look like" in str(error):
                return 16, bytes(source)
            raise


class OwnError(FakeMediaProcessor):
    def decode(self, source, limits):
        if not source.startswith(b"FAKE"):
            raise ValueError("no fake image")
        return super().decode(source, limits)


class StumblesOverShortFiles(FakeMediaProcessor):
    def decode(self, source, limits):
        if source.startswith(b"FAKE 1") and b"x" not in source:
            return source[100]
        return super().decode(source, limits)


class SilentError(FakeMediaProcessor):
    def decode(self, source, limits):
        if not source.startswith(b"FAKE"):
            raise MediaError
        return super().decode(source, limits)


class NoLimits(FakeMediaProcessor):
    def decode(self, source, limits):
        return super().decode(source, MediaLimits())


class DecodesFirst(FakeMediaProcessor):
    """Reports a broken file before it checks the limits."""

    def decode(self, source, limits):
        if source.endswith(b" "):
            raise MediaError("the fake image ends after its header")
        return super().decode(source, limits)


class OneItemInSelf(FakeMediaProcessor):
    def process(self, item, options):
        self.item = item
        time.sleep(0.002)
        return super().process(self.item, options)


class ClosesOnce(FakeMediaProcessor):
    def __init__(self, checkpoint, options):
        super().__init__(checkpoint, options)
        self.pool = [1]

    def close(self):
        self.pool.pop()


def truth_of(kind, checkpoint):
    """The reference: what the fake processor makes when it is not broken."""
    right = FakeMediaProcessor(checkpoint, {})

    def reference(source, options, markers):
        made = right.process(right.decode(source, MediaLimits()), options)
        return MediaTruth(tensors=made.tensors, num_tokens=made.num_tokens)

    return reference


COMPARED = {"make_reference": truth_of, "reference_options": [("one", {"crop": True})]}


class OtherPixels(FakeMediaProcessor):
    fields = COMPARED

    def process(self, item, options):
        made = super().process(item, options)
        return replace(made, tensors={"bytes": made.tensors["bytes"] ^ (not options)})


class OtherPixelsWithOptions(FakeMediaProcessor):
    fields = COMPARED

    def process(self, item, options):
        made = super().process(item, options)
        return replace(made, tensors={"bytes": made.tensors["bytes"] ^ bool(options)})


class OneTokenMore(FakeMediaProcessor):
    fields = {"make_reference": truth_of}  # noqa: RUF012 - never written to

    def count_tokens(self, item, options):
        return super().count_tokens(item, options) + 1


class HashesAPart(FakeMediaProcessor):
    """Its key is that of the first bytes."""

    def process(self, item, options):
        made = super().process(item, options)
        return replace(made, key=super().process((item[0], item[1][:12]), options).key)


class IgnoresTheEnd(FakeMediaProcessor):
    fields = {"twins": {"twins": (b"FAKE 12x8 aab", b"FAKE 12x8 aac")}}  # noqa: RUF012

    def process(self, item, options):
        made = super().process(item, options)
        return replace(made, tensors={"bytes": made.tensors["bytes"][:2]})


class ChangesTheItem(FakeMediaProcessor):
    def decode(self, source, limits):
        return list(super().decode(source, limits))

    def process(self, item, options):
        item[1] = item[1] + b"!"
        return super().process(tuple(item), options)

    def count_tokens(self, item, options):
        return super().count_tokens(tuple(item), options)


class RefusesTheLimit(FakeMediaProcessor):
    def decode(self, source, limits):
        return super().decode(source, replace(limits, max_bytes=limits.max_bytes - 1))


class ReadsAnyPath(FakeMediaProcessor):
    def decode(self, source, limits):
        if isinstance(source, Path):
            source = source.read_bytes()
        return super().decode(source, limits)


class FollowsLinks(FakeMediaProcessor):
    def decode(self, source, limits):
        if isinstance(source, Path):
            if not source.is_relative_to(limits.allowed_root) or ".." in source.parts:
                raise MediaError("outside")
            source = source.read_bytes()
        return super().decode(source, limits)


class LeavesAThread(FakeMediaProcessor):
    def __init__(self, checkpoint, options):
        super().__init__(checkpoint, options)
        threading.Thread(target=time.sleep, args=(6,), daemon=True, name="reader").start()


class ReplacesAFunction(FakeMediaProcessor):
    def __init__(self, checkpoint, options):
        super().__init__(checkpoint, options)
        before = torch.stack
        torch.stack = lambda *args, **given: before(*args, **given)


class AllowsBombs(FakeMediaProcessor):
    def __init__(self, checkpoint, options):
        super().__init__(checkpoint, options)
        Image.MAX_IMAGE_PIXELS = (Image.MAX_IMAGE_PIXELS or 0) + 1


class TokenOfVideos(FakeMediaProcessor):
    fields = {"models": ("qwen2_vl",)}  # noqa: RUF012
    token, markers = "<|video_pad|>", ("<|video_pad|>",)


BROKEN = [
    (OtherPixels, {"pixels_equal_the_reference"}, "sample 'one': tensors.'bytes'. differs from"),
    (OtherPixelsWithOptions, {"options_equal_the_reference"}, "with {'crop': True}: tensors"),
    (
        OneTokenMore,
        {"tokens_equal_the_reference"},
        "sample 'one' has 7 tokens, the reference has 6",
    ),
    (
        HashesAPart,
        {"keys_change_with_every_byte", "*"},
        "sample 'one' and itself with byte -1 changed have the same key but other values",
    ),
    (IgnoresTheEnd, {"keys_change_with_every_byte"}, "twins are processed to the same values"),
    (
        ChangesTheItem,
        {"sources_are_left_as_they_are"},
        "processed twice differs, key was .* do not change the item",
    ),
    (RefusesTheLimit, {"limits_allow_what_they_say"}, "with max_bytes=13 it is refused: the fake"),
    (ReadsAnyPath, {"files_outside_the_root_are_refused"}, "item.bin' was read, outside allowed_"),
    (FollowsLinks, {"files_outside_the_root_are_refused"}, "link.bin' was read, outside allowed_"),
    (LeavesAThread, {"close_leaves_nothing"}, "the thread 'reader' still runs, one of 1; end it"),
    (ReplacesAFunction, {"close_leaves_nothing"}, "torch.stack is another object; do not replace"),
    (AllowsBombs, {"close_leaves_nothing"}, r"PIL.Image.MAX_IMAGE_PIXELS is \d+, it was \d+"),
    (TokenOfVideos, {"no_other_kind_has_the_token"}, "the videos of 'qwen-video', which serves"),
    # factory, failing checks, regex for the message of the first
    (OtherKind, {"builds"}, "`kind` is 'video', but the spec says 'image'; make them equal"),
    (
        lambda checkpoint, options: {},
        {"builds", "*"},
        "derive it from mmdeploy_llm.hooks.MediaProcessor",
    ),
    (NoToken, {"token_and_markers_are_texts"}, "set it to the text of the placeholder token"),
    (NoMarkers, {"token_and_markers_are_texts"}, "list the texts that mark the position"),
    (GivesATuple, {"samples_are_processed", "*"}, "returns a tuple; return a MediaInput"),
    (NoTokens, {"samples_are_processed"}, "num_tokens is 0; set it to an int above 0"),
    (changed(kind="video"), {"samples_are_processed"}, "has kind 'video'; set 'image'"),
    (changed(key=""), {"samples_are_processed", "*"}, "set it to a digest of content"),
    (with_tensor(torch.Tensor.double), {"tensors_are_ready"}, "convert it to float32"),
    (with_tensor(torch.Tensor.numpy), {"tensors_are_ready", "*"}, "make it a tensor with"),
    (
        with_tensor(lambda x: torch.stack([x, x]).t()),
        {"tensors_are_ready"},
        "is not contiguous; call .contiguous",
    ),
    (with_tensor(lambda x: x.float() * np.inf), {"tensors_are_ready"}, "contains NaN or infinity"),
    (
        with_tensor(lambda x: x.float().requires_grad_()),
        {"tensors_are_ready"},
        "requires a gradient; detach it",
    ),
    (with_tensor(lambda x: x.to("meta")), {"tensors_are_ready", "*"}, "leave it on the CPU"),
    (
        CountsOtherwise,
        {"count_tokens_equals_process"},
        "result of decode is 6, but process returns 7 tokens; compute both from one function",
    ),
    (PeeksOtherwise, {"count_tokens_equals_process"}, "result of peek is 12, but process returns"),
    (
        changed(prompt_text="<|image_pad|>\n"),
        {"prompt_text_holds_the_tokens"},
        "1 times, but num_tokens is 6; each embedding needs one placeholder",
    ),
    (
        changed(key=lambda key: uuid.uuid4().hex),
        {
            "keys_are_deterministic",
            "sources_are_left_as_they_are",
            "threads_do_not_disturb_each_other",
        },
        r"may depend only on the content and the options \(no time",
    ),
    (
        changed(key="the same for all pictures"),
        {
            "keys_change_with_every_byte",
            "keys_change_with_the_content",
            "keys_change_with_the_options",
        },
        "samples 'one' and 'two' have the same key.*; hash the content",
    ),
    (ForgetsBudgets, {"budgets_are_kept"}, "has 6 tokens with the budget 4, and 6 without"),
    (ForgetsOptions, {"keys_change_with_the_options"}, "hash all resolved options into the key"),
    (
        TakesAnything,
        {"corrupt_bytes_are_media_errors"},
        "were processed without an error; raise MediaError from mmdeploy_llm.errors",
    ),
    (
        OwnError,
        {"corrupt_bytes_are_media_errors", "damaged_samples_raise_nothing_else"},
        "raised ValueError: no fake image; raise MediaError instead",
    ),
    (
        SilentError,
        {"corrupt_bytes_are_media_errors", "damaged_samples_raise_nothing_else"},
        "has no message; say what was wrong",
    ),
    (
        StumblesOverShortFiles,
        {"damaged_samples_raise_nothing_else"},
        "truncated at byte .* raised IndexError: .*; raise MediaError instead",
    ),
    (
        NoLimits,
        {"limits_are_respected", "pixels_are_limited"},
        "but was processed; raise MediaLimitError in `decode`",
    ),
    (DecodesFirst, {"limits_are_respected"}, "raised MediaError: .* before the content is decoded"),
    (OneItemInSelf, {"threads_do_not_disturb_each_other"}, "in local variables, not in `self`"),
    (ClosesOnce, {"closes_twice"}, "the second close.. before any use raised IndexError"),
]


@pytest.fixture
def subject(factory):
    def make(processor, kind="image", **fields):
        given = {"samples": SAMPLES, "too_large": TOO_LARGE, "other_options": {"size": 3}}
        given |= getattr(processor, "fields", {})
        models = given.pop("models", ("*",))
        path = factory(processor)
        spec = MediaProcessorSpec(name="made-up", kind=kind, models=models, factory=path)
        checkpoint = Checkpoint(folder=Path("."), config=SimpleNamespace())
        return ProcessorSubject(spec=spec, checkpoint=checkpoint, **{**given, **fields})

    return make


@pytest.fixture
def shared(monkeypatch):
    """Puts back what broken processors replace; does not wait for their threads."""
    monkeypatch.setattr(left_over, "GRACE", 0.1)
    before = torch.stack, Image.MAX_IMAGE_PIXELS
    yield
    torch.stack, Image.MAX_IMAGE_PIXELS = before


@pytest.mark.one_is_quick
@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize(("processor", "checks", "message"), BROKEN)
def test_a_broken_processor_fails(subject, failures, demand_failures, processor, checks, message):
    demand_failures(failures(CHECKS, subject(processor)), CHECKS, checks, message)


def test_the_fake_one_passes(subject, failures):
    assert failures(CHECKS, subject(FakeMediaProcessor, item_options={"crop": True})) == {}


def test_a_broken_sample_is_named(subject, failures):
    samples = {**SAMPLES, "torn": b"FAKE 12x"}
    found = failures(CHECKS, subject(FakeMediaProcessor, samples=samples))
    assert "sample 'torn': decode and process raised MediaError" in found["samples_are_processed"]


def test_every_check_has_a_broken_processor():
    covered = {next(name for name in NAMES if name in checks) for _, checks, _ in BROKEN}
    assert covered | {*BUGS.values()} >= set(NAMES)
