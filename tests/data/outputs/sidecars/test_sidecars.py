"""Sidecars: small texts beside pictures, in one place, through no link, over nobody's file."""

import os

import pytest

from mmdeploy_llm.data.outputs.sidecars.options import SidecarOptions
from mmdeploy_llm.data.outputs.sidecars.places import Places, Spot, read_sidecar
from mmdeploy_llm.data.outputs.sidecars.writer import Sidecars, picture_of
from mmdeploy_llm.data.records.item import Media
from mmdeploy_llm.data.records.record import ItemError, Record
from mmdeploy_llm.errors import ConfigError

NAMES = ("a.jpg", "b.v2.png", "sub/c.webp")


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "photos"
    for name in NAMES:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"a picture")
    return root


def record(path, text="a caption", **values):
    return Record(id=str(path), path=str(path), text=text, finish_reason="stop", **values)


@pytest.fixture
def write(folder):
    """Writes sidecars of names in the folder; returns the counts."""

    def run(*records, is_filled=False, outputs=(), root=folder, **arguments):
        options = SidecarOptions.given({"sidecar": ".txt", **arguments})

        def spot_of(own):
            return Spot.beneath(str(root), str(folder / picture_of(own)))

        with Sidecars(options, spot_of, outputs) as sidecars:
            if is_filled:
                sidecars.fill(records)
            for own in () if is_filled else records:
                sidecars.take(own)
            return sidecars.counts

    return run


def texts(folder, suffix=".txt"):
    found = sorted(path for path in folder.rglob(f"*{suffix}") if path.is_file())
    return {str(path.relative_to(folder)): path.read_text() for path in found}


def test_a_text_is_beside_each_picture(folder, write):
    counts = write(*(record(name, f"of {name}\n  it ") for name in NAMES))
    assert texts(folder) == {
        "a.txt": "of a.jpg it\n",
        "b.v2.txt": "of b.v2.png it\n",
        "sub/c.txt": "of sub/c.webp it\n",
    }
    assert counts.num_written == 3
    assert counts.lines()[0] == "sidecars: 3 .txt written"
    write(record("a.jpg"), sidecar=".caption")
    assert texts(folder, ".caption") == {"a.caption": "a caption\n"}


def test_what_is_there_is_kept_replaced_or_extended(folder, write):
    own = folder / "a.txt"
    own.write_text("mine\n")
    assert write(record("a.jpg")).num_kept == 1
    assert own.read_text() == "mine\n"
    assert write(record("a.jpg"), on_existing="append").num_written == 1
    assert own.read_text() == "mine, a caption\n"
    assert write(record("a.jpg"), on_existing="append").num_kept == 1  # once only
    own.write_text("A sentence.\n")
    write(record("a.jpg"), on_existing="append")
    assert own.read_text() == "A sentence. a caption\n"
    os.link(own, folder / "backup")
    assert write(record("a.jpg"), on_existing="overwrite").num_written == 1
    assert own.read_text() == "a caption\n"
    assert (folder / "backup").read_text() == "A sentence. a caption\n"
    own.write_text("")  # as a machine that lost its power leaves it
    assert write(record("a.jpg")).num_written == 1


def test_a_text_is_built_from_columns_and_the_path(folder, write):
    values = {"columns": {"artist": "Ada", "year": 1999, "tags": ["x", "y"]}}
    template = "{{{artist}}} {year} {stem} {folder} {file}: {text} [{tags}]"
    write(
        record("sub/c.webp", "cats", **values),
        sidecar_template=template,
        sidecar_prefix="<",
        sidecar_suffix=">",
        trigger=["ohwx", "style"],
    )
    expected = "ohwx, style, <{Ada} 1999 c sub c.webp: cats [x, y]>\n"
    assert texts(folder) == {"sub/c.txt": expected}
    write(record("a.jpg"), sidecar_template="{text} by {trigger}", trigger="ohwx")
    assert texts(folder)["a.txt"] == "a caption by ohwx\n"
    counts = write(record("b.v2.png"), sidecar_template="{artist}")
    assert list(counts.left_out) == [
        "the row has no column 'artist'; it has 'text', 'file', 'stem', 'folder', 'trigger'"
    ]


def test_an_answer_that_is_none_has_no_sidecar(folder, write):
    error = {"error": ItemError(code=400, kind="RequestError", message="x")}
    counts = write(
        record("a.jpg", "", **error),
        record("b.v2.png", "", outcome="empty"),
        record("sub/c.webp", "la la la"),
    )
    assert texts(folder) == {"sub/c.txt": "la la la\n"}
    assert counts.left_out == {"its outcome is failed": 1, "its outcome is empty": 1}
    assert counts.num_failed == 0


