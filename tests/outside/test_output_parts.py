"""A stranger's format of parts is as able as those of this repository: their modules, copied to a
file elsewhere, are a plugin with formats of other names."""

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from mmdeploy_llm_plugins.outputs.npy import NpyParts
from mmdeploy_llm_plugins.outputs.tars import TarParts
from PIL import Image

from mmdeploy_llm.data.outputs.exports.export import ExportOptions
from mmdeploy_llm.data.outputs.exports.formats import export_records
from mmdeploy_llm.data.outputs.opening.choose import open_sink
from mmdeploy_llm.data.outputs.opening.merged import MergedOutputs
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.data.vectors.opened import Vectors
from mmdeploy_llm.data.vectors.parts import OutputArrayPart
from mmdeploy_llm.data.vectors.written import finish
from mmdeploy_llm.hooks import OutputSinkSpec, PluginManager
from mmdeploy_llm.testing import check_plugin
from tests.data.outputs.vectors import failed, made, written
from tests.testing.copied_parts import copied


def kinds_of(file):
    return PluginManager.load(plugins=(), files=[file]).kinds


def test_pictures_are_stored_and_read_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kinds = kinds_of(copied(tmp_path / "stranger.py", TarParts))
    records = []
    for number, colour in enumerate(("red", "blue", "green"), 1):
        Image.new("RGB", (4, 4), colour).save(f"{number}.png")
        records.append(Record(id=f"{number}.png", path=f"{number}.png", line=number, text=colour))
    Path("in.jsonl").write_text("".join(f"{record.to_json()}\n" for record in records))
    options = ExportOptions(part_items=2, media_root=tmp_path, kinds=kinds)
    assert export_records(["in.jsonl"], "out.strange", options=options).num_out == 3
    found = sorted(own.name for own in Path("out.strange").glob("part-*"))
    assert found == ["part-00000.strange", "part-00001.strange"]
    stored = list(MergedOutputs(["out.strange"], kinds).stored_records())
    assert [record.text for record, _ in stored] == ["red", "blue", "green"]
    with ExitStack() as stack:
        blobs = [stack.enter_context(opened()).file.read for _, opened in stored[:1]]
        assert blobs[0]().startswith(Path("1.png").read_bytes())


def test_vectors_are_searched_as_one_array(tmp_path):
    kinds = kinds_of(copied(tmp_path / "stranger.py", NpyParts))
    path = tmp_path / "v.strange"
    records = [made(1), failed(2), made(3)]
    assert written(path, records, part_items=2, kinds=kinds) == records
    vectors = Vectors([str(path)], kinds=kinds)
    assert [type(part) for part in vectors._parts[:-1]] == [OutputArrayPart] * 2
    (first, second) = vectors.blocks()
    assert [*first.numbers, *second.numbers] == [0, 2]
    np.testing.assert_array_equal(second.rows[0], records[2].embedding.array())
    assert finish(open_sink(path, kinds=kinds)) == [f"ids:      {path / 'ids.jsonl'}"]
    one = Vectors([str(path / "part-00000.strange")], kinds=kinds)
    assert [type(part) for part in one._parts] == [OutputArrayPart]


@pytest.mark.full
@pytest.mark.parametrize("form", [TarParts, NpyParts])
def test_plugins_check_finds_nothing(tmp_path, form):
    file = copied(tmp_path / "stranger.py", form)
    assert PluginManager.load(plugins=(), files=[file]).provided(OutputSinkSpec)
    verdicts = list(check_plugin(str(file)))
    assert [own for own in verdicts if own.outcome == "fail"] == []
    assert sum(own.outcome == "pass" and "strange" in own.subject for own in verdicts) >= 7
