"""Parquet files: rows as lines, damaged groups as errors."""

import sys

import pytest

from mmdeploy_llm.batch.sources import open_source
from mmdeploy_llm.data.records.ids import Selection
from mmdeploy_llm.data.records.item import Item
from mmdeploy_llm.data.rows.formats.formats import open_rows
from mmdeploy_llm.data.rows.rows import BadItem
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.values.params import SamplingParams

PARAMS = {"max_tokens": 5, "seed": None}

pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow: the extra 'parquet'")
parquet = pytest.importorskip("pyarrow.parquet")


@pytest.fixture
def file(tmp_path):
    def write(rows, **options):
        path = tmp_path / "in.parquet"
        parquet.write_table(pyarrow.Table.from_pylist(rows), path, **options)
        return path

    return write


def items(path, **options):
    return list(open_source(path, SamplingParams(), Selection(**options)))


@pytest.mark.full
def test_columns_are_keys_and_nulls_are_not_given(file, tmp_path):
    found = items(
        file(
            [
                {"id": "a", "prompt": "x", "sampling_params": PARAMS, "multimodal_data": None},
                {"id": None, "prompt": "y", "multimodal_data": {"image": ["p.jpg"]}},
            ]
        )
    )
    assert [item.id for item in found] == ["a", 2]
    assert found[0].params.model_fields_set == {"max_tokens"}
    assert [own.source.uri for own in found[1].prompt.media] == [f"{tmp_path}/p.jpg"]


@pytest.mark.full
def test_nested_values_may_be_json_texts(file):
    messages = '[{"role": "user", "content": "hi"}]'
    others = {"mm_processor_kwargs": '{"max_pixels": 9000}', "tools": '[{"type": "function"}]'}
    good, bad = items(file([{"messages": messages, **others}, {"messages": "["}]))
    assert good.prompt.messages[0].content == "hi"
    assert good.prompt.processor_kwargs == {"max_pixels": 9000}
    assert good.prompt.tools == [{"type": "function"}]
    assert isinstance(bad, BadItem)
    assert "column messages" in bad.message


@pytest.mark.full
def test_rows_come_group_by_group_and_can_be_chosen(file):
    path = file([{"prompt": f"p{number}"} for number in range(1, 201)], row_group_size=50)
    found = items(path, shard=2, num_shards=50, limit=120)
    assert [item.line for item in found] == [2, 52, 102]
    assert len(items(path)) == 200


@pytest.mark.full
def test_a_damaged_group_harms_no_other(file):
    path = file([{"prompt": f"p{number}"} for number in range(90)], row_group_size=30)
    column = parquet.ParquetFile(path).metadata.row_group(1).column(0)
    begin = column.dictionary_page_offset or column.data_page_offset
    blob = bytearray(path.read_bytes())
    blob[begin : begin + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(blob)
    found = items(path)
    assert [item.line for item in found] == [*range(1, 31), 31, *range(61, 91)]
    assert [type(item) for item in found] == [Item] * 30 + [BadItem] + [Item] * 30
    assert found[30].id == "in.parquet row group 1"
    assert "rows 31 to 60, cannot be read" in found[30].message


def test_a_file_that_is_not_parquet_raises(tmp_path):
    path = tmp_path / "in.parquet"
    path.write_text("nothing of it")
    with pytest.raises(ConfigError, match="not a Parquet file"):
        open_rows(str(path))


def test_without_pyarrow_the_extra_is_named(file, monkeypatch):
    path = file([{"prompt": "x"}])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"mmdeploy-llm\[parquet\]"):
        open_rows(str(path))
