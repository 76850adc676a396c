"""Qwen2-VL and Qwen3-VL against transformers: see testing.model_conformance."""

import torch
from mmdeploy_llm_plugins.qwen import provide_models

from mmdeploy_llm.testing.model_conformance import ModelConformance, max_difference
from mmdeploy_llm.testing.tiny import write_tiny

SPECS = {spec.name: spec for spec in provide_models()}


class VisionConformance(ModelConformance):
    """What the kit does not ask of every model."""

    def test_positions_equal_the_reference(self, runner, reference, prompts):
        for name, (ids, media) in zip(self.cases, prompts, strict=True):
            if media:
                expected = reference.positions(ids, media)
                assert torch.equal(runner.model.positions(len(ids), media), expected), name

    def test_encoding_together_equals_one_by_one(self, runner, prompts):
        items = [span.item for _, media in prompts for span in media]
        size = getattr(runner.model, "media_size", runner.model.hidden_size)
        together = runner.model.encode_media(items)
        for item, embed in zip(items, together, strict=True):
            (alone,) = runner.model.encode_media([item])
            assert embed.shape == (item.num_tokens, size)
            assert max_difference(embed, alone) < self.tolerance, item.key


class TestQwen2VL(VisionConformance):
    """Attention over whole frames, videos."""

    spec = SPECS["qwen2_vl"]
    cases = {  # noqa: RUF012 - never written to
        "text": (),
        "one image": ((1, 4, 6),),
        "images of different sizes": ((1, 4, 6), (1, 18, 12), (1, 8, 16), (1, 4, 6)),
        "video": ((4, 6, 8),),
        "image and video": ((1, 10, 4), (2, 10, 12)),
    }

    @staticmethod
    def write(folder):
        write_tiny("qwen2_vl", folder)
