"""Items whose prompt_text is more than placeholder tokens: row separators, text at their ends."""

import re

import pytest

from mmdeploy_llm.errors import CheckpointError, MediaError
from mmdeploy_llm.hooks import ITEM_NUMBER, MediaInput, MediaProcessor
from mmdeploy_llm.values.params import SamplingParams

PARAMS = SamplingParams()
PAD, START, END = "<|image_pad|>", "<|start|>", "<|end|>"


class RowsProcessor(MediaProcessor):
    """Reads b"3" as an image of 3 rows of 2 tokens, each after a separator, between words."""

    kind = "image"
    token = PAD
    markers = (START + PAD + END, "<|image@placeholder|>")

    def decode(self, source, limits):
        return 1 if source == b"data:,1" else int(source)

    def process(self, item, options):
        return MediaInput(
            kind="image",
            tensors={},
            num_tokens=2 * item,
            key=f"key{item}",
            prompt_text=self.prompt_text(item, options),
        )

    def count_tokens(self, item, options):
        return 2 * item

    def prompt_text(self, item, options):
        return "picture" + (START + PAD + PAD) * item + END + "s"


@pytest.fixture
def intake(make_intake):
    return make_intake(processors={"image": RowsProcessor()})


def image(rows):
    return "picture" + (START + PAD + PAD) * rows + END + "s"


def only(requests):
    (request,) = requests
    return request


@pytest.mark.parametrize("marker", [*RowsProcessor.markers, PAD])
def test_text_is_tokenized_with_the_items_in_it(intake, tokenizer, marker):
    prompt = {"prompt": f"the {marker} and {marker}.", "multimodal_data": {"image": [b"2", b"1"]}}
    request = only(intake.accept(prompt, PARAMS))
    ids = tokenizer.encode(f"the {image(2)} and {image(1)}.")
    assert request.prompt_token_ids == ids
    pads = [place for place, token_id in enumerate(ids) if token_id == tokenizer.token_id(PAD)]
    first, second = request.media
    assert [first.offset + row for row in first.rows] == pads[:4]
    assert first.runs == ((pads[0], pads[1] + 1), (pads[2], pads[3] + 1))
    assert (second.offset, second.end, second.rows) == (pads[4], pads[5] + 1, None)
    count = intake.count_tokens(prompt)
    assert (count.num_prompt_tokens, count.num_input_image_tokens) == (len(ids), 6)


@pytest.mark.full
def test_chat_is_tokenized_with_the_items_in_it(intake, tokenizer):
    content = [{"type": "text", "text": f"a {PAD}"}, {"type": "image_url", "image_url": "data:,1"}]
    template = (
        "{% for c in messages[0].content %}{% if c.type == 'image_url' %}<|image@placeholder|>"
        "{% else %}{{ c.text }}{% endif %}{% endfor %}."
    )
    messages = [{"role": "user", "content": content}]
    request = only(intake.accept({"messages": messages, "chat_template": template}, PARAMS))
    ids = tokenizer.encode("a ") + tokenizer.encode(PAD[:1]) + tokenizer.encode(PAD[1:])
    assert tokenizer.decode(request.prompt_token_ids) == f"a {PAD}{image(1)}."
    assert request.prompt_token_ids[: len(ids)] == ids  # typed, so it is plain text
    (span,) = request.media
    assert request.prompt_token_ids[span.offset : span.end] == [tokenizer.token_id(PAD)] * 2


def test_ids_take_the_item_at_single_placeholders_and_at_whole_markers(intake, tokenizer):
    pad, start, end = (tokenizer.token_id(text) for text in (PAD, START, END))
    for place in ([pad], [start, pad, end]):
        prompt = {"prompt_token_ids": [50, *place, 51], "multimodal_data": {"image": [b"2"]}}
        request = only(intake.accept(prompt, PARAMS))
        assert request.prompt_token_ids == [50, *tokenizer.encode(image(2)), 51]
        assert request.media[0].rows == (0, 1, 3, 4)
        assert intake.count_tokens(prompt).num_prompt_tokens == len(request.prompt_token_ids)


