"""A weight that is loaded and never used is found, also where its values in the tiny checkpoint
change nothing: norms of ones, biases of zeros."""

import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmdeploy_llm.hooks import PluginManager
from mmdeploy_llm.layers.basic.norm import RMSNorm
from mmdeploy_llm.layers.decoder import CausalLM
from mmdeploy_llm.testing.models import equalities
from mmdeploy_llm.testing.models.base import CheckFailed, CheckSkipped
from mmdeploy_llm.testing.models.models import ModelSubject, transformers_reference
from mmdeploy_llm.testing.models.prompts import make_prompt
from mmdeploy_llm.testing.models.weights import every_weight_counts
from mmdeploy_llm.weights.folder import read_checkpoint

SPECS = {spec.name: spec for spec in PluginManager.load().models}


@pytest.fixture
def subject_for(tiny_copy, tmp_path):
    """subject_for(family, part of keys, value) -> a subject of a tiny checkpoint whose tensors of
    these keys have this value."""

    def make(family, part=None, value=0.0, cases=None):
        folder = tiny_copy(family, tmp_path / "model")
        if part is not None:
            (path,) = folder.glob("*.safetensors")
            tensors = load_file(path)
            chosen = [key for key in tensors if part in key]
            assert chosen
            tensors |= {key: torch.full_like(tensors[key], value) for key in chosen}
            save_file(tensors, path, metadata={"format": "pt"})
        return ModelSubject(
            spec=SPECS[family],
            folder=folder,
            config=read_checkpoint(folder).config,
            cases=cases or {"text": ()},
            tolerance=1e-4,
            make_prompt=make_prompt,
            make_reference=transformers_reference,
        )

    return make


def without_weight(forward):
    """Norms without the factors."""

    def changed(self, x, *further):
        kept, self.weight.data = self.weight.data, torch.ones_like(self.weight)
        try:
            return forward(self, x, *further)
        finally:
            self.weight.data = kept

    return changed


def built_without_use(build):
    """Loads biases of the attention, and never adds them."""

    def changed(self, config, *further, **named):
        build(self, config, *further, **named)
        for layer in self.model.layers:
            linear = layer.self_attn.qkv_proj
            forward = type(linear).forward

            def forgets(x, linear=linear, forward=forward):
                kept, linear.bias.data = linear.bias.data, torch.zeros_like(linear.bias)
                try:
                    return forward(linear, x)
                finally:
                    linear.bias.data = kept

            linear.forward = forgets

    return changed


@pytest.mark.full  # seconds: a reference for each tensor
@pytest.mark.parametrize(
    ("family", "part", "value", "owner", "name", "change", "told"),
    [
        ("qwen3", "norm.weight", 1.0, RMSNorm, "forward", without_weight, "model.norm.weight"),
        ("qwen2", "proj.bias", 0.0, CausalLM, "__init__", built_without_use, "q_proj.bias"),
    ],
)
def test_a_weight_that_is_never_used_is_found(
    subject_for, monkeypatch, family, part, value, owner, name, change, told
):
    """The logits equal the reference's all the same."""
    subject = subject_for(family, part, value)
    assert every_weight_counts(subject) is None
    monkeypatch.setattr(owner, name, change(getattr(owner, name)))
    broken = replace(subject)
    equalities.logits_equal_the_reference(broken)
    with pytest.raises(CheckFailed, match="its logits do not change with it") as failure:
        every_weight_counts(broken)
    assert told.rpartition(".")[0].rpartition(".")[2] in str(failure.value)


def test_what_no_case_reaches_is_told(subject_for):
    told = every_weight_counts(subject_for("qwen2_vl"))
    assert re.match(r"no case reaches .*visual\..* and \d+ more", told)
    images = {"image": ((1, 4, 6),), "text": ()}
    assert every_weight_counts(subject_for("qwen2_vl", cases=images)) is None


def test_without_a_reference_the_names_are_told(subject_for):
    subject = subject_for("qwen2_vl")

    def none(folder):
        raise CheckSkipped("there is none")

    subject.make_reference = none
    with pytest.raises(CheckSkipped, match=r"no logit changes with .*visual.*; there is none"):
        every_weight_counts(subject)
