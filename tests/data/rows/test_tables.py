"""CSV, Arrow, Lance and the library `datasets`: rows with bytes that are not decoded."""

import json
import sys

import pytest

from mmdeploy_llm.data.rows.formats.formats import is_hub, open_rows
from mmdeploy_llm.data.rows.rows import BadItem, FirstLines
from mmdeploy_llm.data.rows.tables.hub import HubTable, check_pattern
from mmdeploy_llm.data.rows.tables.places import Cursor
from mmdeploy_llm.errors import ConfigError

pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow: the extra 'parquet'")


@pytest.fixture
def table(pngs):
    """A table with images as Hugging Face datasets store them, a null among them."""
    rows = [
        {"image": {"bytes": png, "path": "a.png"}, "title": f"t{number}"}
        for number, png in enumerate(pngs)
    ]
    return pyarrow.Table.from_pylist([*rows, {"image": None, "title": None}])


def check(rows, pngs):
    assert [row.line for row in rows] == [1, 2, 3, 4, 5]
    assert [row.values["image"]["bytes"] for row in rows[:4]] == pngs
    assert [row.values["title"] for row in rows] == ["t0", "t1", "t2", "t3", None]
    assert not rows[4].values["image"]


def write_ipc(table, path, *, is_stream=False):
    new = pyarrow.ipc.new_stream if is_stream else pyarrow.ipc.new_file
    with new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


class TestArrow:
    @pytest.mark.full
    @pytest.mark.one_is_quick
    @pytest.mark.parametrize("is_stream", [False, True])
    def test_files_and_streams(self, read, table, pngs, tmp_path, is_stream):
        path = tmp_path / "a.arrow"
        write_ipc(table, path, is_stream=is_stream)
        check(read(path), pngs)
        assert [row.line for row in read(path, shard=2, num_shards=3)] == [2, 5]
        assert [row.line for row in read(path, limit=3)] == [1, 2, 3]

    @pytest.mark.full
    def test_feather(self, read, table, pngs, tmp_path):
        from pyarrow import feather

        feather.write_feather(table, str(tmp_path / "a.feather"))
        check(read(tmp_path / "a.feather"), pngs)

    @pytest.mark.full
    def test_a_damaged_file_harms_no_other(self, read, table, tmp_path):
        for number in range(3):
            write_ipc(table, tmp_path / f"{number}.arrow")
        (tmp_path / "1.arrow").write_bytes(b"ARROW1 and nothing else")
        rows = read(tmp_path)
        bad = [row for row in rows if isinstance(row, BadItem)]
        assert [row.line for row in rows] == list(range(1, 12))
        assert [(row.id, row.line) for row in bad] == [("1.arrow", 6)]


class TestParquet:
    @pytest.mark.full
    def test_several_files_are_numbered_through(self, read, table, tmp_path):
        from pyarrow import parquet

        for number in range(3):
            parquet.write_table(table, tmp_path / f"{number}.parquet", row_group_size=2)
        (tmp_path / "1.parquet").write_bytes(b"PAR1")
        rows = read(tmp_path)
        assert [row.line for row in rows] == list(range(1, 12))
        assert [row.id for row in rows if isinstance(row, BadItem)] == ["1.parquet"]
        assert open_rows(str(tmp_path)).num_rows == 11
        assert [row.line for row in read(tmp_path, limit=3)] == [1, 2, 3]


