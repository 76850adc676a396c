"""Files, folders and globs are expanded to an ordered list of media files."""

import os
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mmdeploy_llm.data.files.chosen_kinds import ChosenKinds
from mmdeploy_llm.data.files.files import find_media
from mmdeploy_llm.data.files.options import FindingOptions
from mmdeploy_llm.data.files.skipped import Skip, Skipped
from mmdeploy_llm.data.rows.names import natural_key
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import PluginManager


def names(found):
    return [os.path.basename(file.path) for file in found.files]


def test_a_folder_gives_its_images_in_natural_order(pictures):
    assert names(find_media([str(pictures)])) == ["1.png", "2.png", "10.png", "bad.jpg"]


def test_subfolders_only_when_asked(pictures):
    found = find_media([str(pictures)], is_recursive=True)
    assert names(found) == ["1.png", "2.png", "10.png", "bad.jpg", "3.PNG"]


def test_links_to_folders_are_not_followed(pictures):
    (pictures / "sub" / "loop").symlink_to(pictures)
    assert len(find_media([str(pictures)], is_recursive=True).files) == 5


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_named_folder_that_cannot_be_listed_is_told(pictures, monkeypatch, is_alone):
    listed, closed = os.scandir, str(pictures / "sub")

    def scandir(path):
        if os.fspath(path) == closed:
            raise PermissionError(13, "Permission denied", closed)
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    if is_alone:
        with pytest.raises(ConfigError, match=r"skipped 1 folder: 1 unreadable folder"):
            find_media([closed])
        return
    found = find_media([closed, str(pictures / "1.png")])
    assert names(found) == ["1.png"]
    assert found.skipped.text == "skipped 1 folder: 1 unreadable folder"
    assert found.skipped.notes == []


def test_a_glob_takes_images_and_folders_it_matches(pictures):
    assert names(find_media([f"{pictures}/*.png"])) == ["1.png", "2.png", "10.png"]
    assert names(find_media([f"{pictures}/*"])) == ["1.png", "2.png", "10.png", "bad.jpg", "3.PNG"]
    assert names(find_media([f"{pictures}/**/*.PNG"])) == ["3.PNG"]


def test_a_named_file_is_taken_whatever_its_suffix(pictures):
    assert names(find_media([f"{pictures}/notes.txt"])) == ["notes.txt"]


def test_a_file_with_glob_characters_in_its_name_is_that_file(tmp_path, png):
    (tmp_path / "a[1].png").write_bytes(png)
    assert names(find_media([f"{tmp_path}/a[1].png"])) == ["a[1].png"]


def test_each_file_once_in_the_order_of_the_arguments(pictures, monkeypatch):
    monkeypatch.chdir(pictures)
    found = find_media(["./2.png", "1.png", "2.png", "."])
    assert [file.path for file in found.files] == ["2.png", "1.png", "10.png", "bad.jpg"]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("missing.png", "does not exist"),
        ("https://example.org/a.png", "URL"),
        ("data:image/png;base64,AAAA", "URL"),
        ("*.gif", "no image, video or audio"),
        ("empty", "no image, video or audio.*--no-recursive left out subfolders"),
    ],
)
def test_missing_inputs_raise(tmp_path, monkeypatch, path, words):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=words):
        find_media([path])


@pytest.mark.full
@given(st.lists(st.text(st.sampled_from("aB.7_-10²é"), max_size=8), max_size=6))
def test_any_names_can_be_sorted(texts):
    keys = sorted(map(natural_key, texts))
    assert len(keys) == len(texts)


def test_natural_order_compares_numbers_by_value():
    wanted = ["a1b2", "A1b10", "a2", "a010", "b"]
    assert sorted(reversed(wanted), key=natural_key) == wanted


def test_several_names_are_what_a_shell_makes_of_a_pattern(pictures):
    """What is no medium, and what systems write, is skipped as with a glob; an input that names
    nothing is told, and one whose files another has is not."""
    (pictures / "Thumbs.db").write_bytes(b"\0")
    (pictures / "empty").mkdir()
    given = sorted(str(path) for path in pictures.iterdir() if path.name[0] != ".")
    by_shell = find_media([*given, str(pictures / "1.png"), f"{pictures}/*.gif"])
    by_glob = find_media([f"{pictures}/*"])
    assert set(names(by_shell)) == set(names(by_glob))
    for found in (by_shell, by_glob):
        assert found.skipped.counts == {".txt": 1, "Thumbs.db": 1}
    (note,) = by_shell.skipped.notes
    assert note == f"no file is in '{pictures}/empty', '{pictures}/*.gif'"


