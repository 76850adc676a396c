"""Headers of a tar that have no sense, and packed tars that are damaged: errors of their shard."""

import gzip
import io
import random
import tarfile

import pytest

from mmdeploy_llm.data.rows import tars
from mmdeploy_llm.data.rows.rows import BadItem


def header(name, size, kind=tarfile.REGTYPE):
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return member.tobuf(tarfile.USTAR_FORMAT)


def padded(data):
    return data + b"\0" * (-len(data) % 512)


def pax(**fields):
    """An extended header. `__` in a name stands for a dot."""
    records = b""
    for name, value in fields.items():
        body = f" {name.replace('__', '.')}={value}\n".encode()
        size = len(body) + len(str(len(body)))
        size += len(str(size)) - len(str(len(body)))
        records += str(size).encode() + body
    return header("x", len(records), tarfile.XHDTYPE) + padded(records)


def long_name(name):
    return header("././@LongLink", len(name), tarfile.GNUTYPE_LONGNAME) + padded(name)


def binary_size(block, value):
    """A header whose size is a binary number, which may be negative."""
    block = bytearray(block)
    block[124:136] = (value % 2**96 | (0 if value < 0 else 2**95)).to_bytes(12, "big")
    return checked(block)


def checked(block):
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def old_sparse(fields, is_extended=False):
    block = bytearray(header("b.txt", 512, tarfile.GNUTYPE_SPARSE))
    block[257:265] = b"ustar  \0"
    block[386 : 386 + len(fields)] = fields
    block[482] = is_extended
    return checked(block)


PLAIN = header("b.txt", 2) + padded(b"hi")
MAP = {"GNU__sparse__major": "1", "GNU__sparse__minor": "0", "GNU__sparse__realsize": "5"}
WAYS = {
    "a chain of extended headers": pax(comment="a") * 3000 + PLAIN,
    "a chain of long names": long_name(b"b.t") * 3000 + PLAIN,
    "extended headers of megabytes": pax(comment="a" * 600_000) * 2 + PLAIN,
    "a sparse map that is no number": pax(GNU__sparse__map="a,b", GNU__sparse__size="5") + PLAIN,
    "a sparse map of negative numbers": pax(GNU__sparse__map="-1,-9", GNU__sparse__size="-5")
    + PLAIN,
    "a sparse size that is no number": pax(**{**MAP, "GNU__sparse__realsize": "x"}) + PLAIN,
    "a sparse map in the data that is none": pax(**MAP) + header("b.txt", 512) + padded(b"zz\n"),
    "a sparse map in the data without an end": pax(**MAP)
    + header("b.txt", 4096)
    + padded(b"9999999\n" + b"1\n" * 2000),
    "a size that leads back": pax(size="-1024") + PLAIN,
    "a size that leads back, not read": pax(size="-1024", path="b.npy") + PLAIN,
    "a size that leads to itself": binary_size(header("b.npy", 2), -512),
    "a size of thirty digits": pax(size="9" * 30) + PLAIN,
    "a size of five thousand digits": pax(size="9" * 5000) + PLAIN,
    "a size that is no number": pax(size="nan") + PLAIN,
    "a binary size of 88 bits": binary_size(header("b.npy", 2), 2**88 - 1),
    "an old sparse map": old_sparse(b"\xff" * 96),
    "an old sparse map that goes on": old_sparse(b"0" * 96, is_extended=True) + b"\1" * 512 * 3,
    "no header at all": b"\1" * 512,
}
HARMLESS = {
    "a time that is no number": pax(mtime="nan") + PLAIN,
    "a NUL in a name": pax(path="b\0.txt") + PLAIN,
    "a name that is not UTF-8": header("b\udcff.txt", 2) + padded(b"hi"),
    "an unknown charset": pax(hdrcharset="none") + PLAIN,
}


