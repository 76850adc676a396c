import pytest
import torch
from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.hooks import MediaLimits, MediaSpan
from mmdeploy_llm.intake.checkpoint import read_checkpoint
from mmdeploy_llm.testing import (
    MediaProcessorConformance,
    ModelConformance,
    ParserExample,
    PluginConformance,
    ReasoningParserConformance,
)
from mmdeploy_llm.testing.reference import Reference
from tiny import write_tiny_llava

from minimal_llm import provide_media_processors, provide_models, provide_reasoning_parsers
from minimal_llm.charts import MAX_BARS, ChartProcessor


class TestPlugin(PluginConformance):
    plugin = "minimal_llm"


class TestParser(ReasoningParserConformance):
    spec = provide_reasoning_parsers()[0]
    examples = (
        ParserExample(
            text="<notes>red is high</notes>Red.", reasoning="red is high", content="Red."
        ),
        ParserExample(text="Red, says </notes>.", reasoning="", content="Red, says </notes>."),
        ParserExample(prompt="Q <notes>", text="hm</notes>Red.", reasoning="hm", content="Red."),
        ParserExample(text="<notes>no end", reasoning="no end", content=""),
    )


class TestProcessor(MediaProcessorConformance):
    spec = provide_media_processors()[0]
    samples = {"csv": b"red,3\nblue,5\n", "list": [("a", 1), ("b", 0.5)]}
    corrupt = {"no number": b"red,many\n", "no text": b"\xff\xfe\x00", "empty": b""}
    too_large = {"bars": ([("a", 1)] * (MAX_BARS + 1), MediaLimits())}
    item_options = {"colour": "red"}

    @staticmethod
    def checkpoint(folder):
        return read_checkpoint(write_tiny_llava(folder))

    def test_another_option_is_refused(self, subject):
        chart = subject.processor.decode([("a", 1)], MediaLimits())
        with pytest.raises(MediaError, match="'colour': blue, green, red"):
            subject.processor.process(chart, {"color": "red"})


class LlavaReference(Reference):
    """transformers' LLaVA, with the charts as its pictures."""

    def _media_inputs(self, ids, media):
        if not media:
            return {}
        return {"pixel_values": torch.stack([span.item.tensors["pixels"] for span in media])}


class TestModel(ModelConformance):
    spec = provide_models()[0]
    cases = {"text": (), "a chart": ((1,),), "two charts": ((2,), (3,))}
    write = staticmethod(write_tiny_llava)
    make_reference = LlavaReference

    @staticmethod
    def make_prompt(config, grids, *, seed=0):
        """Charts with as many bars as a case says, random text around them."""
        processor = ChartProcessor(Checkpoint(config), {})
        generator = torch.Generator().manual_seed(seed)

        def text(num_tokens):
            return torch.randint(40, 300, (num_tokens,), generator=generator).tolist()

        ids, media = text(7), []
        for (num_bars,) in grids:
            rows = [(str(bar), bar + seed) for bar in range(1, num_bars + 1)]
            item = processor.process(processor.decode(rows, MediaLimits()), {})
            media.append(MediaSpan(offset=len(ids), item=item))
            ids += [config.image_token_index] * item.num_tokens + text(4)
        return ids + text(6), media


class Checkpoint:
    """As much of a checkpoint as the processor reads."""

    def __init__(self, config):
        self.config, self.preprocessor = config, {}
