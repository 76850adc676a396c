"""PaddleOCR-VL against transformers: see testing.model_conformance."""

import torch
from mmdeploy_llm_plugins.ernie import provide_models
from safetensors.torch import load_file, save_file

from mmdeploy_llm.testing.model_conformance import ModelConformance, build, max_difference
from mmdeploy_llm.testing.tiny import write_tiny

SPECS = {spec.name: spec for spec in provide_models()}


class TestPaddleOCRVL(ModelConformance):
    """Has images smaller and larger than the table of learned positions."""

    spec = SPECS["paddleocr_vl"]
    cases = {  # noqa: RUF012 - never written to
        "text": (),
        "one image": ((1, 4, 6),),
        "the size of the table": ((1, 6, 6),),
        "images of different sizes": ((1, 4, 6), (1, 18, 12), (1, 2, 16), (1, 4, 6)),
    }

    @staticmethod
    def write(folder):
        write_tiny("paddleocr_vl", folder)

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
            assert max_difference(embed, alone) < self.tolerance, item.key

    def test_unused_parts_of_the_published_tower(self, folder, reference, tmp_path):
        tensors = load_file(folder / "model.safetensors")
        prefix = "visual.vision_model."
        assert any(key.startswith(prefix) for key in tensors)
        tensors[f"{prefix}embeddings.packing_position_embedding.weight"] = torch.zeros(9, 48)
        tensors[f"{prefix}head.attention.in_proj_weight"] = torch.zeros(9, 48)
        save_file(tensors, tmp_path / "model.safetensors")
        build(self.spec, tmp_path, reference.config, torch.float32)