@pytest.fixture
def read_between(read, write_tar, tmp_path):
    """Reads a tar between two sound ones; returns its rows."""

    def rows(data):
        write_tar("0.tar", {"a.jpg": b"a"})
        (tmp_path / "1.tar").write_bytes(data + b"\0" * 1024)
        write_tar("2.tar", {"c.jpg": b"c"})
        first, *between, last = read(tmp_path)
        assert (first.key, last.key) == ("0.tar/a", "2.tar/c")
        assert [row.line for row in (first, *between, last)] == list(range(1, len(between) + 3))
        return between

    return rows


@pytest.mark.one_is_quick
@pytest.mark.parametrize("way", WAYS)
def test_a_header_without_sense_is_an_error_of_its_shard(read_between, way):
    *_, bad = read_between(WAYS[way])
    assert isinstance(bad, BadItem)
    assert bad.id == "1.tar/b" if "sparse;" in bad.message else "1.tar"
    assert "a header" in bad.message or "is a link, a device or sparse" in bad.message


@pytest.mark.parametrize("way", HARMLESS)
def test_odd_headers_are_read(read_between, way):
    (row,) = read_between(HARMLESS[way])
    assert row.values["txt"] == "hi"


@pytest.fixture
def packed(write_tar, tmp_path):
    """A tar of texts that gzip has packed."""
    texts = {f"{n}.txt": random.Random(n).randbytes(400).hex() for n in range(20)}
    return gzip.compress(write_tar("a.tar", texts).read_bytes(), mtime=0)


def test_a_flipped_bit_is_told_by_the_checksum(read, packed, tmp_path):
    path = tmp_path / "a.tar.gz"
    path.write_bytes(packed)
    good = read(path)
    assert len(good) == 20
    for at in range(len(packed) // 4, len(packed) - 8, 331):
        blob = bytearray(packed)
        blob[at] ^= 1 << at % 8
        path.write_bytes(blob)
        rows = read(path)
        assert rows == good or isinstance(rows[-1], BadItem), at


def test_a_wrong_checksum_and_a_missing_one_are_errors(read, packed, tmp_path):
    path = tmp_path / "a.tar.gz"
    for blob in (packed[:-8] + bytes(8), packed[:-8], packed[:-1]):
        path.write_bytes(blob)
        *rows, bad = read(path)
        assert len(rows) == 20
        assert bad.id == "a.tar.gz"
        assert "damaged or cut off" in bad.message


def test_what_follows_a_tar_is_read_within_a_bound(read, packed, tmp_path, monkeypatch):
    path = tmp_path / "a.tar.gz"
    path.write_bytes(packed + gzip.compress(bytes(10 * 2**20)))
    assert len(read(path)) == 20
    monkeypatch.setattr(tars, "MAX_BYTES_AFTER", 2**20)
    assert "follow the end of the tar" in read(path)[-1].message


@pytest.mark.long
@pytest.mark.parametrize("packer", ["tar", "tar.gz"])
def test_mutated_tars_end_in_rows_or_errors(read_between, packer, tmp_path, read, write_tar):
    """10,000 mutations of a tar with every kind of header, half of them with right checksums."""
    source = random.Random(packer)
    sound = io.BytesIO()
    for data in (
        *HARMLESS.values(),
        pax(path="d/" + "n" * 200 + ".txt") + PLAIN,
        long_name(b"l.txt") + PLAIN,
    ):
        sound.write(data)
    sound.write(b"\0" * 1024)
    for number in range(10_000):
        blob = bytearray(sound.getvalue() if packer == "tar" else gzip.compress(sound.getvalue()))
        for _ in range(source.randint(1, 4)):
            at = source.randrange(len(blob))
            blob[at] = source.choice((0, 0xFF, 0x80, blob[at] ^ 1 << source.randrange(8), 57))
            if packer == "tar" and source.random() < 0.5:
                begin = at // 512 * 512
                blob[begin : begin + 512] = checked(blob[begin : begin + 512])
        (tmp_path / f"m.{packer}").write_bytes(blob)
        rows = read(tmp_path / f"m.{packer}")
        assert [row.line for row in rows] == list(range(1, len(rows) + 1)), number
        keys = [row.key if not isinstance(row, BadItem) else row.id for row in rows]
        assert all(isinstance(key, str) for key in keys), number
