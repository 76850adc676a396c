"""WebDataset shards: samples as rows; what is damaged or hostile is an error of its own."""

import tarfile

import pytest

from mmdeploy_llm.data.records.ids import Selection
from mmdeploy_llm.data.rows.formats.formats import open_rows
from mmdeploy_llm.data.rows.rows import BadItem, Row


def link(name, kind=tarfile.SYMTYPE, target="/etc/passwd"):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def test_members_of_a_key_are_one_row(read, write_tar):
    path = write_tar(
        "0.tar",
        {
            "a.jpg": b"\xff\xd8\xff",
            "a.json": {"title": "x", "jpg": "not the picture"},
            "a.txt": "a text\n",
            "dir/b.0.png": b"0",
            "dir/b.1.png": b"1",
            "c.npy": b"not read",
            "c.cls": "7",
        },
    )
    a, b, c = read(path)
    assert a == Row(
        line=1,
        key="0.tar/a",
        values={"jpg": b"\xff\xd8\xff", "title": "x", "txt": "a text", "__key__": "a"},
    )
    assert b.values == {"0.png": b"0", "1.png": b"1", "__key__": "dir/b"}
    assert c.values == {"cls": "7", "__key__": "c"}
    assert [row.line for row in (a, b, c)] == [1, 2, 3]


def test_members_of_suffixes_with_several_dots_are_media(write_tar, kinds_of):
    path = write_tar("0.tar", {"a.nii.gz": b"1", "b.t1.NII.gz": b"2", "c.gz": b"3", "c.cls": "7"})
    kinds = kinds_of({"kind": "volume", "suffixes": (".nii.gz",)})
    a, b, c = open_rows(str(path), kinds=kinds).read(Selection())
    assert (a.values["nii.gz"], b.values["t1.NII.gz"]) == (b"1", b"2")
    assert c.values == {"cls": "7", "__key__": "c"}


@pytest.mark.parametrize("name", ["0.tar", "0.tgz"])
def test_a_member_in_ts_is_media_if_it_is_a_transport_stream(read, write_tar, name):
    """TypeScript has the same suffix, and stays left out as other sources do."""
    packets = (b"\x47" + bytes(187)) * 20
    timed = (bytes(4) + b"\x47" + bytes(187)) * 20
    source = b"export const x = 1\n"
    members = {"a.ts": packets, "b.1.TS": timed, "c.ts": source, "c.cls": "7", "d.m2t": packets}
    a, b, c, d = read(write_tar(name, members, mode="w:gz" if name == "0.tgz" else "w"))
    assert (a.values["ts"], b.values["1.TS"], d.values["m2t"]) == (packets, timed, packets)
    assert c.values == {"cls": "7", "__key__": "c"}


def test_the_webdataset_package_groups_alike(read, write_tar):
    wds = pytest.importorskip("webdataset.tariterators", reason="'dev' installs webdataset")
    texts = {f"d/{n:03}.{end}": f"{n}{end}" for n in range(20) for end in ("jpg", "txt", "0.png")}
    path = write_tar("0.tar", texts)
    with path.open("rb") as file:
        members = ({**own, "__url__": "0.tar"} for own in wds.tar_file_iterator(file))
        samples = list(wds.group_by_keys(members))
    assert len(samples) == 20
    wanted = [{name: value for name, value in own.items() if "url" not in name} for own in samples]
    found = [
        {name: v.encode() if name == "txt" else v for name, v in row.values.items()}
        for row in read(path)
    ]
    assert found == wanted


@pytest.mark.parametrize("name", ["0.tar.gz", "0.tgz"])
def test_packed_shards_are_read(read, write_tar, name):
    path = write_tar(name, {"a.jpg": b"1" * 5000, "b.jpg": b"2"}, mode="w:gz")
    assert [row.values["jpg"][:1] for row in read(path)] == [b"1", b"2"]


