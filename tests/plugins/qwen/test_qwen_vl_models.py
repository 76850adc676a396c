"""Qwen2-VL and Qwen3-VL against transformers: see testing.model_conformance."""

import torch
from mmdeploy_llm_plugins.qwen import provide_models
from mmdeploy_llm_plugins.qwen.vl3 import interleaved_axes
from safetensors.torch import load_file, save_file

from mmdeploy_llm.request import MediaInput, MediaSpan
from mmdeploy_llm.testing.model_conformance import ModelConformance, build, max_difference
from mmdeploy_llm.testing.reference import Reference
from mmdeploy_llm.testing.tiny import write_tiny

SPECS = {spec.name: spec for spec in provide_models()}


class VisionConformance(ModelConformance):
    """Checks that the kit does not make for every model."""

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


class TestQwen3VL(VisionConformance):
    """Features of inner layers, learned positions, heads with norms, frames between time stamps."""

    spec = SPECS["qwen3_vl"]
    cases = {  # noqa: RUF012 - never written to
        "text": (),
        "one image": ((1, 4, 6),),
        "images of different sizes": ((1, 4, 6), (1, 18, 12), (1, 8, 16), (1, 4, 6)),
        "video": ((4, 6, 8),),
        "image and video": ((1, 10, 4), (2, 10, 12)),
    }

    @staticmethod
    def write(folder):
        write_tiny("qwen3_vl", folder)


class TestQwen3VLMoe(VisionConformance):
    """Layers with experts, and one without."""

    spec = SPECS["qwen3_vl_moe"]
    cases = TestQwen3VL.cases

    @staticmethod
    def write(folder):
        # A seed with few near ties among the experts, which bf16 rounding would flip.
        write_tiny("qwen3_vl_moe", folder, seed=2)

    def test_published_stacks_of_experts(self, folder, reference, runner, tmp_path):
        """Hub checkpoints hold the stacks with the last two axes swapped."""
        tensors = load_file(folder / "model.safetensors")
        stacks = [key for key in tensors if ".experts." in key]
        assert len(stacks) == 4  # two in each of two layers
        for key in stacks:
            tensors[key] = tensors[key].mT.contiguous()
        save_file(tensors, tmp_path / "model.safetensors")
        model = build(self.spec, tmp_path, reference.config, torch.float32)
        expected = dict(runner.model.named_parameters())
        assert all(torch.equal(value, expected[name]) for name, value in model.named_parameters())


def test_frames_without_text_between_are_one_grid(tmp_path):
    """A caller's own token ids may contain a video without time stamps."""
    config = Reference(write_tiny("qwen3_vl", tmp_path)).config
    model = build(SPECS["qwen3_vl"], tmp_path, config, torch.float32)
    item = MediaInput(kind="video", tensors={}, num_tokens=3, key="video", grid_thw=(3, 2, 2))
    together = model.positions(6, [MediaSpan(offset=1, item=item)])
    assert together[0].tolist() == [0, 1, 2, 3, 2, 3]
    apart = model.positions(9, [MediaSpan(offset=1, item=item, rows=(0, 2, 5))])
    assert apart.tolist() == [list(range(9))] * 3


def test_axes_alternate():
    assert interleaved_axes((6, 5, 5), 16) == (0, 1, 2) * 5 + (0,)
    assert interleaved_axes((4, 2, 2), 8) == (0, 1, 2, 0, 1, 2, 0, 0)
