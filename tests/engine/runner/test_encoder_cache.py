"""The encoder cache: batches, shape checks, and items that fail alone."""

from contextlib import nullcontext

import pytest
import torch

from mmdeploy_llm.engine.runner import encoder_cache
from mmdeploy_llm.engine.runner.encoder_cache import EncoderCache
from mmdeploy_llm.request import MediaInput


def item(key, num_tokens=2, size=8, kind="image"):
    tensors = {"pixels": torch.full((num_tokens, size), float(len(key)))}
    return MediaInput(kind=kind, tensors=tensors, num_tokens=num_tokens, key=key)


class FakeModel:
    hidden_size = 3

    def __init__(self, bad=(), shape=None):
        self.calls, self.bad, self.shape = [], bad, shape

    def encode_media(self, items):
        self.calls.append([one.key for one in items])
        if any(one.key in self.bad for one in items):
            raise RuntimeError("bad pixels")
        shape = self.shape or (lambda one: (one.num_tokens, 3))
        return [torch.full(shape(one), float(ord(one.key[0]))) for one in items]


def test_items_are_encoded_together_and_kept_apart():
    model = FakeModel()
    cache = EncoderCache(model)
    cache.encode([item("a"), item("b")])
    assert model.calls == [["a", "b"]]
    assert cache.get("a")[0, 0] == ord("a")
    assert cache.get("b")[0, 0] == ord("b")


def test_kinds_do_not_share_a_call():
    model = FakeModel()
    EncoderCache(model).encode([item("a"), item("b", kind="video"), item("c", kind="video")])
    assert model.calls == [["a"], ["b", "c"]]


def test_large_batches_are_split(monkeypatch):
    monkeypatch.setattr(encoder_cache, "values_per_call", lambda device: 40)
    model = FakeModel()
    EncoderCache(model).encode([item("a"), item("b"), item("c"), item("d", num_tokens=9)])
    assert model.calls == [["a", "b"], ["c"], ["d"]]


def test_a_failing_item_fails_alone():
    model = FakeModel(bad={"b"})
    cache = EncoderCache(model)
    cache.encode([item("a"), item("b"), item("c")])
    assert cache.get("a") is not None
    assert cache.get("c") is not None
    assert cache.get("b") is None
    assert "bad pixels" in cache.failure("b")


@pytest.mark.parametrize("shape", [lambda one: (1, 3), lambda one: (one.num_tokens, 4)])
def test_a_wrong_shape_is_a_failure_that_names_the_shapes(shape):
    cache = EncoderCache(FakeModel(shape=shape))
    cache.encode([item("a")])
    assert cache.get("a") is None
    assert "for an item of 2 tokens, must be (2, 3)" in cache.failure("a")


def test_forgotten_keys_are_gone():
    cache = EncoderCache(FakeModel())
    cache.encode([item("a")])
    cache.forget(["a", "never seen"])
    assert cache.get("a") is None


def test_the_next_items_are_copied_before_the_encoder_is_called(monkeypatch):
    monkeypatch.setattr(encoder_cache, "values_per_call", lambda device: 16)
    calls = []
    model = FakeModel()
    cache = EncoderCache(model)

    class Copies:
        def start(self, items):
            calls.append(("start", *(one.key for one in items)))
            return list(items)

        def wait_for(self, items):
            calls.append(("wait", *(one.key for one in items)))
            return items

    cache._copies = Copies()
    cache.encode([item("a"), item("b"), item("c")])
    assert calls == [("start", "a"), ("start", "b"), ("wait", "a"), ("start", "c"), ("wait", "b"),
                    ("wait", "c")]  # fmt: skip
    assert model.calls == [["a"], ["b"], ["c"]]


def test_items_that_do_not_fit_on_the_card_are_passed_from_the_host(monkeypatch):
    def full(item):
        raise torch.OutOfMemoryError("CUDA out of memory")

    copies = encoder_cache.MediaCopies(torch.device("cpu"))
    copies._stream = object()
    copies._sent = full
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    given = [item("a"), item("b")]
    assert copies.start(given) == given


def test_embeddings_that_are_given_are_not_computed():
    """They share a step with items that are encoded, one of which fails."""
    model = FakeModel(bad={"b"})
    cache = EncoderCache(model)
    rows = torch.rand(2, 3)
    given = MediaInput(kind="image", tensors={}, num_tokens=2, key="given", embeds=rows)
    cache.encode([item("a"), given, item("b")])
    assert cache.get("given").equal(rows)
    assert model.calls == [["a"], ["b"], ["b"]]
    assert cache.get("a") is not None
    assert "could not be encoded" in cache.failure("b")
    cache.forget(["given"])
    assert cache.get("given") is None
