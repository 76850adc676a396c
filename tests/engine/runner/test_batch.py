"""The input arrays of a step, compared with a plain loop over its tokens."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from mmdeploy_llm.engine.runner import batch as batches
from mmdeploy_llm.engine.runner import step_inputs
from mmdeploy_llm.engine.runner.batch import prepare, spans_of_items, spans_of_prompts
from mmdeploy_llm.engine.runner.slots import Slots
from mmdeploy_llm.layers import transfer
from mmdeploy_llm.request import MediaInput, MediaSpan
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.plan import NewRequest, ScheduledTokens

BLOCK_SIZE = 4
CPU = torch.device("cpu")


def new(request_id, token_ids, prompt_len=None, media=()):
    return NewRequest(
        request_id=request_id,
        token_ids=tuple(token_ids),
        prompt_len=prompt_len or len(token_ids),
        params=SamplingParams(),
        eos_token_ids=frozenset(),
        media=media,
    )


def span(offset, count, key="k"):
    item = MediaInput(kind="image", tensors={}, num_tokens=count, key=key)
    return MediaSpan(offset=offset, item=item)


@pytest.fixture
def slots():
    """Slots with two requests. a: 10 prompt tokens and 2 generated; b: 6 prompt tokens with a media
    span at 2..5."""
    slots = Slots(3, 32, BLOCK_SIZE)
    slots.add(new("a", range(100, 112), prompt_len=10), None)
    positions = np.array([[0, 1, 2, 2, 2, 3], [0, 1, 2, 3, 4, 5], [0, 1, 2, 2, 3, 4]])
    slots.add(new("b", range(200, 206), media=(span(2, 3),)), positions)
    slots.extend_tables(
        [
            ScheduledTokens(request_id="a", start=0, num_tokens=1, new_block_ids=(9, 4)),
            ScheduledTokens(request_id="b", start=0, num_tokens=1, new_block_ids=(7,)),
        ]
    )
    slots.extend_tables(
        [
            ScheduledTokens(request_id="a", start=0, num_tokens=1, new_block_ids=(2,)),
            ScheduledTokens(request_id="b", start=0, num_tokens=1, new_block_ids=(1,)),
        ]
    )
    return slots


def step(*items):
    return [
        ScheduledTokens(request_id=request_id, start=start, num_tokens=count)
        for request_id, start, count in items
    ]


def test_tokens_positions_and_slots(slots):
    batch = prepare(step(("a", 11, 1), ("b", 1, 4)), slots, BLOCK_SIZE, 0, CPU)
    assert batch.tensors.token_ids.tolist() == [111, 201, 202, 203, 204]
    assert batch.tensors.positions.tolist() == [11, 1, 2, 3, 4]
    assert batch.tensors.in_prompt.tolist() == [False, True, True, True, True]
    assert batch.has_prompt
    # a: token 11 is in its third block (2), at 3. b: tokens 1-3 in block 7, token 4 in block 1.
    assert batch.tensors.layout.slots.tolist() == [
        2 * 4 + 3,
        7 * 4 + 1,
        7 * 4 + 2,
        7 * 4 + 3,
        1 * 4 + 0,
    ]
    assert batch.tensors.layout.block_tables.tolist() == [[9, 4, 2], [7, 1, 0]]
    assert batch.tensors.layout.query_lens == (1, 4)
    assert batch.tensors.layout.context_lens == (12, 5)
    assert batch.tensors.layout.num_decode == 1
    assert batch.last_rows.tolist() == [0, 4]
    assert batch.ends.tolist() == [12, 5]


@pytest.mark.parametrize(
    ("items", "num_decode"),
    [([("a", 11, 1), ("b", 5, 1)], 2), ([("a", 2, 3), ("b", 0, 2)], 0), ([("a", 0, 9)], 0)],
)
def test_how_many_decode(slots, items, num_decode):
    assert prepare(step(*items), slots, BLOCK_SIZE, 0, CPU).tensors.layout.num_decode == num_decode


@pytest.mark.parametrize(("place", "has_prompt"), [(8, True), (9, True), (10, False), (11, False)])
def test_whether_a_token_is_of_a_prompt(slots, place, has_prompt):
    batch = prepare(step(("a", place, 1)), slots, BLOCK_SIZE, 0, CPU)
    assert batch.has_prompt == has_prompt


def test_mrope_positions(slots):
    """Positions in the prompt of b come from the model; tokens after it continue from their largest
    value + 1 on all axes."""
    batch = prepare(step(("b", 1, 5)), slots, BLOCK_SIZE, 3, CPU)
    assert batch.tensors.positions.tolist() == [[1, 2, 2, 2, 3], [1, 2, 3, 4, 5], [1, 2, 2, 3, 4]]
    slots.append(np.array([1]), np.array([6]), [206])
    batch = prepare(step(("a", 11, 1), ("b", 6, 1)), slots, BLOCK_SIZE, 3, CPU)
    assert batch.tensors.positions.tolist() == [[11, 6], [11, 6], [11, 6]]
    assert batch.tensors.token_ids.tolist() == [111, 206]


def test_positions_on_four_axes(slots):
    """A model may have axes of its own besides time, height and width."""
    positions = np.array([[0, 1, 2, 3], [0, 0, 1, 3], [0, 0, 0, 3], [0, 9, 9, 3]])
    slots.add(new("c", range(300, 304), media=(span(1, 2),)), positions)
    batch = prepare(step(("c", 1, 3), ("a", 11, 1)), slots, BLOCK_SIZE, 4, CPU)
    wanted = [[1, 2, 3, 11], [0, 1, 3, 11], [0, 0, 3, 11], [9, 9, 3, 11]]
    assert batch.tensors.positions.tolist() == wanted


@pytest.mark.parametrize(
    ("start", "count", "pieces"),
    [
        (0, 2, []),
        (0, 3, [(0, 1, 2)]),
        (1, 5, [(0, 3, 1)]),
        (3, 1, [(1, 2, 0)]),
        (5, 1, []),
    ],
)
def test_media_pieces(slots, start, count, pieces):
    batch = prepare(step(("b", start, count)), slots, BLOCK_SIZE, 0, CPU)
    found = [(piece.begin, piece.end, piece.rows.tolist()) for piece in batch.media]
    assert found == [
        (begin, end, list(range(row, row + end - begin))) for begin, end, row in pieces
    ]


@pytest.mark.parametrize(
    ("start", "count", "pieces"),
    [
        (0, 2, []),
        (1, 7, [(0, 4, [1, 2, 4, 5])]),
        (3, 1, [(1, 2, [0])]),
        (4, 1, []),  # a mark between two rows of the image
        (4, 3, [(2, 4, [1, 2])]),
        (7, 1, []),
    ],
)
def test_media_pieces_with_marks_between(slots, start, count, pieces):
    slots.add(new("c", range(300, 308), media=(broken_span(),)), None)
    batch = prepare(step(("c", start, count)), slots, BLOCK_SIZE, 0, CPU)
    found = [(piece.begin, piece.end, piece.rows.tolist()) for piece in batch.media]
    assert found == pieces


def broken_span():
    """Returns a span whose media tokens are at 2, 3, 5 and 6, with other tokens between."""
    item = MediaInput(kind="image", tensors={}, num_tokens=4, key="k")
    return MediaSpan(offset=2, item=item, rows=(0, 1, 3, 4))


def test_runs_of_atomic_media_reach_the_attention(slots):
    slots.add(new("c", range(300, 308), media=(broken_span(),)), None)
    items = step(("a", 10, 1), ("c", 0, 6))
    spans = prepare(items, slots, BLOCK_SIZE, 0, CPU, spans_of=spans_of_items).tensors.layout.spans
    assert spans == ((1, 2, 4), (1, 5, 7))
    assert broken_span().end == 7
    assert prepare(items, slots, BLOCK_SIZE, 0, CPU).tensors.layout.spans == ()


def test_sounds_are_no_spans(slots):
    """In a model whose images see each other a sound is heard as text is read."""
    sound = MediaInput(kind="audio", tensors={}, num_tokens=3, key="s")
    media = (MediaSpan(offset=0, item=sound), replace(broken_span(), offset=4))
    slots.add(new("c", range(300, 312), media=media), None)
    assert spans_of_items(step(("c", 0, 12)), slots) == ((0, 4, 6), (0, 7, 9))


def test_a_whole_prompt_with_media_is_a_span(slots):
    """Also with generated tokens after it, which are causal; a prompt of text is not."""
    slots.add(new("c", range(300, 310), prompt_len=8, media=(broken_span(),)), None)
    assert spans_of_prompts(step(("a", 0, 3), ("c", 0, 10)), slots) == ((1, 0, 8),)
    assert spans_of_prompts(step(("c", 9, 1)), slots) == ()


def test_lengths_lie_on_another_device(slots, monkeypatch):
    """On a device other than the CPU the layout carries the lengths as tensors; `meta` plays that
    device here."""
    monkeypatch.setattr(batches, "to_device_together", lambda arrays, _: transfer.pack(arrays, CPU))
    items = step(("a", 11, 1), ("b", 1, 4))
    lengths = prepare(items, slots, BLOCK_SIZE, 0, torch.device("meta")).tensors.layout.lengths
    assert lengths.query_starts.tolist() == [0, 1, 5]
    assert lengths.context_lens.tolist() == [12, 5]
    assert {lengths.query_starts.dtype, lengths.context_lens.dtype} == {torch.int32}
    assert (lengths.max_query, lengths.max_context) == (4, 12)
    assert prepare(items, slots, BLOCK_SIZE, 0, CPU).tensors.layout.lengths is None


def long_and_short(device, frame_for=None):
    """The step of two sequences in slots with `long_after` 7: the first started with 8 tokens, the
    second with 5."""
    slots = Slots(3, 32, BLOCK_SIZE, long_after=7)
    for request_id, count in (("a", 8), ("b", 5)):
        slots.add(new(request_id, range(count)), None)
    items = step(("a", 7, 1), ("b", 4, 1 if frame_for else 2))
    return prepare(items, slots, BLOCK_SIZE, 0, device, frame_for=frame_for).tensors


def test_each_token_knows_whether_its_sequence_is_long():
    assert long_and_short(CPU).is_long.tolist() == [True, False, False]
    on_device = long_and_short(torch.device("meta"))
    assert (on_device.is_long.shape, on_device.is_long.dtype) == ((3,), torch.bool)
    assert on_device.layout.lengths.query_starts.shape == (3,)


def test_without_long_after_no_token_is_long(slots):
    assert prepare(step(("a", 11, 1)), slots, BLOCK_SIZE, 0, CPU).tensors.is_long is None


class TestDecodeFrame:
    def frame(self, num_axes=0, num_seqs=4, num_blocks=6, **options):
        return step_inputs.DecodeFrame(
            num_seqs=num_seqs,
            num_blocks=num_blocks,
            max_context=24,
            num_axes=num_axes,
            device=CPU,
            **options,
        )

    def test_holds_the_long_sequences(self):
        frame = self.frame(has_long=True)
        tensors = long_and_short(CPU, frame_for=lambda _: frame)
        assert tensors.is_long is frame.tensors.is_long
        assert tensors.is_long.tolist() == [True, False, False, False]
        assert tensors.layout.slots.tolist() == [3, 0, -1, -1]

    @pytest.mark.parametrize("num_axes", [0, 3])
    def test_holds_the_step_and_padding(self, slots, num_axes):
        frame = self.frame(num_axes)
        for items in (step(("a", 11, 1), ("b", 5, 1)), step(("b", 0, 1))):  # the second is smaller
            batch = prepare(items, slots, BLOCK_SIZE, num_axes, CPU, frame_for=lambda _: frame)
            plain = prepare(items, slots, BLOCK_SIZE, num_axes, CPU)
            count, width = plain.tensors.layout.block_tables.shape
            assert batch.frame is frame
            assert batch.tensors.token_ids is frame.tensors.token_ids
            for name in ("token_ids", "positions", "in_prompt"):
                padded = getattr(batch.tensors, name)
                assert torch.equal(padded[..., :count], getattr(plain.tensors, name))
                assert not padded[..., count:].any()
            layout = batch.tensors.layout
            assert (layout.num_decode, layout.query_lens, layout.context_lens) == (4, (), ())
            assert layout.slots.tolist() == [
                *plain.tensors.layout.slots.tolist(),
                *[-1] * (4 - count),
            ]
            padded = [*plain.tensors.layout.context_lens, *[1] * (4 - count)]
            assert layout.lengths.context_lens.tolist() == padded
            assert layout.lengths.query_starts.tolist() == [0, 1, 2, 3, 4]
            assert (layout.lengths.max_query, layout.lengths.max_context) == (1, 24)
            assert torch.equal(
                layout.block_tables[:count, :width], plain.tensors.layout.block_tables
            )
            assert not layout.block_tables[count:, 0].any()

    def test_tensors_keep_their_place(self, slots):
        frame = self.frame()
        before = frame.tensors
        places = [before.token_ids.data_ptr(), before.layout.block_tables.data_ptr()]
        prepare(step(("a", 11, 1)), slots, BLOCK_SIZE, 0, CPU, frame_for=lambda _: frame)
        after = frame.tensors
        assert [after.token_ids.data_ptr(), after.layout.block_tables.data_ptr()] == places

    def test_a_new_frame_is_all_padding(self):
        layout = self.frame().tensors.layout
        assert layout.is_padded
        assert layout.slots.tolist() == [-1] * 4
        assert layout.lengths.context_lens.tolist() == [1] * 4

    @pytest.mark.parametrize(
        ("items", "fits"),
        [
            ([("a", 11, 1), ("b", 5, 1)], True),
            ([("a", 3, 1)], True),
            ([("a", 3, 2)], False),
            ([("a", 11, 1), ("b", 0, 2)], False),
        ],
    )
    def test_fits_decode_steps_of_its_size(self, slots, items, fits):
        asked = []
        frame = self.frame(num_seqs=2, num_blocks=3)

        def choose(arrays):
            asked.append(frame.fits(arrays))
            assert not self.frame(num_seqs=0).fits(arrays)
            assert not self.frame(num_blocks=0).fits(arrays)

        prepare(step(*items), slots, BLOCK_SIZE, 0, CPU, frame_for=choose)
        assert asked == [fits]

    def test_steps_with_media_have_no_frame(self, slots):
        def choose(_):
            raise AssertionError("asked for a step with media")

        for spans_of in (None, spans_of_items):
            batch = prepare(
                step(("b", 3, 1)),
                slots,
                BLOCK_SIZE,
                0,
                CPU,
                spans_of=spans_of,
                frame_for=choose,
            )
            assert batch.frame is None


class TestSlots:
    def test_dropped_slots_are_used_again(self):
        slots = Slots(2, 8, BLOCK_SIZE)
        first = slots.add(new("a", [1]), None).index
        slots.add(new("b", [1]), None)
        assert slots.drop("a") == first
        assert slots.drop("a") is None
        assert slots.add(new("c", [1]), None).index == first
        assert "a" not in slots
        assert len(slots) == 2

    def test_a_new_request_starts_with_an_empty_table(self):
        slots = Slots(1, 16, BLOCK_SIZE)
        for request_id, block in (("a", 5), ("b", 3)):
            slots.add(new(request_id, [1]), None)
            item = ScheduledTokens(
                request_id=request_id, start=0, num_tokens=1, new_block_ids=(block,)
            )
            slots.extend_tables([item])
            assert slots.tables[0].ids[0, 0] == block
            slots.drop(request_id)
