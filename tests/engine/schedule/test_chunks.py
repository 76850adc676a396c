"""Chunks: where the tokens of one step may end."""

import pytest

from mmdeploy_llm.engine.schedule.chunks import next_chunk, spans_between, whole_runs_end
from mmdeploy_llm.engine.schedule.encoder_budget import EncoderBudget

# tokens      0 1 [2 3 4 5] 6 [7 8 9] 10 11
MEDIA = ((2, "a", 4), (7, "b", 3))


@pytest.fixture
def chunk(kit):
    """Chunk of a 12 token prompt; `capacity`: tokens that the encoder cache holds."""

    def make(start, num_tokens, capacity=16, **config):
        encoder = EncoderBudget(capacity=capacity, step_capacity=16)
        encoder.start_step()
        request = kit.make_request("r", 12, media=MEDIA)
        return next_chunk(request, start, num_tokens, kit.make_config(**config), encoder)

    return make


@pytest.mark.parametrize(
    ("start", "num_tokens", "end", "keys"),
    [
        (0, 2, 2, []),
        (0, 3, 3, ["a"]),
        (4, 2, 6, ["a"]),
        (6, 1, 7, []),
        (3, 5, 8, ["a", "b"]),
        (0, 100, 12, ["a", "b"]),
        (10, 100, 12, []),
        (5, 0, 5, []),
    ],
)
def test_a_chunk_may_end_within_media(chunk, start, num_tokens, end, keys):
    found = chunk(start, num_tokens)
    assert (found.end, [item.key for item in found.media]) == (end, keys)
    assert not found.waits_for_encoder


@pytest.mark.parametrize(
    ("start", "num_tokens", "end"),
    [(0, 3, 2), (0, 5, 2), (0, 6, 6), (2, 3, 2), (2, 4, 6), (0, 9, 7), (0, 10, 10), (0, 99, 12)],
)
def test_atomic_media_are_not_split(chunk, start, num_tokens, end):
    found = chunk(start, num_tokens, atomic_media=True)
    assert found.end == end
    assert not found.waits_for_encoder


@pytest.mark.parametrize(
    ("start", "capacity", "end", "keys"),
    [(0, 7, 12, ["a", "b"]), (0, 6, 7, ["a"]), (0, 3, 2, []), (2, 3, 2, []), (4, 3, 4, [])],
)
def test_a_chunk_ends_before_media_that_cannot_be_encoded(chunk, start, capacity, end, keys):
    found = chunk(start, 100, capacity)
    assert (found.end, [item.key for item in found.media]) == (end, keys)
    assert found.waits_for_encoder == (end < 12)


def test_without_chunks_it_is_all_or_nothing(chunk):
    whole = {"enable_chunked_prefill": False, "max_num_batched_tokens": 64}
    assert chunk(0, 12, **whole).num_tokens == 12
    assert chunk(0, 11, **whole).num_tokens == 0
    assert chunk(0, 12, capacity=6, **whole).num_tokens == 0
    assert chunk(0, 12, capacity=6, **whole).media == ()


def test_spans_between(kit):
    request = kit.make_request("r", 12, media=MEDIA)
    offsets = {
        (0, 2): [],
        (0, 3): [2],
        (5, 6): [2],
        (6, 7): [],
        (5, 8): [2, 7],
        (0, 12): [2, 7],
        (10, 12): [],
        (9, 10): [7],
    }
    for (start, end), wanted in offsets.items():
        assert [span.offset for span in spans_between(request, start, end)] == wanted


def test_a_chunk_may_end_in_the_text_between_atomic_runs(kit):
    request = kit.make_request("r", 12, media=((2, "a", 6, (0, 1, 2, 5, 6, 7)),))
    for end, wanted in ((3, 2), (5, 5), (6, 6), (7, 7), (8, 7), (9, 7), (10, 10), (12, 12)):
        assert whole_runs_end(request, 0, end) == wanted


def test_whole_runs_end_is_not_before_the_start(kit):
    request = kit.make_request("r", 12, media=MEDIA)
    for end, wanted in ((2, 2), (3, 2), (6, 6), (8, 7), (10, 10), (12, 12)):
        assert whole_runs_end(request, 0, end) == wanted
    assert whole_runs_end(request, 4, 5) == 4
