"""An adapter that fails while it is put at its matrices leaves nothing to the next one."""

from types import SimpleNamespace

import torch
from torch import nn

from mmdeploy_llm.adapter_ref import AdapterRef
from mmdeploy_llm.adapters import PlainTable
from mmdeploy_llm.adapting import Attached, ServedAdapters
from mmdeploy_llm.adapting.places import Place, Placed
from mmdeploy_llm.kernels.low_rank import Change
from mmdeploy_llm.layers import Linear

SIZE = 4


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
        "mmdeploy_llm.adapting.served.read_adapter", lambda folder: SimpleNamespace(digest="x")
    )
    attached = Attached(matrices={Place("one"): placed(), Place("two"): placed()}, lookups={})
    blueprint = SimpleNamespace(attach=lambda adapter: attached)
    served = ServedAdapters(model, torch.device("cpu"), lambda: blueprint)
    errors = []
    with monkeypatch.context() as inner:
        tables = iter([PlainTable(), Full()])
        inner.setattr("mmdeploy_llm.adapting.served.table_of", lambda *_: next(tables))
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
