"""Priority and deadline of a prompt: where they are set, and what ends at the deadline."""

import threading
import time

import numpy as np
import pytest

from mmdeploy_llm.engine.intake.prompts import deadline_of, priority_of
from mmdeploy_llm.errors import MediaTimeoutError, RequestError, RequestTimeoutError
from mmdeploy_llm.hooks import MediaInput, MediaLimits
from mmdeploy_llm.media.loading.cache import ByteCache
from mmdeploy_llm.values.deadline import Deadline
from mmdeploy_llm.values.params import SamplingParams

PARAMS = SamplingParams(max_tokens=4)
LATE = "the request was not finished within its timeout of 0.5 s: "


@pytest.fixture
def awake():
    """An event that slow calls wait for; set at the end."""
    event = threading.Event()
    yield event
    event.set()


def with_media(*sources):
    text = "<|image_pad|>" * len(sources)
    return {"prompt": text, "multimodal_data": {"image": list(sources)}}


def test_they_are_set_by_the_call(intake):
    (request,) = intake.accept("hello", PARAMS)
    assert (request.priority, request.deadline) == (0, None)
    deadline = Deadline.after(5)
    (request,) = intake.accept("hello", PARAMS, priority=3, deadline=deadline)
    assert (request.priority, request.deadline) == (3, deadline)


def test_all_samples_of_a_prompt_share_them(intake):
    params, deadline = SamplingParams(max_tokens=4, n=3), Deadline.after(5)
    requests = intake.accept("hello", params, priority=1, deadline=deadline)
    assert {request.priority for request in requests} == {1}
    assert len({request.deadline for request in requests}) == 1


@pytest.mark.parametrize("priority", [1.5, "1", True, [1], 2**63, -(10**400)])
def test_a_wrong_priority_is_the_requests_error(priority):
    with pytest.raises(RequestError, match="priority must be a whole number of 64 bits, got"):
        priority_of({"prompt": "hello", "priority": priority})
    with pytest.raises(RequestError, match="priority must be a whole number of 64 bits, got"):
        priority_of("hello", priority)


def test_they_can_be_read_before_the_prompt_is():
    assert priority_of("hello", 4) == 4
    assert priority_of({"prompt": "hello", "priority": np.int64(-2)}, 4) == -2
    assert priority_of({"messages": [], "priority": 2}) == 2
    assert deadline_of("hello") is None
    assert deadline_of("hello", 5).seconds == 5
    assert deadline_of({"prompt": "hello", "timeout": 3}, 5).seconds == 3
    assert deadline_of({"prompt": "hello", "timeout": 7}, 5).seconds == 5
    with pytest.raises(RequestError, match="timeout"):
        deadline_of({"prompt": "hello", "timeout": "soon"})
    with pytest.raises(RequestError, match=r"timeout must be .*, got -1"):
        deadline_of({"prompt": "hello", "timeout": -1})


def test_a_prompt_that_waited_too_long_is_not_prepared(intake, processor, clock):
    deadline = Deadline.after(0.5)
    clock.pass_by(0.51)
    with pytest.raises(RequestTimeoutError, match=LATE + "it waited to be prepared"):
        intake.accept(with_media(b"5"), PARAMS, deadline=deadline)
    assert processor.calls == []


@pytest.mark.full
@pytest.mark.parametrize("method", ["decode", "process"])
def test_preparing_media_ends_at_the_deadline(intake, processor, awake, method, monkeypatch):
    monkeypatch.setattr(processor, method, lambda *args: awake.wait(120))
    start = time.monotonic()
    with pytest.raises(RequestTimeoutError, match=LATE + "its image was being prepared"):
        intake.accept(with_media(b"5"), PARAMS, deadline=Deadline.after(0.5))
    assert time.monotonic() - start < 60


@pytest.mark.full
def test_fetching_and_reading_end_at_the_deadline(make_intake, awake):
    def fetch(ref, limits):
        assert 0 < limits.fetch_timeout <= 0.5
        raise MediaTimeoutError("not fetched")

    class Pipe:
        def read(self, count):
            awake.wait(120)

    intake = make_intake(fetch=fetch)
    for source in ("http://example.com/5", Pipe()):
        with pytest.raises(RequestTimeoutError, match=LATE + "its image was being prepared"):
            intake.accept(with_media(source), PARAMS, deadline=Deadline.after(0.5))


def test_a_timeout_that_is_not_the_requests_keeps_its_message(make_intake):
    def fetch(ref, limits):
        raise MediaTimeoutError("not fetched; raise media_fetch_timeout")

    intake = make_intake(fetch=fetch)
    for deadline in (None, Deadline.after(60)):
        with pytest.raises(MediaTimeoutError, match="raise media_fetch_timeout"):
            intake.accept(with_media("http://example.com/5"), PARAMS, deadline=deadline)


def test_the_limits_of_a_request_end_at_its_deadline():
    limits = MediaLimits(fetch_timeout=3.0, decode_timeout=60.0)
    deadline = Deadline.after(10)
    own = limits.until(deadline)
    assert (own.fetch_timeout, own.deadline) == (3.0, deadline)
    assert 9 < own.decode_timeout <= 10
    assert limits.deadline is None


class TestSharedItems:
    """Two requests with the same item, one of which runs out of time."""

    @pytest.fixture
    def cache(self):
        return ByteCache(1000, lambda item: 1)

    def begin(self, cache, make):
        """Makes the item in another thread; returns that thread and its errors."""
        errors, begun = [], threading.Event()

        def run():
            try:
                cache.get_or_make("k", lambda: begun.set() or make())
            except RequestTimeoutError as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        assert begun.wait(60)
        return thread, errors

    def test_the_one_that_waits_makes_it_itself(self, cache, awake):
        def late():
            awake.wait(120)
            raise Deadline.after(1).error("its image was being prepared")

        thread, errors = self.begin(cache, late)
        threading.Timer(0.1, awake.set).start()
        made = MediaInput(kind="image", tensors={}, num_tokens=1, key="k")
        assert cache.get_or_make("k", lambda: made) is made
        thread.join()
        assert len(errors) == 1

    @pytest.mark.full
    def test_the_one_that_waits_ends_at_its_own_deadline(self, cache, awake):
        thread, errors = self.begin(cache, lambda: awake.wait(120))
        with pytest.raises(RequestTimeoutError, match=LATE + "another request was preparing"):
            cache.get_or_make("k", list, Deadline.after(0.5))
        awake.set()
        thread.join()
        assert errors == []
        assert cache.get_or_make("k", list) is True