def test_of_two_pictures_with_one_sidecar_the_second_is_told(folder, write):
    (folder / "a.png").write_bytes(b"another")
    for order in (("a.jpg", "a.png"), ("a.png", "a.jpg")):
        counts = write(*(record(name, f"of {name}") for name in order), on_existing="overwrite")
        assert texts(folder) == {"a.txt": "of a.jpg\n"}
        (words,) = counts.left_out
        assert words == "its sidecar 'a.txt' is that of 'a.jpg'; give one of them another name"
        assert counts.examples[words] == "a.png"


def test_links_are_not_followed(folder, write, tmp_path):
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "x.txt").write_text("keep")
    (secret / "d.jpg").write_bytes(b"x")
    (folder / "a.txt").symlink_to(secret / "x.txt")
    (folder / "linked").symlink_to(secret)
    os.mkfifo(folder / "b.v2.txt")
    counts = write(
        record("a.jpg"), record("b.v2.png"), record("linked/d.jpg"), on_existing="overwrite"
    )
    assert counts.num_written == 0
    assert (secret / "x.txt").read_text() == "keep"
    assert not (secret / "d.txt").exists()
    words = " ".join(counts.left_out)
    assert "is a link" in words
    assert "is a FIFO" in words
    assert "through a link" in words


def test_nothing_outside_of_the_input_is_written(folder, write, tmp_path):
    (tmp_path / "out.jpg").write_bytes(b"x")
    outside = (record("../out.jpg"), record(str(tmp_path / "out.jpg")), record("/etc/x.jpg"))
    counts = write(*outside)
    assert counts.left_out == {"it is not beneath the folder of the input": 3}
    assert not (tmp_path / "out.txt").exists()


def test_files_that_are_no_texts_stay(folder, write):
    (folder / "a.txt").write_bytes(b"\xff\xfe\0binary")
    (folder / "b.v2.txt").write_bytes(b"\xff\xfe")
    (folder / "sub/c.txt").mkdir()
    for mode in ("skip", "overwrite", "append"):
        counts = write(*map(record, NAMES), on_existing=mode)
        assert counts.num_written == 0
        assert counts.left_out.total() == 3
    (folder / "own.txt").write_bytes(b"a picture, whatever its name")
    assert list(write(record("own.txt")).left_out) == ["its sidecar would be the file itself"]


def test_an_output_of_the_run_is_no_sidecar(folder, write):
    counts = write(record("a.jpg"), outputs=[folder / "a.txt"], on_existing="overwrite")
    assert list(counts.left_out) == ["its sidecar would be an output of the run"]


def test_a_folder_that_cannot_be_written_is_told(folder, write, monkeypatch):
    from mmdeploy_llm.data.records.files import Folder

    def full(*_, **__):
        raise OSError(28, "No space left on device", "x")

    monkeypatch.setattr(Folder, "write", full)
    counts = write(record("a.jpg"), record("b.v2.png"))
    assert counts.left_out == {"No space left on device": 2}
    assert counts.num_failed == 2


def test_missing_ones_are_filled_in_and_others_left(folder, write):
    (folder / "a.txt").write_text("edited by hand\n")
    counts = write(*map(record, NAMES), is_filled=True, on_existing="overwrite")
    assert counts.num_written == 2
    assert texts(folder)["a.txt"] == "edited by hand\n"


def test_a_sidecar_is_read(folder):
    (folder / "sub/c.txt").write_text("\ufeffold words\n", encoding="utf-8")
    with Places() as places:
        spot = Spot.beneath(str(folder), str(folder / "sub/c.webp"))
        assert read_sidecar(spot, ".txt", places) == "old words"
        spot = Spot.beneath(str(folder), str(folder / "a.jpg"))
        with pytest.raises(ValueError, match=r"'a\.txt' is missing"):
            read_sidecar(spot, ".txt", places)


@pytest.mark.parametrize(
    "wrong",
    [
        {"sidecar": "txt"},
        {"sidecar": ""},
        {"sidecar": "../x.txt"},
        {"sidecar": ".jpg"},
        {"sidecar": ".JSONL"},
        {"sidecar": ".csv"},
        {"sidecar": ".txt", "on_existing": "replace"},
        {"sidecar": ".txt", "sidecar_template": "{text.x}"},
        {"sidecar": ".txt", "sidecar_template": "{"},
        {"trigger": ["x"]},
        {"sidecar": 3},
    ],
)
def test_wrong_options_are_errors(wrong):
    with pytest.raises(ConfigError):
        SidecarOptions.given(wrong)


def test_without_a_suffix_there_are_none():
    assert SidecarOptions.given({"sidecar": None}) is None
    with pytest.raises(ConfigError, match="--on-existing needs --sidecar"):
        SidecarOptions.given({"on_existing": "overwrite"})


def test_the_picture_of_a_record():
    media = (Media(kind="image", name="/x/a.png"), Media(kind="image", name="/x/b.png"))
    assert picture_of(Record(id=1, media=media[:1])) == "/x/a.png"
    for own, words in ((media, "several"), ((), "no picture")):
        with pytest.raises(ValueError, match=words):
            picture_of(Record(id=1, media=own))
    with pytest.raises(ValueError, match="no file"):
        picture_of(Record(id=1, media=(Media(kind="image", name="(image of x)"),)))


