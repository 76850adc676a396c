"""What outputs and exports write is read back whole by the readers that people use: `datasets`,
`webdataset`, `pandas` and `pyarrow`, row by row. Each picture has a colour of its own, which its
text names."""

import csv
import os
from datetime import datetime

import pytest
from PIL import Image

from mmdeploy_llm.data.outputs.exports.export import ExportOptions
from mmdeploy_llm.data.outputs.exports.formats import export_records
from mmdeploy_llm.data.outputs.opening.choose import open_sink
from mmdeploy_llm.data.outputs.scan import Kept
from mmdeploy_llm.data.outputs.sidecars.options import SidecarOptions
from mmdeploy_llm.data.outputs.sidecars.text import SidecarText
from mmdeploy_llm.data.records.record import ItemError, Record

NAMES = (
    *("a.png", "holiday_test.png", "train.png", "val 2.png", "dev-1.png", "testament.png"),
    *("test/x.png", "validation set/y.png", "my.eval/z.png", "train/deep/er/x.png", "Test/x.png"),
    *(".hidden.png", ".d/h.png", "__x__/b.png", "__failed__/c.png", "b.PNG", "c.tar.png"),
    *("ä ö.png", "日本.png", "[x]*?.png", "a::b.png", "a\nb.png", "%20.png", "#x?y.png"),
    *("a:b\\c.png", '"q".png', "-x.png", " s .png", "d.v2.png", "metadata.png", "a.b/c.d/e.png"),
    *("-.png", "data/train.png", "n" * 240 + ".png", "README.md.png", "😀.png", "e,f;g.png"),
)
TEXTS = (
    *("a cat", "two\nlines", "a\r\nb", "c\rd", "e\u2028f", 'say "hi"', "1, 2", "a;b\tc"),
    *("NA", "null", "None", "nan", "true", "1e5", "007", "=1+1", "+x", "'q", " spaced ", "\\n"),
    *("größer", "日本語", "😀", "2024-01-01", "{}", "[1]", "NULL", "#N/A", "-", "@x", "<b>", "0"),
)


@pytest.fixture
def datasets(monkeypatch, tmp_path):
    """The library, with a cache of its own and without bars."""
    library = pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    library.disable_progress_bars()
    return library


