"""Vision-language models of the plugins against transformers: see testing.model_conformance."""

import json
import shutil
from types import MappingProxyType

import pytest
import torch
from mmdeploy_llm_plugins import ernie, gemma, glm, internvl, lfm, minicpm, paddleocr, qwen
from mmdeploy_llm_plugins.qwen.tower import window_order
from mmdeploy_llm_plugins.qwen.vl3 import interleaved_axes
from safetensors.torch import load_file, save_file

from mmdeploy_llm.request import MediaInput, MediaSpan
from mmdeploy_llm.testing.checkpoint import write_checkpoint
from mmdeploy_llm.testing.model_conformance import (
    ModelConformance,
    ModelVariantConformance,
    build,
    make_prompt,
    max_difference,
)
from mmdeploy_llm.testing.models.dense import DenseRunner
from mmdeploy_llm.testing.models.determinism import no_bit_depends_on_the_batch
from mmdeploy_llm.testing.models.models import ModelSubject
from mmdeploy_llm.testing.models.ranks import two_ranks_equal_one
from mmdeploy_llm.testing.models.reference import Reference
from mmdeploy_llm.testing.tiny import families, family_of, make_tokenizer
from mmdeploy_llm.weights.folder import read_checkpoint

PLUGINS = (ernie, gemma, glm, internvl, lfm, minicpm, paddleocr, qwen)
SPECS = {spec.name: spec for plugin in PLUGINS for spec in plugin.provide_models()}
QWEN_MEDIA = {
    "text": (),
    "one image": ((1, 4, 6),),
    "images of different sizes": ((1, 4, 6), (1, 18, 12), (1, 8, 16), (1, 4, 6)),
    "video": ((4, 6, 8),),
    "image and video": ((1, 10, 4), (2, 10, 12)),
}


def subject_of(conformance, folder, references):
    return ModelSubject(
        spec=conformance.spec,
        folder=folder,
        config=read_checkpoint(folder).config,
        cases=conformance.cases,
        tolerance=conformance.tolerance,
        bf16_tolerance=conformance.bf16_tolerance,
        make_prompt=conformance.make_prompt,
        make_reference=references.of,
    )


class Tiny:
    """The tiny checkpoint of the spec's name. options: of write_tiny."""

    cases = QWEN_MEDIA
    options = MappingProxyType({})

    @classmethod
    def checkpoint(cls, references, new):
        """Returns the checkpoint, or makes it in the folder `new`."""
        return references.tiny(cls.spec.name, **cls.options)

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, references, tmp_path_factory):
        return cls.checkpoint(references, tmp_path_factory.mktemp("new"))

    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, folder, references):
        return subject_of(cls, folder, references)


class VisionKind(Tiny, ModelConformance):
    """Runs all checks of the kit: on a model with M-RoPE and experts by modality, one whose images
    are atomic, one with tiles."""


@pytest.mark.full
class VisionVariant(Tiny, ModelVariantConformance):
    """Compares a model with transformers."""


class TestErnieVL(VisionKind):
    """Experts per modality, M-RoPE, vision tower and resampler."""

    spec = SPECS["ernie4_5_vl_moe"]
    cases = {  # noqa: RUF012 - never written to
        "text": (),
        "one image": ((1, 4, 6),),
        "images of different sizes": ((1, 4, 6), (1, 10, 12), (1, 2, 8), (1, 4, 6)),
        "video": ((4, 6, 8),),
        "image and video": ((1, 8, 4), (2, 4, 4), (4, 4, 10)),
    }

    def test_generated_markers_go_to_text_experts(self, folder, reference):
        """The same ids as text of the prompt and as generated tokens give different logits."""
        runner = DenseRunner(build(self.spec, folder, reference.config, torch.float32))
        ids, _ = make_prompt(reference.config, ())
        marker = reference.config.image_start_token_id
        in_prompt, generated = runner.add([*ids, marker]), runner.add(ids)
        generated.token_ids.append(marker)
        first, second = runner.run(in_prompt)[-1], runner.run(generated)[-1]
        assert (first - second).abs().max() > 0.01
        # transformers gets no modalities for text: every token goes to the text experts
        expected = reference.logits([*ids, marker])[-1]
        assert max_difference(second, expected) < self.tolerance


