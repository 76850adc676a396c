"""Two kinds of media that one text would stand for are refused when a model is loaded."""

import pytest

from mmdeploy_llm.errors import PluginConflictError, PluginContractError
from mmdeploy_llm.hooks import MediaProcessor, MediaSplitter


def reader(kind, token, *markers, written=None):
    class Reader(MediaProcessor):
        def decode(self, source, limits):
            raise NotImplementedError

        process = count_tokens = decode

    Reader.kind, Reader.token, Reader.markers = kind, token, markers
    Reader.written_token = written
    return Reader()


def splitter(*markers):
    class Splitter(MediaSplitter):
        kind = "paper"

        def split(self, source, options, limits):
            raise NotImplementedError

    Splitter.markers = markers
    return Splitter()


@pytest.mark.parametrize(
    ("token", "markers", "message"),
    [
        ("<|image_pad|>", ("<chart>",), r"both use '<\|image_pad\|>'"),
        ("<|start|>", ("<|image@placeholder|>",), r"both use '<\|image@placeholder\|>'"),
        (
            "<|start|>",
            ("<|image_pad|> of a chart",),
            r"'<\|image_pad\|>' begins '<\|image_pad",
        ),
        ("<|start|>", ("a chart: <|image_pad|>",), r"'<\|image_pad\|>' ends 'a chart: "),
        ("<|start|>", ("<|image",), r"'<\|image' begins '<\|image"),
    ],
)
def test_texts_of_two_kinds(make_intake, processor, token, markers, message):
    chart = reader("chart", token, *markers)
    with pytest.raises(PluginConflictError, match=message) as error:
        make_intake(processors={"image": processor, "chart": chart}, owners={"chart": "plugin c"})
    assert "FakeProcessor (plugin tests.engine.intake.conftest) and plugin c cannot serve" in str(
        error.value
    )
    assert "blocked_plugins" in str(error.value)


def test_a_splitter_and_a_processor(make_intake):
    with pytest.raises(PluginConflictError, match="Splitter"):
        make_intake(splitters={"paper": splitter("<|image_pad|>")}, yields={"paper": "image"})


def test_the_same_ids(make_intake, processor, raw_tokenizer):
    """A normaliser may give two texts one token."""

    class Folding:
        def __init__(self, tokenizer):
            self._own = tokenizer

        def __getattr__(self, name):
            return getattr(self._own, name)

        def token_ids(self, text):
            return self._own.token_ids(text.lower())

    from mmdeploy_llm.engine.intake.tokenizer import PromptTokenizer

    chart = reader("chart", "<|start|>", "<|IMAGE_PAD|>")
    with pytest.raises(PluginConflictError, match=r"'<\|IMAGE_PAD\|>' are the same tokens"):
        make_intake(
            tokenizer=Folding(PromptTokenizer(raw_tokenizer)),
            processors={"image": processor, "chart": chart},
        )


@pytest.mark.parametrize("text", ["a scan", "<s1><s1>", "<s1><|image_pad|>"])
def test_a_part_text_has_one_marker(make_intake, processor, text):
    scan = reader("scan", "<|start|>", "<s1>")
    with pytest.raises(PluginContractError, match="part_text must have one marker of the scans"):
        make_intake(processors={"image": processor, "scan": scan}, part_texts={"scan": text})


def test_what_is_no_clash(make_intake, processor):
    """A video that is written with the tokens of images, and markers that only share letters."""
    video = reader("video", "<|start|>", "<|video|>", written="<|image_pad|>")
    make_intake(processors={"image": processor, "video": video})