@pytest.mark.parametrize(
    ("pattern", "left"),
    [
        ("*.png", ["bad.jpg", "3.PNG"]),
        ("sub", ["1.png", "2.png", "10.png", "bad.jpg"]),
        ("sub/", ["1.png", "2.png", "10.png", "bad.jpg"]),
        ("1.png/", ["1.png", "2.png", "10.png", "bad.jpg", "3.PNG"]),
        ("sub/*", ["1.png", "2.png", "10.png", "bad.jpg"]),
        ("**/3.PNG", ["1.png", "2.png", "10.png", "bad.jpg"]),
        ("*/bad.jpg", ["1.png", "2.png", "10.png", "bad.jpg", "3.PNG"]),
        ("[12].png", ["10.png", "bad.jpg", "3.PNG"]),
    ],
)
def test_patterns_leave_out_names_and_paths(pictures, pattern, left):
    found = find_media([str(pictures)], is_recursive=True, exclude=[pattern])
    assert names(found) == left
    is_used = len(left) < 5
    assert any("fits nothing" in note for note in found.skipped.notes) != is_used


@pytest.mark.parametrize("pattern", ["", "/", "/abs/x", "../x", "./"])
def test_patterns_that_fit_nothing_are_refused(pictures, pattern):
    with pytest.raises(ConfigError, match="exclude"):
        find_media([str(pictures)], exclude=[pattern])


def test_what_systems_write_is_named_last(tmp_path):
    junk = ("Thumbs.db", "desktop.ini", ".DS_Store", "._a.png", "ehthumbs.db", "Icon\r")
    rest = (*(f"a.{suffix}" for suffix in ("svg", "psd", "ico", "txt", "pdf", "mid", "zip")), "b")
    for name in (*junk, "a.jpg", *rest):
        (tmp_path / name).write_bytes(b"some text")
    text = find_media([str(tmp_path)]).skipped.text
    assert all(f"1 .{suffix}" in text for suffix in ("svg", "psd", "txt", "pdf", "mid", "zip"))
    assert text.endswith("other kinds (--skipped FILE lists all)")


def test_a_path_of_a_list_that_is_gone_is_taken_and_does_not_end_the_job(pictures, monkeypatch):
    monkeypatch.chdir(pictures)
    wanted = ["1.png", "gone.png", "./gone.png", "sub/lost", "img[1].jpg", "nowhere/", "2.png"]
    found = find_media(wanted)
    assert names(found) == ["1.png", "gone.png", "lost", "img[1].jpg", "nowhere", "2.png"]
    assert not found.skipped.text
    with pytest.raises(ConfigError, match=r"none of the 2 paths exists.*working folder"):
        find_media(["gone.png", "nowhere/at/all.png"])
    with pytest.raises(ConfigError, match="an empty list of paths"):
        find_media([])


def test_what_overlapping_inputs_skip_is_counted_once(pictures, monkeypatch):
    monkeypatch.chdir(pictures)
    (pictures / "sub" / "note.txt").write_text("x")
    (pictures / "sub" / ".own.png").write_bytes((pictures / "1.png").read_bytes())
    (pictures / ".kept").mkdir()
    (pictures / ".kept" / "4.png").write_bytes((pictures / "1.png").read_bytes())
    (pictures / "linked").symlink_to("sub")
    (pictures / "broken.png").symlink_to("nowhere")

    def skipped(*paths):
        found = find_media(paths, is_recursive=True)
        read = {os.path.realpath(file.path) for file in found.files}
        assert not read & {os.path.realpath(skip.path) for skip in found.skipped}
        return found.skipped.counts

    alone = skipped(".")
    assert alone.total() == 7
    assert skipped(".", "sub", "sub/*", "./sub/", str(pictures)) == alone
    # What is named is read, and not skipped any more.
    assert skipped("linked", ".", ".kept", "sub/.own.png", "broken.png") == {
        ".txt": 2,
        "hidden file": 1,
    }
    assert skipped(".", "linked") == alone - Counter(["linked folder"])