class TestPaddleOCRVL(VisionVariant):
    """Has images smaller and larger than the table of learned positions."""

    spec = SPECS["paddleocr_vl"]
    cases = {  # noqa: RUF012 - never written to
        "text": (),
        "one image": ((1, 4, 6),),
        "the size of the table": ((1, 6, 6),),
        "images of different sizes": ((1, 4, 6), (1, 18, 12), (1, 2, 16), (1, 4, 6)),
    }

    def test_unused_parts_of_the_published_tower(self, folder, reference, tmp_path):
        tensors = load_file(folder / "model.safetensors")
        prefix = "visual.vision_model."
        assert any(key.startswith(prefix) for key in tensors)
        tensors[f"{prefix}embeddings.packing_position_embedding.weight"] = torch.zeros(9, 48)
        tensors[f"{prefix}head.attention.in_proj_weight"] = torch.zeros(9, 48)
        save_file(tensors, tmp_path / "model.safetensors")
        build(self.spec, tmp_path, reference.config, torch.float32)


class TestQwen2VL(VisionVariant):
    """Attention over whole frames, videos."""

    spec = SPECS["qwen2_vl"]


class TestQwen25VL(VisionVariant):
    """Windows smaller at the edges, images larger than a window, videos."""

    spec = SPECS["qwen2_5_vl"]

    def test_seconds_between_frames_stretch_the_time_axis(self, runner):
        item = MediaInput(
            kind="video",
            tensors={"second_per_grid": torch.tensor(0.5)},
            num_tokens=3,
            key="video",
            grid_thw=(3, 2, 2),
        )
        positions = runner.model.positions(6, [MediaSpan(offset=1, item=item)])
        # 4 positions per second, 0.5 s between frames; the text continues at the frame's extent
        assert positions[0].tolist() == [0, 1, 3, 5, 2, 3]
        assert positions[1].tolist() == [0, 1, 1, 1, 2, 3]


class TestQwen3VL(VisionVariant):
    """Features of inner layers, learned positions, heads with norms, frames between time stamps."""

    spec = SPECS["qwen3_vl"]


class TestQwen3VLMoe(VisionVariant):
    """Layers with experts, and one without."""

    spec = SPECS["qwen3_vl_moe"]
    # A seed with few near ties among the experts, which bf16 rounding would flip.
    options = MappingProxyType({"seed": 2})

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


GEMMA_MEDIA = {
    "text": (),
    "one image": ((1, 3, 6),),
    "images of different sizes": ((1, 3, 6), (1, 15, 12), (1, 6, 3), (1, 3, 6)),
    "video": ((3, 6, 9),),
    "image and video": ((1, 9, 3), (2, 6, 6)),
}


class TestGemma4(VisionVariant):
    """A tower with bounds and positions of columns and rows, embeddings for layers, shared keys and
    values."""

    spec = SPECS["gemma4"]
    tolerance = 5e-4  # scores are not scaled: a large one makes more of rounding
    cases = GEMMA_MEDIA


@pytest.mark.full
class TestGemma4Large(VisionKind):
    """Images whose tokens see each other in layers with a window, keys that are the values too,
    experts."""

    spec = SPECS["gemma4"]
    # Its window is smaller than an image of the processor, which an engine refuses.
    test_a_chat_equals_the_reference = None
    cases = GEMMA_MEDIA
    tolerance = 5e-4
    bf16_tolerance = 0.3  # transformers' own error is 17 to 25 % here
    options = MappingProxyType(
        {
            "num_kv_shared_layers": 0,
            "use_double_wide_mlp": False,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_key_value_heads": 2,
            "num_global_key_value_heads": 1,
            "use_bidirectional_attention": "vision",
            "sliding_window": 40,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        }
    )


