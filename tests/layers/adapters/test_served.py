"""Adapters at the matrices of a model: what does not fit is refused, and one that fails while it is
put there leaves nothing to the next one."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.kernels import Kernels
from mmdeploy_llm.kernels.low_rank import Change
from mmdeploy_llm.layers import Embedding, Experts, Linear
from mmdeploy_llm.layers.adapters import Adapter, PlainTable, TokenRows
from mmdeploy_llm.layers.adapters.attached import Attached, Blueprint, ServedAdapters
from mmdeploy_llm.layers.adapters.attached.places import Place, Placed
from mmdeploy_llm.layers.adapters.config import LoraConfig
from mmdeploy_llm.values.adapter_ref import AdapterRef
from mmdeploy_llm.weights.map import Target

SIZE = 4
CONFIG = LoraConfig(peft_type="LORA", r=1, lora_alpha=1)


class Full(PlainTable):
    """A table for which there is no memory."""

    def put(self, slot, change):
        raise RuntimeError("out of memory")


def placed():
    change = Change(a=torch.ones(1, SIZE), b=torch.ones(SIZE, 1), starts=(0, SIZE), scales=(1.0,))
    return Placed(starts=(0, SIZE), num_columns=SIZE, change=change)


def ref(name):
    return AdapterRef(name=name, folder="", key=f"{name}@x", num_bytes=1)


def test_what_failed_halfway_is_taken_away(monkeypatch):
    model = nn.ModuleDict({"one": Linear(SIZE, SIZE), "two": Linear(SIZE, SIZE)})
    for linear in model.values():
        linear.weight.data.zero_()
    monkeypatch.setattr(
        "mmdeploy_llm.layers.adapters.attached.served.read_adapter",
        lambda folder: SimpleNamespace(digest="x"),
    )
    attached = Attached(matrices={Place("one"): placed(), Place("two"): placed()}, lookups={})
    blueprint = SimpleNamespace(attach=lambda adapter: attached)
    served = ServedAdapters(model, torch.device("cpu"), lambda: blueprint)
    errors = []
    with monkeypatch.context() as inner:
        tables = iter([PlainTable(), Full()])
        inner.setattr(Kernels, "low_rank_table", lambda *_: next(tables))
        served.load([ref("bad")], errors.append)
    assert [str(error) for error in errors] == ["out of memory"]
    attached = Attached(matrices={Place("two"): placed()}, lookups={})
    model["two"].adapted.table = None
    served.load([ref("good")], errors.append)
    served.unload(["bad@x"])  # told later, when another has its slot
    served.begin([1], ["good@x"])
    x = torch.ones(1, SIZE)
    assert model["one"](x).tolist() == [[0.0] * SIZE]
    assert model["two"](x).tolist() == [[SIZE] * SIZE]
    assert len(errors) == 1


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = Embedding(10, SIZE)

    def weight_targets(self, key):
        return (Target(name=key),) if key == "embed_tokens.weight" else None


def adapter(ids, size=SIZE, **more):
    rows = TokenRows(ids=torch.tensor(ids), rows=torch.zeros(len(ids), size))
    none = {"modules": {}, "embeddings": {}, "saved": {}}
    tokens = {"embed_tokens": rows}
    return Adapter(name="a", digest="", **{**none, **more}, tokens=tokens, config=CONFIG)


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (adapter([3, 12]), r"its rows are \[2, 4\], the last of token 12; this model has 10 of 4"),
        (adapter([3], SIZE + 1), r"its rows are \[1, 5\]"),
        (adapter([3], saved={"embed_tokens.weight": torch.zeros(10, SIZE)}), "whole and by rows"),
    ],
)
def test_rows_of_an_embedding_that_do_not_fit_are_refused(own, words):
    with pytest.raises(CheckpointError, match=words):
        Blueprint(Words(), {}, torch.float32).attach(own)


class Mixture(nn.Module):
    """Experts, under the names of its parameters."""

    def __init__(self):
        super().__init__()
        self.experts = Experts(2, SIZE, SIZE)

    def weight_targets(self, name):
        return (Target(name=name),)


def test_whole_matrices_of_experts_are_refused():
    saved = {"experts.down_proj": torch.zeros(2, SIZE, SIZE)}
    none = {"modules": {}, "embeddings": {}, "tokens": {}}
    own = Adapter(name="a", digest="", saved=saved, config=CONFIG, **none)
    with pytest.raises(CheckpointError, match=r"experts.*whole matrices of experts are not"):
        Blueprint(Mixture(), {}, torch.float32).attach(own)
