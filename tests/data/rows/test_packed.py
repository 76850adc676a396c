"""Files that gzip or zstd has packed: read to their checksum, or refused by name."""

import gzip
import io
import sys
import tarfile

import pytest

from mmdeploy_llm.data.rows.formats.formats import open_rows
from mmdeploy_llm.data.rows.rows import BadItem
from mmdeploy_llm.errors import ConfigError

TEXTS = {
    "jsonl": b'{"title": "a"}\n{"title": "b"}\n',
    "ndjson": b'{"title": "a"}\n{"title": "b"}\n',
    "csv": b"title\na\nb\n",
    "tsv": b"title\tx\na\t1\nb\t2\n",
}


def zstd_of(data):
    zstd = pytest.importorskip("backports.zstd", reason="needs zstd: the extra 'zstd'")
    options = {zstd.CompressionParameter.checksum_flag: 1}
    return zstd.compress(data, options=options)


PACKERS = {"gz": gzip.compress, "zst": zstd_of}


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize("suffix", TEXTS)
def test_packed_texts_are_read(read, tmp_path, suffix, packer):
    path = tmp_path / f"a.{suffix}.{packer}"
    path.write_bytes(PACKERS[packer](TEXTS[suffix]))
    assert [row.values["title"] for row in read(path)] == ["a", "b"]
    assert [row.values["title"] for row in read(tmp_path)] == ["a", "b"]
    assert open_rows(str(path)).num_rows is None


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tgz", "a.tar.zst", "a.tzst", "A.TAR.ZST"])
def test_packed_shards_are_read(read, write_tar, tmp_path, name):
    blob = write_tar("b.tar", {"a.jpg": b"1" * 5000, "c.jpg": b"2"}).read_bytes()
    path = tmp_path / name
    path.write_bytes(PACKERS["gz" if name.endswith("gz") else "zst"](blob))
    assert [row.values["jpg"][:1] for row in read(path)] == [b"1", b"2"]
    assert [row.values["jpg"] for row in read(path, shard=2, num_shards=2)] == [b"2"]


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize("suffix", ["jsonl", "csv", "tar"])
def test_what_is_cut_off_or_damaged_is_told(read, write_tar, tmp_path, suffix, packer):
    content = TEXTS.get(suffix) or write_tar("x.tar", {"a.txt": "a"}).read_bytes()
    blob = PACKERS[packer](content)
    path = tmp_path / f"a.{suffix}.{packer}"
    for damaged in (blob[:-1], blob[:-4], blob[: len(blob) // 2], blob[:-4] + bytes(4), b""):
        path.write_bytes(damaged)
        rows = read(path)
        if damaged:
            assert isinstance(rows[-1], BadItem), damaged
            assert rows[-1].id == path.name
            assert "damaged or cut off" in rows[-1].message
        assert [row.line for row in rows] == list(range(1, len(rows) + 1))


@pytest.mark.parametrize(
    "name", ["a.jsonl.bz2", "a.tar.xz", "a.parquet.gz", "a.arrow.zst", "a.zip", "a.json.gz", "a.7z"]
)
def test_what_is_packed_otherwise_is_refused_by_name(tmp_path, name):
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"in a way that is not read; unpack it, .*\.jsonl\.gz"):
        open_rows(str(tmp_path / name))


def test_without_zstd_the_extra_is_named(monkeypatch, tmp_path):
    for name in ("backports.zstd", "compression.zstd"):
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "a.jsonl.zst").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"mmdeploy-llm\[zstd\]"):
        list(open_rows(str(tmp_path / "a.jsonl.zst")).read(None))


@pytest.mark.full
def test_a_bomb_is_read_a_piece_at_a_time(read, tmp_path):
    """A member of 300 MB in 300 KB is refused before it is read."""
    member = tarfile.TarInfo("a.txt")
    member.size = 300 * 2**20
    blob = io.BytesIO()
    with gzip.GzipFile(fileobj=blob, mode="wb", compresslevel=1) as file:
        file.write(member.tobuf())
        for _ in range(300):
            file.write(bytes(2**20))
        file.write(bytes(1024))
    (tmp_path / "a.tar.gz").write_bytes(blob.getvalue())
    (bad,) = read(tmp_path / "a.tar.gz")
    assert "are allowed" in bad.message