class TestDelimited:
    def test_rows_are_texts_and_empty_fields_are_not_given(self, read, tmp_path):
        path = tmp_path / "a.csv"
        path.write_bytes(b'\xef\xbb\xbfimage,title\r\na.png,"x, ""y""\nz"\r\n\r\nb.png,\r\n')
        first, second = read(path)
        assert first.values == {"image": "a.png", "title": 'x, "y"\nz'}
        assert second.values == {"image": "b.png", "title": None}
        assert (first.folder, second.line) == (str(tmp_path), 2)

    def test_tabs(self, read, tmp_path):
        (tmp_path / "a.tsv").write_text("image\ttitle\na.png\tx, y\n")
        (row,) = read(tmp_path / "a.tsv")
        assert row.values == {"image": "a.png", "title": "x, y"}

    @pytest.mark.parametrize("mark", [",", ";", "\t"])
    def test_what_stands_between_fields_shows_in_the_first_line(self, read, tmp_path, mark):
        """pandas writes it on request, and spreadsheets do in countries with decimal commas."""
        pandas = pytest.importorskip("pandas", reason="needs pandas")
        values = {"image": ["a.png", "b.png"], "title": ["x, y; z\tw", 'a "b"']}
        path = tmp_path / "a.csv"
        pandas.DataFrame(values).to_csv(path, sep=mark, index=False, encoding="utf-8-sig")
        expected = pandas.read_csv(path, sep=mark).to_dict("records")
        assert [row.values for row in read(path)] == expected

    def test_one_column_has_nothing_between(self, read, tmp_path):
        (tmp_path / "a.csv").write_text("image\na;b.png\n")
        (row,) = read(tmp_path / "a.csv")
        assert row.values == {"image": "a;b.png"}

    @pytest.mark.parametrize(
        ("line", "words"),
        [
            (b"a.png", "1 fields"),
            (b"a.png,x,y", "3 fields"),
            (b"a.png,\xff", "not UTF-8"),
            (b"a.png," + b"x" * 200_000, "field larger than field limit"),
        ],
    )
    def test_a_bad_row_harms_no_other(self, read, tmp_path, line, words):
        (tmp_path / "a.csv").write_bytes(b"image,title\n1.png,a\n" + line + b"\n3.png,c\n")
        first, bad, last = read(tmp_path / "a.csv")
        assert (first.values["title"], last.values["title"], last.line) == ("a", "c", 3)
        assert words in bad.message

    @pytest.mark.one_is_quick
    @pytest.mark.parametrize("num_after", [0, 1, 3, 40_000])
    def test_an_open_quote_swallows_no_other_row(self, read, tmp_path, num_after):
        """Whether the file ends in it, or a field becomes too long."""
        after = "".join(f"{number},x.png\n" for number in range(num_after))
        (tmp_path / "a.csv").write_text(f'id,image\n7,a.png\n8,"b.png\n{after}')
        first, bad, *rest = read(tmp_path / "a.csv")
        assert (first.values["id"], bad.line, bad.values) == ("7", 2, {"id": "8"})
        assert "quote" in bad.message or "field limit" in bad.message
        assert [row.values["id"] for row in rest] == [str(number) for number in range(num_after)]
        assert [row.line for row in rest] == list(range(3, 3 + num_after))

    def test_many_open_quotes_end_in_time(self, read, tmp_path):
        (tmp_path / "a.csv").write_text("id,image\n" + '1,"a\n2,b\n' * 3000)
        assert len(read(tmp_path / "a.csv")) < 9000

    @pytest.mark.parametrize("head", ["", "a,a\n"])
    def test_without_names_of_columns_the_file_is_an_error(self, read, tmp_path, head):
        (tmp_path / "a.csv").write_text(f"{head}1,2\n" if head else "")
        (bad,) = read(tmp_path / "a.csv")
        assert "first line" in bad.message


class TestLance:
    @pytest.mark.full
    def test_rows_and_blobs(self, read, table, pngs, tmp_path):
        lance = pytest.importorskip("lance", reason="needs pylance: the extra 'lance'")
        lance.write_dataset(table, str(tmp_path / "a.lance"), max_rows_per_file=2)
        check(read(tmp_path / "a.lance"), pngs)
        assert open_rows(str(tmp_path / "a.lance")).num_rows == 5
        blob = pyarrow.field(
            "image", pyarrow.large_binary(), metadata={"lance-encoding:blob": "true"}
        )
        blobs = pyarrow.table({"image": pngs}, schema=pyarrow.schema([blob]))
        lance.write_dataset(blobs, str(tmp_path / "b.lance"))
        assert [row.values["image"] for row in read(tmp_path / "b.lance")] == pngs

    @pytest.mark.full
    def test_a_folder_that_is_none_is_an_error(self, tmp_path):
        pytest.importorskip("lance", reason="needs pylance: the extra 'lance'")
        (tmp_path / "a.lance").mkdir()
        with pytest.raises(ConfigError, match="cannot be opened as a Lance table"):
            open_rows(str(tmp_path / "a.lance"))