class TestGemma4Unified(VisionVariant):
    """No tower: blocks of pixels, whose tokens see each other in layers with a window."""

    spec = SPECS["gemma4_unified"]
    # Its window is smaller than an image of the processor, which an engine refuses.
    test_a_chat_equals_the_reference = None
    tolerance = 5e-4
    cases = GEMMA_MEDIA
    options = MappingProxyType({"sliding_window": 40})


class TestGemma3(VisionVariant):
    """A plain tower whose patches are averaged, images whose tokens see each other in layers with
    and without a window."""

    spec = SPECS["gemma3"]
    cases = {  # noqa: RUF012 - never written to
        "text": (),
        "one image": ((1, 4, 4),),
        "images and crops": ((3, 4, 4), (1, 4, 4), (2, 4, 4)),
    }


class TestMiniCPMV(VisionVariant):
    """A tower that merges windows after an inner layer, states in the decoder."""

    spec = SPECS["minicpmv4_6"]
    tolerance = 2e-3  # see TOLERANCES in test_text_models.py
    bf16_tolerance = 0.25
    cases = {  # noqa: RUF012 - never written to
        "text": (),
        "one image": ((1, 8, 12),),
        "slices": ((3, 4, 8), (1, 12, 4), (2, 8, 8)),
    }


class TestMiniCPMVFine(TestMiniCPMV):
    """The same with four times as many tokens for an image."""

    cases = {"one image": ((1, 8, 12),), "slices": ((3, 4, 6), (1, 2, 8))}  # noqa: RUF012

    @classmethod
    def checkpoint(cls, references, new):
        shutil.copytree(references.tiny("minicpmv4_6"), new, dirs_exist_ok=True)
        config = json.loads((new / "config.json").read_text("utf-8"))
        config["downsample_mode"] = "4x"
        (new / "config.json").write_text(json.dumps(config), "utf-8")
        return new


class TestQwen35(VisionVariant):
    """Layers with states, gated attention, a tower without features of inner layers."""

    spec = SPECS["qwen3_5"]
    tolerance = 2e-3  # see TOLERANCES in test_text_models.py
    bf16_tolerance = 0.25


class TestQwen35Moe(VisionVariant):
    """The same with experts in every layer."""

    spec = SPECS["qwen3_5_moe"]
    tolerance = 2e-3
    bf16_tolerance = 0.35  # transformers' own error is 27 %


class TestGlm4v(VisionVariant):
    """Learned positions resampled with cubic weights, a convolution that merges patches, norms
    after attention and MLP, frames between time stamps."""

    spec = SPECS["glm4v"]
    cases = {  # noqa: RUF012 - never written to
        "text": (),
        "images of different sizes": ((1, 4, 6), (1, 18, 12), (1, 6, 6), (1, 4, 6)),
        "video": ((4, 6, 8),),  # transformers refuses a prompt with images and videos
    }


class TestGlm46V(TestGlm4v):
    """The same with its own config."""

    spec = SPECS["glm46v"]


class TestGlm4vMoe(TestGlm4v):
    """Experts in groups chosen by sigmoids and a bias, a dense first layer, shared experts."""

    spec = SPECS["glm4v_moe"]
    options = MappingProxyType({"n_group": 3, "topk_group": 2})


class TestGlmOcr(TestGlm4v):
    """Norms on the heads of the tower, biases, no learned positions."""

    spec = SPECS["glm_ocr"]


class TestLfm2VL(VisionVariant):
    """Layers with states, tiles smaller and larger than the table of learned positions."""

    spec = SPECS["lfm2_vl"]
    cases = {  # noqa: RUF012 - never written to
        "text": (),
        "one tile": ((1, 4, 6),),
        "images of several tiles": ((3, 4, 4), (1, 18, 12), (2, 4, 4)),
    }


TILES = {
    "text": (),
    "one tile": ((1, 4, 4),),
    "images of several tiles": ((3, 4, 4), (1, 4, 4), (5, 4, 4)),
}


