"""Kinds of media that a plugin adds work like image and video wherever media are named."""

import pytest

from mmdeploy_llm.errors import MediaLimitError, RequestError, UnsupportedMediaError
from mmdeploy_llm.hooks import MediaInput, MediaProcessor
from mmdeploy_llm.values.params import SamplingParams

TEMPLATE = (
    "{% for m in messages %}{% for c in m.content %}"
    "{% if c.type == 'chart' %}<chart>{% else %}{{ c.text }}{% endif %}{% endfor %}{% endfor %}"
)


class ChartProcessor(MediaProcessor):
    """A chart is a list; each of its numbers is a token."""

    kind = "chart"
    token = "<|start|>"
    markers = ("<chart>",)

    def decode(self, source, limits):
        return source

    def process(self, item, options):
        count = self.count_tokens(item, options)
        return MediaInput(kind="chart", tensors={}, num_tokens=count, key=f"{item}{options}")

    def count_tokens(self, item, options):
        return len(item) * options.get("times", 1)


@pytest.fixture
def intake(make_intake, processor):
    processors = {"image": processor, "chart": ChartProcessor()}
    return make_intake(processors=processors, chat_template=TEMPLATE)


def test_in_multimodal_data(intake, tokenizer):
    data = {"chart": [(3, 5, 4)], "image": [b"2"]}
    prompt = {"prompt": "a<|image_pad|>b<chart>", "multimodal_data": data}
    (request,) = intake.accept(prompt, SamplingParams())
    assert [(span.item.kind, span.item.num_tokens) for span in request.media] == [
        ("image", 2),
        ("chart", 3),
    ]
    assert request.prompt_token_ids.count(tokenizer.token_id("<|start|>")) == 3
    assert request.num_media_tokens("chart") == 3
    assert intake.count_tokens(prompt).num_prompt_tokens == len(request.prompt_token_ids)


def test_in_a_message_with_an_option(intake):
    part = {"type": "chart", "chart": [3, 5], "times": 2}
    content = [part, {"type": "text", "text": "typed <chart> is text"}]
    (request,) = intake.accept(
        {"messages": [{"role": "user", "content": content}]}, SamplingParams()
    )
    (span,) = request.media
    assert (span.item.kind, span.item.num_tokens) == ("chart", 4)


def test_one_of_a_prompt_unless_the_limit_is_raised(intake, make_intake):
    two = {"prompt": "<chart><chart>", "multimodal_data": {"chart": [[1], [2]]}}
    with pytest.raises(MediaLimitError, match=r"got 2 but limit is 1; .*\{'chart': 2\}"):
        intake.accept(two, SamplingParams())
    processors = {"chart": ChartProcessor()}
    raised = make_intake(processors=processors, limit_mm_per_prompt={"chart": 2})
    assert len(raised.accept(two, SamplingParams())[0].media) == 2


@pytest.mark.parametrize("kind", ["charts", "Chart", 5])
def test_a_kind_that_nobody_has(intake, kind):
    with pytest.raises(RequestError, match="unknown kind"):
        intake.accept({"prompt": "a", "multimodal_data": {kind: [1]}}, SamplingParams())
    part = {"type": kind, "chart": [1]}
    with pytest.raises(RequestError, match="Unknown content part type"):
        intake.accept({"messages": [{"role": "user", "content": [part]}]}, SamplingParams())


def test_without_a_processor_of_the_kind_it_is_unknown(make_intake):
    prompt = {"prompt": "a", "multimodal_data": {"chart": [1]}}
    with pytest.raises(RequestError, match="unknown kind 'chart'; known: image, video"):
        make_intake().accept(prompt, SamplingParams())
    video = {"prompt": "a", "multimodal_data": {"video": [b"1"]}}
    with pytest.raises(UnsupportedMediaError):
        make_intake().accept(video, SamplingParams())