def colour(number):
    return (number, 255 - number, 7)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of pictures with hostile names, from which the test runs."""
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(NAMES):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), colour(number)).save(path, "PNG")
    return tmp_path


def captions(names=NAMES, **values):
    return [
        Record(id=name, path=f"photos/{name}", text=f"of {NAMES.index(name)}", **values)
        for name in names
    ]


def write(name, *records):
    with open_sink(name).writer("new", Kept()) as writer:
        for number, record in enumerate(records, 1):
            writer.write(record, number)
        writer.finish(lambda record: record.line)
    return name


def check_pictures(rows):
    """Compares the text of each row with its picture."""
    assert sorted(text for text, _ in rows) == sorted(f"of {n}" for n in range(len(NAMES)))
    for text, picture in rows:
        assert picture.convert("RGB").getpixel((0, 0)) == colour(int(text.split()[1])), text


def loaded(datasets, *args, **options):
    found = datasets.load_dataset(*args, **options)
    assert list(found) == ["train"]
    return found["train"]


def test_datasets_reads_an_imagefolder(folder, datasets):
    found = export_records([write("c.jsonl", *captions())], "set", "imagefolder")
    assert found.num_out == len(NAMES)
    for args, options in ((("imagefolder",), {"data_dir": "set"}), (("set",), {})):
        rows = loaded(datasets, *args, **options)
        check_pictures([(row["text"], row["image"]) for row in rows])
    assert any("as the split train" in note for note in found.notes)
    (joined,) = (note for note in found.notes if "hold the word of a split" in note)
    assert joined.startswith("4 names have the folders in them")
    assert "'test/x.png' is 'test_x.png'" in joined


@pytest.mark.parametrize("name", NAMES[1:])
@pytest.mark.few_in_ci(2)
def test_datasets_reads_an_imagefolder_of_one_hostile_name(folder, datasets, name):
    records = captions((name, "a.png"))
    assert export_records([write("c.jsonl", *records)], "set", "imagefolder").num_out == 2
    rows = loaded(datasets, "imagefolder", data_dir="set")
    assert sorted(rows["text"]) == sorted(record.text for record in records)


def test_datasets_reads_the_metadata_beside_pictures(folder, datasets):
    """Names of files that are there stay: those that cannot be read are left out, and told."""
    found = export_records([write("c.jsonl", *captions())], "photos/metadata.jsonl")
    reason = "its picture cannot be used: datasets reads no name with :: or a backslash"
    assert found.left_out == {reason: 2}
    rows = loaded(datasets, "imagefolder", data_files="photos/metadata.jsonl")
    texts = [row["text"] for row in rows]
    kept = [n for n, name in enumerate(NAMES) if "::" not in name and "\\" not in name]
    assert sorted(texts) == sorted(f"of {number}" for number in kept)
    for row in rows:
        assert row["image"].getpixel((0, 0)) == colour(int(row["text"].split()[1]))
    notes = "\n".join(found.notes)
    assert "2 pictures beneath 'photos' are not in metadata.jsonl" in notes
    assert "load_dataset('imagefolder', data_files='photos/metadata.jsonl')" in notes


def test_pictures_that_metadata_does_not_name_are_told(folder, datasets):
    records = captions(("a.png", "日本.png"))
    found = export_records([write("c.jsonl", *records)], "photos/metadata.jsonl")
    num_visible = sum(not os.path.basename(name).startswith(".") for name in NAMES)
    assert found.notes[0].startswith(f"{num_visible - 2} pictures beneath")


def test_files_that_are_no_images_are_told(folder, datasets):
    import av

    with av.open("photos/clip.mp4", "w") as file:
        stream = file.add_stream("mpeg4", rate=5)
        stream.width = stream.height = 16
        frame = av.VideoFrame(16, 16, "yuv420p")
        file.mux([*stream.encode(frame), *stream.encode()])
    record = Record(id="clip.mp4", path="photos/clip.mp4", text="a clip")
    found = export_records([write("c.jsonl", record)], "set", "imagefolder")
    assert any(note.startswith("1 of the files are no images") for note in found.notes)
    rows = datasets.load_dataset("videofolder", data_dir="set")["train"]
    rows = rows.cast_column("video", datasets.Video(decode=False))
    assert rows["text"][:] == ["a clip"]
    assert rows[0]["video"]["path"].endswith("set/data/train/clip.mp4")


def test_dates_alone_are_told(folder, datasets):
    records = [
        Record(id=name, path=f"photos/{name}", text="2024-01-01", columns={"day": "x"})
        for name in NAMES[:2]
    ]
    found = export_records([write("c.jsonl", *records)], "set", "imagefolder")
    assert any("column 'text' are dates" in note for note in found.notes)
    assert not any("'day'" in note for note in found.notes)
    rows = loaded(datasets, "imagefolder", data_dir="set")
    assert rows["text"][:] == [datetime(2024, 1, 1)] * 2  # if this fails, the note is wrong
    assert rows["day"][:] == ["x"] * 2


@pytest.mark.parametrize("suffix", [".txt", ".caption"])
def test_trainers_of_the_family_of_kohya_read_pictures_and_texts(folder, suffix):
    """They take each picture of the folder and the first line of the file with its stem."""
    options = ExportOptions(
        sidecar=SidecarOptions(suffix=suffix, text=SidecarText(trigger=("ohwx",)))
    )
    export_records([write("c.jsonl", *captions())], "lora", "kohya", options)
    inner = folder / "lora/10_ohwx"
    rows = []
    for name in os.listdir(inner):
        stem, ending = os.path.splitext(name)
        if ending.lower() in (".png", ".jpg", ".webp", ".bmp"):
            line = (inner / f"{stem}{suffix}").read_text(encoding="utf-8").splitlines()[0]
            assert line.startswith("ohwx, ")
            with Image.open(inner / name) as picture:
                rows.append((line.removeprefix("ohwx, "), picture.copy()))
    check_pictures(rows)


def export_tar(*records):
    write("c.jsonl", *records)
    return export_records(["c.jsonl"], "shards.tar")


FAILED = Record(id="bad", error=ItemError(code=400, kind="MediaError", message="no"))


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of webdataset
def test_webdataset_reads_tars(folder):
    webdataset = pytest.importorskip("webdataset")
    export_tar(FAILED, *captions())
    url = f"file:{folder}/shards.tar/part-00000.tar"
    samples = list(webdataset.WebDataset(url, shardshuffle=False).decode("pil"))
    check_pictures([(sample["txt"], sample["png"]) for sample in samples])


def test_datasets_reads_tars(folder, datasets):
    """They read nothing of items that failed, also the first ones."""
    found = export_tar(FAILED, *captions(), FAILED)
    assert found.notes == ()
    rows = loaded(datasets, "webdataset", data_files="shards.tar/*.tar")
    check_pictures([(row["txt"], row["png"]) for row in rows])


@pytest.mark.parametrize("at", [0, 2, 20])
def test_datasets_reads_tars_of_several_kinds_of_pictures(folder, datasets, at):
    """Its own guess looks at five samples only and is told the columns instead."""
    Image.new("RGB", (4, 4), colour(at)).save(folder / "photos" / NAMES[at], "WEBP", lossless=True)
    records = captions()
    if at == 2:  # and a sample without a picture
        records.append(Record(id="none", line=99, text="of nothing", columns={"x": {"y": 1}}))
    found = export_tar(*records)
    (note,) = found.notes
    features = eval(note.partition("features=")[2].removesuffix(")"), vars(datasets))
    rows = loaded(datasets, "webdataset", data_files="shards.tar/*.tar", features=features)
    rows = [(row["txt"], row["png"] or row["webp"]) for row in rows]
    assert [text for text, picture in rows if picture is None] == ["of nothing"] * (at == 2)
    check_pictures([row for row in rows if row[1] is not None])


def texts():
    return [
        Record(id=f"i{n}", line=n, text=text, columns={"n": n, "t": text, "maybe": text or None})
        for n, text in enumerate(TEXTS, 1)
    ]


def test_tables_in_parquet_are_read(tmp_path, monkeypatch, datasets):
    monkeypatch.chdir(tmp_path)
    pandas, dataset = pytest.importorskip("pandas"), pytest.importorskip("pyarrow.dataset")
    write("t.parquet", *texts())
    arrow = dataset.dataset("t.parquet").to_table()
    for found in (
        arrow["text"].to_pylist(),
        list(pandas.read_parquet("t.parquet")["text"]),
        loaded(datasets, "parquet", data_files="t.parquet/*.parquet")["text"][:],
        loaded(datasets, "./t.parquet")["t"][:],
    ):
        assert found == list(TEXTS)


def test_tables_in_csv_are_read(tmp_path, monkeypatch, datasets):
    """They are read with the options that docs/outputs.md names; the apostrophe before formulas is
    ours."""
    monkeypatch.chdir(tmp_path)
    pandas, arrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow.csv")
    write("t.csv", *texts())
    expected = [f"'{text}" if text[0] in "=+-@" else text for text in TEXTS]
    with open("t.csv", encoding="utf-8-sig", newline="") as file:
        assert [row["text"] for row in csv.DictReader(file)] == expected
    assert list(pandas.read_csv("t.csv", keep_default_na=False)["text"]) == expected
    rows = loaded(datasets, "csv", data_files="t.csv", keep_default_na=False)
    assert rows["text"][:] == expected
    table = arrow.read_csv(
        "t.csv",
        parse_options=arrow.ParseOptions(newlines_in_values=True),
        convert_options=arrow.ConvertOptions(column_types={"text": "string"}),
    )
    assert table["text"].to_pylist() == expected
