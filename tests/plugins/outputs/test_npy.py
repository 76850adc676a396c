"""Outputs of vectors that numpy reads."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mmdeploy_llm.data.outputs.opening.choose import open_sink
from mmdeploy_llm.errors import ConfigError
from tests.data.outputs.vectors import failed, made, written


def test_numpy_reads_the_parts_of_an_npy_output(tmp_path: Path) -> None:
    records = [failed(1), made(2), made(3), failed(4), made(5)]
    written(tmp_path / "v.npy", records, part_items=1)
    parts = sorted((tmp_path / "v.npy").glob("part-*"))
    assert [np.load(part).shape for part in parts] == [(0, 4), (1, 4), (1, 4), (0, 4), (1, 4)]
    whole = np.concatenate([np.load(part, mmap_mode="r") for part in parts])
    expected = [own.embedding.array() for own in records if own.embedding is not None]
    np.testing.assert_array_equal(whole, expected)


def test_an_npy_output_has_one_size(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"have 4 numbers, and that of 'item 2' has 6: an array"):
        written(tmp_path / "v.npy", [made(1), made(2, (6,))])
    kept = (tmp_path / "v.npy" / ".open-00000.jsonl").read_text().splitlines()
    assert len(kept) == 2  # nothing is lost


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: data[:60], "not a .npy file"),
        (lambda data: data[:170], "is cut off: it has 170 bytes"),
        (lambda data: data[:-3], "its last record is cut off"),
        (lambda data: b"", "not a .npy file"),
        (lambda data: data.replace(b'"row": 1', b'"row": 7'), "line 2 is no record"),
        (lambda data: data.replace(b'"id": "item 1"', b'"id": [2]     '), "line 1 is no record"),
        (lambda data: data.replace(b"<f4", b"<i4"), "its array is int32"),
        (lambda data: data.replace(b"<f4", b"|O "), "not a .npy file|Python objects"),
        (lambda data: data[:140] + b"\x11\x22\x33\x44" + data[144:], "not the one that was"),
    ],
)
def test_a_damaged_npy_part_is_told(
    tmp_path: Path, damage: Callable[[bytes], bytes], words: str
) -> None:
    written(tmp_path / "v.npy", [made(1, (8,)), made(2, (8,))])
    part = tmp_path / "v.npy" / "part-00000.npy"
    part.write_bytes(damage(part.read_bytes()))
    with pytest.raises(ConfigError, match=words):
        list(open_sink(tmp_path / "v.npy").entries())
