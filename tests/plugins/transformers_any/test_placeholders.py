"""Placeholders of media are embedded as transformers does, wherever a model generates one."""

from types import SimpleNamespace

import pytest
import torch
from mmdeploy_llm_plugins.transformers_media import placeholders
from torch import nn


class Model(nn.Module):
    """Embeds ids as `change` gives them."""

    def __init__(self, change):
        super().__init__()
        self.table = nn.Embedding(8, 2)
        self.config = SimpleNamespace(to_dict=lambda: {"image_token_id": 3, "eos_token_id": 99})
        self.change = change

    def get_input_embeddings(self):
        return self.table

    def forward(self, input_ids, use_cache):
        return self.table(self.change(input_ids))


def refuse(ids):
    raise ValueError("it needs images")


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (lambda ids: ids.masked_fill(ids == 3, 0), {3: 0}),
        (lambda ids: ids, {}),
        (lambda ids: ids[:, :0], {}),
        (refuse, {}),
    ],
)
def test_ids_that_are_embedded_as_others(change, wanted):
    model = Model(change)
    assert placeholders.replaced_ids(model) == wanted
    assert not model.table._forward_pre_hooks


def test_a_model_without_tokens_of_media():
    model = Model(refuse)
    model.config = SimpleNamespace(to_dict=dict)
    assert placeholders.replaced_ids(model) == {}


def test_ids_are_replaced():
    ids = torch.tensor([[1, 3, 5]])
    assert placeholders.replace(ids, {3: 0, 5: 7}).tolist() == [[1, 0, 7]]
    assert placeholders.replace(ids, {}) is ids
