"""Checkpoints of this package's families load in every layout: published, sharded, and with the
names of transformers' modules."""

import pytest
import torch
from safetensors.torch import save_file

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.testing.model_conformance import build
from mmdeploy_llm.testing.models.reference import Reference
from mmdeploy_llm.testing.tiny import families, family_of

SPECS = families()


FIRST = ("qwen2", "ernie4_5_vl_moe", "gemma4", "gpt_oss")  # the others are full tests


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.full] * (name not in FIRST))
        for name in sorted(families())
    ],
)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def published(tiny_copy, family, tmp_path_factory):
    """A folder written by save_pretrained, its model in transformers, and our parameters."""
    folder = tiny_copy(family, tmp_path_factory.mktemp(family))
    reference = Reference(folder)
    model = build(SPECS[family], folder, reference.config, torch.float32)
    return folder, reference, dict(model.named_parameters())


@pytest.mark.few_in_ci(16)
@pytest.mark.one_is_quick
def test_shards(tiny_copy, family, published, tmp_path):
    _, reference, expected = published
    tiny_copy(family, tmp_path, max_shard_size="150KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    model = build(SPECS[family], tmp_path, reference.config, torch.float32)
    assert all(torch.equal(value, expected[name]) for name, value in model.named_parameters())


@pytest.mark.one_is_quick
def test_names_of_transformers_modules(family, published, tmp_path):
    _, reference, expected = published
    tensors = {key: value.clone() for key, value in reference.model.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    model = build(SPECS[family], tmp_path, reference.config, torch.float32)
    assert all(torch.equal(value, expected[name]) for name, value in model.named_parameters())


@pytest.mark.few_in_ci(16)
@pytest.mark.one_is_quick
def test_a_checkpoint_of_another_family_is_refused(family, published):
    folder, _, _ = published
    others = [name for name in families() if name != family and "vl" in name]
    config = family_of(families()[others[0]]).make_config(_Tokenizer(), {})
    with pytest.raises(CheckpointError):
        build(SPECS[others[0]], folder, config, torch.float32)


class _Tokenizer:
    """The token ids that a config needs."""

    eos_token_id = pad_token_id = bos_token_id = 0

    def convert_tokens_to_ids(self, text):
        return 1