@pytest.mark.parametrize("name", ["n" * 251 + ".jpg", "a\nb.jpg", "\udcff.jpg", "-x.jpg", "noext"])
def test_odd_names_have_texts(folder, write, name):
    (folder / name).write_bytes(b"a picture")
    assert write(record(name)).num_written == 1
    own = os.path.splitext(name)[0] + ".txt"
    assert (folder / own).read_text() == "a caption\n"
    assert not any("partial" in other for other in os.listdir(folder))


OLD = {
    "plain": ("mine", "ohwx, mine, a caption"),
    "byte order mark": ("\ufeffeins, zwei", "ohwx, eins, zwei, a caption"),
    "byte order mark alone": ("\ufeff", "ohwx, a caption"),
    "line ends of Windows": ("one, two\r\n", "ohwx, one, two, a caption"),
    "line ends of old Macs": ("one\rtwo\r", "ohwx, one, two, a caption"),
    "two lines": ("line one\nline two\n", "ohwx, line one, line two, a caption"),
    "sentences": ("One.\n\nTwo.\n", "ohwx, One. Two. a caption"),
    "a sentence in Chinese": ("一只猫。", "ohwx, 一只猫。 a caption"),
    "tags, with a comma at the end": ("1girl,\nsolo,\n", "ohwx, 1girl, solo, a caption"),
    "trigger is there": ("ohwx, mine", "ohwx, mine, a caption"),
    "trigger alone": ("ohwx", "ohwx, a caption"),
    "trigger in a phrase": ("ohwx man", "ohwx man, a caption"),
    "another word": ("ohwxes", "ohwx, ohwxes, a caption"),
    "trigger elsewhere": ("mine, ohwx", "ohwx, mine, ohwx, a caption"),
    "said already": ("mine, a caption", "ohwx, mine, a caption"),
    "separator of lines": ("one\u2028two", "ohwx, one, two, a caption"),
}


@pytest.mark.parametrize("old", OLD)
def test_an_extended_text_is_one_line_that_begins_with_the_trigger(folder, write, old):
    before, after = OLD[old]
    (folder / "a.txt").write_bytes(before.encode())
    for num_written in (1, 0):  # and once only
        counts = write(record("a.jpg"), on_existing="append", trigger=["ohwx"])
        assert (folder / "a.txt").read_bytes() == f"{after}\n".encode()
        assert counts.num_written == num_written


def test_trigger_words_are_completed_in_their_order(folder, write):
    for before in ("style, ohwx, mine", "ohwx, mine", "mine", "ohwx, style, mine"):
        (folder / "a.txt").write_text(before)
        write(record("a.jpg"), on_existing="append", trigger=["ohwx,", " style "])
        assert (folder / "a.txt").read_text() == "ohwx, style, mine, a caption\n"


def test_a_template_says_where_the_trigger_stands(folder, write):
    (folder / "a.txt").write_text("mine")
    template = {"sidecar_template": "{trigger}, {text}", "trigger": "ohwx"}
    write(record("a.jpg"), on_existing="append", **template)
    assert (folder / "a.txt").read_text() == "ohwx, mine, a caption\n"
    (folder / "a.txt").write_text("mine")
    write(
        record("a.jpg"), on_existing="append", sidecar_template="{text} of {trigger}", trigger="x"
    )
    assert (folder / "a.txt").read_text() == "mine, a caption of x\n"


def test_texts_that_had_several_lines_are_told(folder, write):
    (folder / "a.txt").write_text("one\ntwo\n")
    (folder / "b.v2.txt").write_text("one\r\n")
    lines = (record("a.jpg"), record("b.v2.png"), record("sub/c.webp", "one\n\ntwo"))
    assert write(*lines, on_existing="append").lines() == [
        "sidecars: 3 .txt written",
        "  2 of several lines became one line: trainers read the first line only",
    ]
    assert all(text.count("\n") == 1 for text in texts(folder).values())


def test_a_byte_order_mark_does_not_stay(folder, write):
    (folder / "a.txt").write_bytes("\ufeffa caption\n".encode())
    for mode in ("append", "overwrite"):
        (folder / "a.txt").write_bytes("\ufeffa caption\n".encode())
        write(record("a.jpg"), on_existing=mode)
        assert (folder / "a.txt").read_bytes() == b"a caption\n"


def test_a_read_only_text_is_left_and_told(folder, write):
    (folder / "a.txt").write_text("mine\n")
    (folder / "a.txt").chmod(0o444)
    for mode in ("append", "overwrite"):
        counts = write(record("a.jpg"), on_existing=mode)
        assert (folder / "a.txt").read_text() == "mine\n"
        assert counts.left_out == {"the .txt that is there is read-only": 1}
        assert (counts.num_written, counts.num_failed) == (0, 0)
    assert write(record("a.jpg"), on_existing="skip").num_kept == 1