class TestDatasets:
    @pytest.fixture
    def dataset(self, pngs):
        datasets = pytest.importorskip("datasets", reason="needs datasets: the extra 'datasets'")
        datasets.disable_progress_bars()
        features = datasets.Features({"image": datasets.Image(), "title": datasets.Value("string")})
        rows = {
            "image": [*({"bytes": png, "path": None} for png in pngs), None],
            "title": ["t0", "t1", "t2", "t3", None],
        }
        return datasets.Dataset.from_dict(rows, features=features)

    @pytest.mark.full
    def test_what_save_to_disk_has_written(self, read, dataset, pngs, tmp_path):
        dataset.save_to_disk(str(tmp_path / "one"))
        check(read(tmp_path / "one"), pngs)
        assert open_rows(str(tmp_path / "one")).num_rows == 5

    @pytest.mark.full
    def test_splits_are_chosen(self, dataset, tmp_path):
        import datasets

        both = datasets.DatasetDict({"train": dataset, "test": dataset})
        both.save_to_disk(str(tmp_path / "two"))
        with pytest.raises(ConfigError, match="has the splits 'train', 'test'"):
            open_rows(str(tmp_path / "two"))
        assert open_rows(str(tmp_path / "two" / "test")).num_rows == 5

    def test_a_folder_of_images_with_metadata(self, read, pngs, tmp_path):
        pytest.importorskip("datasets", reason="needs datasets: the extra 'datasets'")
        lines = []
        for number, png in enumerate(pngs):
            (tmp_path / f"{number}.png").write_bytes(png)
            lines.append(json.dumps({"file_name": f"{number}.png", "title": f"t{number}"}))
        (tmp_path / "metadata.jsonl").write_text("\n".join(lines))
        rows = read(tmp_path)
        assert [row.values["title"] for row in rows] == ["t0", "t1", "t2", "t3"]
        assert [row.values["image"]["path"] for row in rows] == [
            f"{tmp_path}/{number}.png" for number in range(4)
        ]

    @pytest.fixture
    def hub_of(self, dataset, tmp_path, monkeypatch):
        """A hub that has its datasets in a folder, read in this process; the calls that open
        them."""
        import datasets

        (tmp_path / "owner/name").mkdir(parents=True)
        for split in ("train", "test"):
            dataset.to_parquet(str(tmp_path / f"owner/name/{split}.parquet"))
        real, calls = datasets.load_dataset, []

        def load(name, config=None, **options):
            calls.append((name, config, options))
            return real(str(tmp_path / name), streaming=options["streaming"])

        monkeypatch.setattr(datasets, "load_dataset", load)
        monkeypatch.setattr(  # restored at the end: what confines it is meant for a child
            datasets.data_files, "resolve_pattern", datasets.data_files.resolve_pattern
        )
        return calls

    @pytest.fixture
    def unconfined(self, monkeypatch):
        """The hub of these tests is a folder."""
        monkeypatch.setattr("mmdeploy_llm.data.rows.tables.hub.check_pattern", lambda *_: None)

    def test_a_dataset_of_the_hub_is_streamed(self, hub_of, unconfined, pngs):
        table = HubTable("hf://datasets/owner/name@main?split=test&config=c")
        pieces = list(table.pieces(Cursor(lines=FirstLines(count=100))))
        images = [
            image["bytes"] for piece in pieces for image in piece.columns.get("image", []) if image
        ]
        assert images == pngs
        assert [line for piece in pieces for line in piece.lines] == [1, 2, 3, 4, 5]
        assert hub_of == [("owner/name", "c", {"revision": "main", "streaming": True})]

    @pytest.mark.parametrize(
        ("url", "words"),
        [
            ("hf://datasets/owner/name", "choose one as in hf://"),
            ("hf://datasets/owner/name?split=dev", "choose one"),
            ("hf://datasets/owner/other", "cannot be opened as a dataset"),
        ],
    )
    def test_a_wrong_name_is_an_error(self, hub_of, unconfined, url, words):
        with pytest.raises(ConfigError, match=words):
            HubTable(url)

    def test_a_wrong_option_is_an_error(self):
        with pytest.raises(ConfigError, match="config and split are known"):
            open_rows("hf://datasets/owner/name?trust=1")

    def test_files_of_the_hub_are_files(self):
        assert is_hub("hf://datasets/owner/name@main")
        assert not is_hub("hf://datasets/owner/name/data/{0..3}.tar")

    @pytest.mark.one_is_quick
    @pytest.mark.parametrize(
        "files",
        [
            "/etc/host*",
            "../../other/name/a.csv",
            "https://example.com/a.csv",
            "zip://a.csv::https://example.com/a.zip",
            "file:///etc/hosts",
            "hf://datasets/other/name/a.csv",
            "a/../../b.csv",
            "..\\a.csv",
        ],
    )
    def test_what_a_dataset_names_elsewhere_is_not_opened(
        self, hub_of, files, monkeypatch, tmp_path
    ):
        """Datasets name their files in README.md; the library opens whatever that is."""
        import datasets

        opened = []
        monkeypatch.setattr(
            datasets.data_files, "resolve_pattern", lambda *args, **_: opened.append(args)
        )
        readme = f"---\nconfigs:\n- config_name: default\n  data_files: '{files}'\n---\n"
        (tmp_path / "owner/name/README.md").write_text(readme)
        with pytest.raises(ConfigError, match="which is not beneath it"):
            HubTable("hf://datasets/owner/name?split=train")
        assert not opened

    def test_what_a_dataset_names_beneath_it_is_opened(self):
        base = "hf://datasets/owner/name@1234"
        for pattern in ("data/*.parquet", "**", f"{base}/a.csv", "a..b.csv"):
            check_pattern(pattern, base)

    def test_without_the_library_the_extra_is_named(self, monkeypatch, tmp_path):
        monkeypatch.setitem(sys.modules, "datasets", None)
        monkeypatch.setitem(sys.modules, "lance", None)
        with pytest.raises(ConfigError, match=r"mmdeploy-llm\[datasets\]"):
            open_rows("hf://datasets/owner/name")
        with pytest.raises(ConfigError, match=r"mmdeploy-llm\[lance\]"):
            open_rows("a.lance")