@pytest.mark.full
class TestInternVL(VisionKind):
    """Version 3.5, with Qwen3: tiles with a class token, learned positions, pixel shuffle."""

    spec = SPECS["internvl"]
    cases = TILES

    def test_a_head_of_its_own_although_the_outer_config_ties_it(self, reference, folder, tmp_path):
        """The published configs say so; transformers then ties nothing that differs."""
        for file in folder.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        config = json.loads((tmp_path / "config.json").read_text("utf-8"))
        config["tie_word_embeddings"] = True
        (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
        other = Reference(tmp_path)
        assert other.config.tie_word_embeddings
        ids, media = make_prompt(other.config, ((1, 4, 4),))
        expected = other.logits(ids, media)
        assert torch.equal(expected, reference.logits(ids, media))
        runner = DenseRunner(build(self.spec, tmp_path, other.config, torch.float32))
        assert max_difference(runner.run(runner.add(ids, media)), expected) < self.tolerance


class TestInternVL3(VisionVariant):
    """Version 3, with Qwen2 and a tied head."""

    spec = SPECS["internvl"]
    cases = TILES
    options = MappingProxyType({"model_type": "qwen2", "tie_word_embeddings": True})


class TestInternVLOfOtherSizes(VisionVariant):
    """Experts; the tower of the 6B version, with norms of query and key, and with a last norm."""

    spec = SPECS["internvl"]
    cases = TILES

    @classmethod
    def checkpoint(cls, references, new):
        experts = {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}
        options = {**experts, "model_type": "qwen3_moe", "mlp_only_layers": [1]}
        tokenizer = make_tokenizer("internvl")
        config = family_of(families()["internvl"]).make_config(tokenizer, options)
        other = {"norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": False}
        for name, value in {**other, "use_mean_pooling": False}.items():
            setattr(config.vision_config, name, value)
        return write_checkpoint(config, new, tokenizer=tokenizer)


VARIANTS = [
    found
    for found in list(vars().values())
    if isinstance(found, type) and issubclass(found, VisionVariant) and found is not VisionVariant
]


@pytest.mark.long
class TestPromisesOfVariants(ModelConformance):
    """Holds them to what their specs promise."""

    checks = (no_bit_depends_on_the_batch, two_ranks_equal_one)

    @pytest.fixture(scope="class", params=VARIANTS, ids=lambda variant: variant.__name__)
    @classmethod
    def subject(cls, request, references, tmp_path_factory):
        folder = request.param.checkpoint(references, tmp_path_factory.mktemp("new"))
        return subject_of(request.param, folder, references)


def test_windows_are_contiguous_in_their_frames():
    order, lengths = window_order([(1, 10, 12), (2, 4, 4)], merge_size=2, window_size=4)
    assert sorted(order.tolist()) == list(range(30 + 8))
    # 5 x 6 tokens: windows of 4 x 4 and 4 x 2, then one row below; two frames of 2 x 2
    assert lengths == [16, 8, 4, 2, 4, 4]
    assert order[16:20].tolist() == [4, 5, 10, 11]
    assert order[28:30].tolist() == [28, 29]


def test_frames_without_text_between_are_one_grid(tiny_folder):
    """A caller's own token ids may contain a video without time stamps."""
    folder = tiny_folder("qwen3_vl")
    model = build(SPECS["qwen3_vl"], folder, read_checkpoint(folder).config, torch.float32)
    item = MediaInput(kind="video", tensors={}, num_tokens=3, key="video", grid_thw=(3, 2, 2))
    together = model.positions(6, [MediaSpan(offset=1, item=item)])
    assert together[0].tolist() == [0, 1, 2, 3, 2, 3]
    apart = model.positions(9, [MediaSpan(offset=1, item=item, rows=(0, 2, 5))])
    assert apart.tolist() == [list(range(9))] * 3


def test_axes_alternate():
    assert interleaved_axes((6, 5, 5), 16) == (0, 1, 2) * 5 + (0,)
    assert interleaved_axes((4, 2, 2), 8) == (0, 1, 2, 0, 1, 2, 0, 0)