def test_what_is_skipped_is_named_with_plurals_and_junk_comes_last():
    skipped = Skipped()
    labels = {
        **{"Thumbs.db": 9, "hidden file": 3, "hidden folder": 1, "linked folder": 2},
        **{".svg": 2, "HTML page named .jpg": 2, "raw photo of a camera named .png": 2},
        **{".heic": 1, "broken link": 2, "program without a suffix": 2, "without a suffix": 2},
        **{"special file": 2, "by --exclude a named .b": 2},
    }
    junk = ("Thumbs.db", "hidden file", "hidden folder", "linked folder", "by --exclude a named .b")
    for label, num in labels.items():
        hint = "heif reads it" if label == ".heic" else ""
        for number in range(num):
            path = f"/nowhere/{label}{number}"
            usual = label in junk
            skipped.add(Skip(path=path, label=label, reason="x", hint=hint, is_usual=usual))
    assert skipped.text == (
        "skipped 32 files: 2 .svg, 2 HTML pages named .jpg, 2 raw photos of a camera named .png, "
        "2 broken links, 2 programs without a suffix, 2 without a suffix, 2 special files, 1 .heic "
        "(heif reads it), 9 Thumbs.db, 3 hidden files, 5 of 3 other kinds "
        "(--skipped FILE lists all)"
    )


def test_kinds_are_chosen_and_what_a_model_does_not_take_is_told(tmp_path, png, kinds_of):
    sketch = {"kind": "sketch", "suffixes": (".sketch",), "first_bytes": (b"SKETCH",)}
    table = kinds_of(sketch)
    for name, data in (
        ("a.png", png),
        ("b.sketch", b"SKETCH"),
        ("c.dat", b"SKETCH"),
        ("d.wav", b""),
    ):
        (tmp_path / name).write_bytes(data)
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "e.png").write_bytes(png)
    asked = []

    def accepted():
        asked.append(True)
        return ("image", "video")

    def find(path=tmp_path, **options):
        return find_media([str(path)], wanted=ChosenKinds(table=table, **options))

    assert names(find()) == ["a.png", "b.sketch", "c.dat", "d.wav"]
    assert names(find(tmp_path / "only", accepted=accepted)) == ["e.png"]
    assert not asked  # a folder of pictures needs no files of the model
    found = find(accepted=accepted)
    assert names(found) == ["a.png"]
    words = "1 .sketch (this model takes no sketch)", "1 sketch named .dat (this model takes no"
    assert all(own in found.skipped.text for own in words)
    assert names(find(chosen=("sketch",))) == ["b.sketch", "c.dat"]
    assert names(find(tmp_path / "d.wav", accepted=accepted)) == ["d.wav"]  # its own error tells
    with pytest.raises(ConfigError, match="this model takes no sketch, which kinds asks for"):
        find(chosen=("sketch",), accepted=accepted)
    with pytest.raises(ConfigError, match="did you mean 'sketch'"):
        find(chosen=("skech",))
    with pytest.raises(ConfigError, match="kinds names no kind"):
        FindingOptions.given({"kinds": " , "})
    assert FindingOptions.given({"kinds": "image, audio"}).kinds == ("image", "audio")


def test_a_picture_of_several_pages_is_told_and_read_whole_where_that_is_chosen(tmp_path):
    pages = [Image.new("L", (4, 4), 9 * number) for number in range(3)]
    pages[0].save(tmp_path / "scan.tif", save_all=True, append_images=pages[1:])
    pages[0].save(tmp_path / "single.tif")
    table = PluginManager.load(("tiff",)).kinds
    for chosen, kind in (((), "image"), (("image",), "image"), (("image", "tiff"), "tiff")):
        found = find_media([str(tmp_path)], wanted=ChosenKinds(table=table, chosen=chosen))
        assert [file.kind for file in found.files] == [kind, "image"]
        told = "1 image has several pages, of which the first is used; `mmdeploy-llm read` reads"
        assert any(note.startswith(told) for note in found.skipped.notes) == (kind == "image")


@pytest.mark.parametrize("name", ["a table.csv", "prompts.jsonl", "00000.TAR", "rows.parquet"])
def test_a_table_or_shard_is_refused_with_the_command_that_reads_it(tmp_path, name):
    (tmp_path / name).write_bytes(b"no picture")
    command = r"`mmdeploy-llm batch \S.* --output answers.jsonl` reads it"
    with pytest.raises(ConfigError, match=command):
        find_media([str(tmp_path / name)])
    with pytest.raises(ConfigError, match="`mmdeploy-llm batch` reads tables and shards"):
        find_media([str(tmp_path)])
    Image.new("RGB", (4, 4)).save(tmp_path / name, "PNG")  # what its bytes are counts
    assert [file.kind for file in find_media([str(tmp_path / name)]).files] == ["image"]
