from pathlib import Path

import pytest
import torch
from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.hooks import Checkpoint, MediaLimits, MediaSpan
from mmdeploy_llm.testing import (
    MediaProcessorConformance,
    ModelConformance,
    ParserExample,
    PluginConformance,
    ReasoningParserConformance,
)
from tiny import write_tiny_llava
from transformers import AutoConfig, LlavaForConditionalGeneration

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
        return Checkpoint(
            folder=folder, config=AutoConfig.from_pretrained(write_tiny_llava(folder))
        )

    def test_another_option_is_refused(self, subject):
        chart = subject.processor.decode([("a", 1)], MediaLimits())
        with pytest.raises(MediaError, match="'colour': blue, green, red"):
            subject.processor.process(chart, {"color": "red"})


class Reference:
    """Runs transformers' LLaVA with the charts as its pictures."""

    def __init__(self, folder):
        self.model = LlavaForConditionalGeneration.from_pretrained(folder).eval()
        self.config = self.model.config

    def logits(self, ids, media=()):
        with torch.inference_mode():
            return self.model(**self.inputs(ids, media)).logits[0]

    def generate(self, ids, num_tokens, media=()):
        options = {"max_new_tokens": num_tokens, "do_sample": False, "eos_token_id": None}
        out = self.model.generate(**self.inputs(ids, media), **options)
        return out[0, len(ids) :].tolist()

    def inputs(self, ids, media):
        ids = torch.tensor([ids])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if media:
            inputs["pixel_values"] = torch.stack([span.item.tensors["pixels"] for span in media])
        return inputs


class TestModel(ModelConformance):
    spec = provide_models()[0]
    cases = {"text": (), "a chart": ((1,),), "two charts": ((2,), (3,))}
    write = staticmethod(write_tiny_llava)
    make_reference = Reference

    @staticmethod
    def make_prompt(config, grids, *, seed=0):
        """Makes charts with as many bars as a case says, and random text around them."""
        processor = ChartProcessor(Checkpoint(folder=Path(), config=config), {})
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
