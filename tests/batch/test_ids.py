"""The compact set of ids, and the selection of lines by shard and limit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmdeploy_llm.data.records.ids import IdSet, Selection
from mmdeploy_llm.errors import ConfigError


@given(st.lists(st.text(st.characters(), max_size=4), max_size=60))
def test_an_id_set_is_a_set(texts):
    ids, real = IdSet(), set()
    for text in texts:
        assert (text in ids) == (text in real)
        assert ids.add(text) == (text not in real)
        real.add(text)
    assert len(ids) == len(real)


@pytest.mark.full
def test_many_ids_stay_small():
    ids = IdSet()
    for number in range(100_000):
        assert ids.add(f"a-rather-long-folder-name/photo-{number:09d}.jpg")
    assert len(ids) == 100_000
    assert ids._slots.itemsize * len(ids._slots) <= 27 * 100_000
    assert "a-rather-long-folder-name/photo-000099999.jpg" in ids
    assert "a-rather-long-folder-name/photo-000100000.jpg" not in ids


@given(st.integers(1, 9), st.integers(0, 60), st.none() | st.integers(1, 70))
def test_every_line_is_in_exactly_one_shard(num_shards, num_lines, limit):
    shards = [Selection.parse(f"{n}/{num_shards}", limit) for n in range(1, num_shards + 1)]
    taken = [[line for line in range(1, num_lines + 1) if shard.takes(line)] for shard in shards]
    wanted = range(1, num_lines + 1 if limit is None else min(num_lines, limit) + 1)
    assert sorted(line for lines in taken for line in lines) == list(wanted)
    assert [shard.count(num_lines) for shard in shards] == [len(lines) for lines in taken]


@pytest.mark.parametrize("shard", ["0/4", "5/4", "1/0", "1", "a/b", "-1/4", "1/4/2", ""])
def test_shards_that_do_not_exist(shard):
    with pytest.raises(ConfigError, match="shard"):
        Selection.parse(shard)
