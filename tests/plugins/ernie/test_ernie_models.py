"""ERNIE 4.5 against transformers: see testing.model_conformance for what is compared."""

import pytest
import torch
from mmdeploy_llm_plugins.ernie import provide_models

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.testing.dense import DenseRunner
from mmdeploy_llm.testing.model_conformance import (
    ModelConformance,
    build,
    make_prompt,
    max_difference,
)
from mmdeploy_llm.testing.reference import Reference
from mmdeploy_llm.testing.tiny import write_tiny

SPECS = {spec.name: spec for spec in provide_models()}
TEXT_ONLY = {"text": (), "other text": ()}
MEDIA = {
    "text": (),
    "one image": ((1, 4, 6),),
    "images of different sizes": ((1, 4, 6), (1, 10, 12), (1, 2, 8), (1, 4, 6)),
    "video": ((4, 6, 8),),
    "image and video": ((1, 8, 4), (2, 4, 4), (4, 4, 10)),
}


class TestErnie(ModelConformance):
    """Head size that is not hidden / heads, grouped key heads, tied head."""

    spec = SPECS["ernie4_5"]
    cases = TEXT_ONLY

    @staticmethod
    def write(folder):
        write_tiny("ernie4_5", folder)


class TestErnieWithBiases(ModelConformance):
    """use_bias, an untied head, heads in groups of three."""

    spec = SPECS["ernie4_5"]
    cases = TEXT_ONLY

    @staticmethod
    def write(folder):
        options = {"use_bias": True, "tie_word_embeddings": False, "num_key_value_heads": 2}
        write_tiny("ernie4_5", folder, seed=1, **options)


class TestErnieMoe(ModelConformance):
    """A dense first layer, then experts with a correction bias and shared experts."""

    spec = SPECS["ernie4_5_moe"]
    cases = TEXT_ONLY

    @staticmethod
    def write(folder):
        write_tiny("ernie4_5_moe", folder)


class TestErnieMoeEverySecondLayer(ModelConformance):
    """No shared experts, sparse layers at an interval."""

    spec = SPECS["ernie4_5_moe"]
    cases = TEXT_ONLY

    @staticmethod
    def write(folder):
        options = {"moe_num_shared_experts": 0, "moe_layer_interval": 2, "num_hidden_layers": 4}
        write_tiny("ernie4_5_moe", folder, seed=2, **options)


class TestErnieVL(ModelConformance):
    """Experts per modality, M-RoPE, vision tower and resampler."""

    spec = SPECS["ernie4_5_vl_moe"]
    cases = MEDIA

    @staticmethod
    def write(folder):
        write_tiny("ernie4_5_vl_moe", folder)

    def test_positions_equal_the_reference(self, runner, reference, prompts):
        for name, (ids, media) in zip(self.cases, prompts, strict=True):
            if media:
                expected = reference.positions(ids, media)
                assert torch.equal(runner.model.positions(len(ids), media), expected), name

    def test_encoding_together_equals_one_by_one(self, runner, prompts):
        items = [span.item for _, media in prompts for span in media]
        together = runner.model.encode_media(items)
        for item, embed in zip(items, together, strict=True):
            (alone,) = runner.model.encode_media([item])
            assert embed.shape == (item.num_tokens, runner.model.hidden_size)
            assert max_difference(embed, alone) < self.tolerance, item.key

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


def test_reordered_rope_is_refused(tmp_path):
    write_tiny("ernie4_5", tmp_path)
    config = Reference(tmp_path).config
    config.rope_parameters = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ModelNotSupportedError, match="'yarn'"):
        build(SPECS["ernie4_5"], tmp_path, config, torch.float32)


def test_specs_import_no_torch():
    import subprocess
    import sys

    code = (
        "import sys; from mmdeploy_llm_plugins import ernie, qwen;"
        "ernie.provide_models(); qwen.provide_models(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