@pytest.mark.parametrize("pattern", ["{000..002}.tar", "*.tar", "", "{000,001,002}.tar", "00?.tar"])
def test_braces_globs_and_folders_name_shards(read, write_tar, tmp_path, pattern):
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in range(3):
        write_tar(f"{number:03}.tar", {f"{number}.jpg": b"x"}, folder=folder)
    rows = read(folder / pattern)
    assert [row.key for row in rows] == ["000.tar/0", "001.tar/1", "002.tar/2"]
    assert [row.line for row in rows] == [1, 2, 3]
    assert [row.line for row in read(folder / pattern, shard=2, num_shards=2)] == [2]
    assert [row.line for row in read(folder / pattern, limit=2)] == [1, 2]


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"b.jpg": link("b.jpg")}, "link"),
        ({"b.jpg": link("b.jpg", tarfile.LNKTYPE, "a.jpg")}, "link"),
        ({"b.jpg": link("b.jpg", tarfile.CHRTYPE)}, "device"),
        ({"b.jpg": link("b.jpg", tarfile.FIFOTYPE)}, "device"),
        ({"b.jpg": b"x" * 1001}, "1000 are allowed"),
        ({"b.json": "{"}, "not JSON"),
        ({"b.json": "[" * 100_000}, "not JSON"),
        ({"b.txt": b"\xff"}, "not UTF-8"),
        ({f"b.{n}.jpg": b"x" for n in range(65)}, "more than 64 members"),
    ],
)
def test_a_bad_member_harms_its_own_sample_only(read, write_tar, members, words):
    path = write_tar("0.tar", {"a.jpg": b"a", **members, "c.jpg": b"c"})
    a, b, c = read(path, max_bytes=1000)
    assert (a.values["jpg"], c.values["jpg"]) == (b"a", b"c")
    assert isinstance(b, BadItem)
    assert (b.id, b.line) == ("0.tar/b", 2)
    assert words in b.message


def test_names_are_ids_and_never_paths(read, write_tar, tmp_path):
    names = ["../../up.jpg", "/etc/passwd.jpg", ".jpg", "a\nb.jpg", "x" * 300 + ".jpg"]
    path = write_tar("0.tar", dict.fromkeys(names, b"x"))
    keys = [row.key for row in read(path)]
    assert keys == ["0.tar/../../up", "0.tar//etc/passwd", "0.tar/a\nb", "0.tar/" + "x" * 300]
    assert [item.name for item in tmp_path.iterdir()] == ["0.tar"]


def test_a_tar_cut_anywhere_loses_its_own_end_only(read, write_tar, tmp_path):
    members = {f"{n}.{end}": f"{n}{end}" * 150 for n in range(3) for end in ("jpg", "txt")}
    whole = write_tar("0.tar", members).read_bytes()
    write_tar("1.tar", {"z.jpg": b"z"})
    for end in [0, 1, 511, 512, 600, 1024, 1536, 2000, 2048, 3000, 4095, 4096, 6144, 9216]:
        (tmp_path / "0.tar").write_bytes(whole[:end])
        *rows, bad, last = read(tmp_path / "{0..1}.tar")
        assert isinstance(bad, BadItem), end
        assert bad.id == "0.tar"
        assert last.key == "1.tar/z"
        for number, row in enumerate(rows):
            assert row.key == f"0.tar/{number}"
            assert row.values["jpg"] == members[f"{number}.jpg"].encode()
    assert len(rows) == 3


def test_a_damaged_header_is_an_error_not_the_end(read, write_tar):
    path = write_tar("0.tar", {f"{n}.jpg": b"x" * 500 for n in range(4)})
    blob = bytearray(path.read_bytes())
    blob[2048 + 10] ^= 0xFF  # the header of the third member
    path.write_bytes(blob)
    *rows, bad = read(path)
    assert [row.key for row in rows] == ["0.tar/0", "0.tar/1"]
    assert "a header is damaged" in bad.message


def test_a_long_name_of_gigabytes_is_not_read(read, write_tar):
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 2**33
    path = write_tar("0.tar", {"a.jpg": b"x"})
    path.write_bytes(path.read_bytes()[:1024] + info.tobuf(tarfile.GNU_FORMAT) + bytes(4096))
    row, bad = read(path)
    assert row.values["jpg"] == b"x"
    assert "are allowed" in bad.message


def test_what_is_not_wanted_is_not_read(read, write_tar):
    """A sample of another shard of the run may be too large here."""
    path = write_tar("0.tar", {"a.jpg": b"x" * 5000, "b.jpg": b"b"})
    (row,) = read(path, max_bytes=1000, shard=2, num_shards=2)
    assert row.values["jpg"] == b"b"