def test_items_are_numbered(make_intake, tokenizer):
    class Numbered(RowsProcessor):
        def prompt_text(self, item, options):
            return f"{ITEM_NUMBER}{PAD * 2 * item}"

    intake = make_intake(processors={"image": Numbered()})
    (pad,) = tokenizer.encode(PAD)
    images = {"image": [b"2", b"1"]}
    wanted = [*tokenizer.encode(f"0{PAD * 4}"), *tokenizer.encode(f"1{PAD * 2}")]
    for given in ({"prompt": PAD * 2}, {"prompt_token_ids": [pad] * 2}):
        request = only(intake.accept({**given, "multimodal_data": images}, PARAMS))
        assert request.prompt_token_ids == wanted


def test_counts_that_differ_are_errors(intake):
    for text, images in ((PAD, [b"1", b"1"]), (PAD + "a" + PAD, [b"1"])):
        with pytest.raises(MediaError, match="give one placeholder for each item"):
            intake.accept({"prompt": text, "multimodal_data": {"image": images}}, PARAMS)


def test_a_text_with_another_number_of_placeholders_is_the_processors_error(make_intake):
    class Wrong(RowsProcessor):
        def prompt_text(self, item, options):
            return PAD

    intake = make_intake(processors={"image": Wrong()})
    for prompt in ({"prompt": PAD}, {"prompt_token_ids": [6]}):
        with pytest.raises(MediaError, match="placeholder tokens"):
            intake.accept({**prompt, "multimodal_data": {"image": [b"2"]}}, PARAMS)


def test_where_items_meet(make_intake, tokenizer):
    """An edge token stands once between two items, and a space follows it before a word."""
    processor = RowsProcessor()
    processor.prompt_text = lambda item, options: START + PAD * item * 2 + START
    start = re.escape(START)
    processor.joints = ((start * 2, START), (rf"{start}(?=[^\s<])", f"{START} "))
    intake = make_intake(processors={"image": processor})
    images = {"image": [b"1", b"2"]}
    request = only(intake.accept({"prompt": f"a{PAD}{PAD}b", "multimodal_data": images}, PARAMS))
    text = f"a{START}{PAD * 2}{START}{PAD * 4}{START} b"
    assert request.prompt_token_ids == tokenizer.encode(text)
    assert [span.runs for span in request.media] == [((2, 4),), ((5, 9),)]


class TestWrittenToken:
    """A processor whose tokens are another kind's in the final prompt."""

    @pytest.fixture
    def intake(self, make_intake):
        processor = RowsProcessor()
        processor.written_token = "<|begin|>"
        return make_intake(processors={"image": processor})

    def test_the_final_prompt_has_it(self, intake, tokenizer):
        pad, written = tokenizer.token_id(PAD), tokenizer.token_id("<|begin|>")
        media = {"image": [b"2"]}
        ids = tokenizer.encode(f"the {image(2)}.")
        expected = [written if token_id == pad else token_id for token_id in ids]
        for prompt in (f"the {PAD}.", tokenizer.encode(f"the {PAD}.")):
            name = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
            request = only(intake.accept({name: prompt, "multimodal_data": media}, PARAMS))
            found = request.prompt_token_ids
            assert found.count(written) == 4
            assert pad not in found
            if name == "prompt":
                assert found == expected

    def test_a_tokenizer_without_it(self, make_intake):
        processor = RowsProcessor()
        processor.written_token = "<|nothing|>"
        with pytest.raises(CheckpointError, match=r"no token '<\|nothing\|>'"):
            make_intake(processors={"image": processor})


def test_a_marker_before_an_item_that_is_written_out_is_its_first_token(intake, tokenizer):
    """Gemma 3's template writes the token that its images begin with."""
    pad, marker = tokenizer.token_id(PAD), tokenizer.token_id("<|image@placeholder|>")
    media = {"multimodal_data": {"image": [b"1"]}}
    ids = [50, marker, pad, pad, 51]
    request = only(intake.accept({"prompt_token_ids": ids, **media}, PARAMS))
    assert request.prompt_token_ids == ids
    assert [(span.offset, span.end) for span in request.media] == [(2, 4)]
    media = {"multimodal_data": {"image": [b"1", b"1"]}}
    ids = [50, marker, pad, 51]
    request = only(intake.accept({"prompt_token_ids": ids, **media}, PARAMS))
    assert request.prompt_token_ids == [50, *tokenizer.encode(image(1)) * 2, 51]
