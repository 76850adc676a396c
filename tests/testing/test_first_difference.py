"""Where logits differ, the check names the first module that does, and a weight that is not the
checkpoint's."""

import pytest
import torch
from mmdeploy_llm_plugins.qwen import provide_models

from mmdeploy_llm.testing.models import equalities
from mmdeploy_llm.testing.models.base import CheckFailed
from mmdeploy_llm.testing.models.models import ModelSubject, transformers_reference
from mmdeploy_llm.testing.models.prompts import make_prompt
from mmdeploy_llm.testing.tiny import write_tiny
from mmdeploy_llm.weights.folder import read_checkpoint

SPEC = next(spec for spec in provide_models() if spec.name == "qwen2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny("qwen2", tmp_path_factory.mktemp("qwen2"))


@pytest.fixture(scope="module")
def reference(folder):
    return transformers_reference(folder)


@pytest.fixture
def subject(folder, reference):
    return ModelSubject(
        spec=SPEC,
        folder=folder,
        config=read_checkpoint(folder).config,
        cases={"text": ()},
        tolerance=1e-4,
        make_prompt=make_prompt,
        make_reference=lambda _: reference,
    )


def layer(model, index=1):
    return model.model.layers[index]


def transposed(model):
    weight = layer(model).self_attn.o_proj.weight
    weight.data = weight.data.T.contiguous()


def permuted(model):
    weight = layer(model).mlp.down_proj.weight
    weight.data = weight.data.flip(1).contiguous()


def query_and_key_swapped(model):
    attention = layer(model).self_attn
    weight = attention.qkv_proj.weight
    queries = weight.shape[0] // 2
    weight.data = torch.cat([weight.data[1:queries], weight.data[:1], weight.data[queries:]])


def no_bias(model):
    layer(model).self_attn.qkv_proj.bias.data.zero_()


def other_epsilon(model):
    for name in ("eps", "epsilon", "variance_epsilon"):
        if hasattr(model.model.norm, name):
            setattr(model.model.norm, name, 0.5)


BROKEN = [
    (transposed, r"model.layers.1.self_attn.o_proj differs.*same input; its weight, .*is transp"),
    (permuted, r"output of model.layers.1.mlp.down_proj differs first: .*is permuted here"),
    (
        query_and_key_swapped,
        r"of model.layers.1.self_attn.qkv_proj .*q_proj.weight.*permut",
    ),
    (no_bias, r"qkv_proj .*the weights are the same: look at its bias, epsilon"),
    (other_epsilon, r"output of model.norm differs first.*look at its bias, eps.*layers 0 to 2"),
]


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("breaks", "message"), BROKEN, ids=lambda value: getattr(value, "__name__", "")
)
def test_the_first_module_that_differs_is_named(subject, breaks, message):
    breaks(subject.model)
    with pytest.raises(CheckFailed) as failure:
        equalities.logits_equal_the_reference(subject)
    failure.match(message)


def test_attention_that_differs_is_named_by_what_it_gives(subject, monkeypatch):
    """Its projections agree, and what goes into the output projection does not."""
    dense = type(subject.runner._inputs([(subject.runner.add([1, 2], ()), 2)]).attn)
    attend = dense.attend

    def scaled(self, index, q, k, v, **given):
        return attend(self, index, q * (2.0 if index == 2 else 1.0), k, v, **given)

    monkeypatch.setattr(dense, "attend", scaled)
    with pytest.raises(CheckFailed, match=r"what goes into model.layers.2.self_attn.o_proj dif.*"):
        equalities.logits_equal_the_reference(subject)
