"""Media in cells of tables, in the forms in which people and programs write them."""

import base64
import io
import logging

import numpy as np
import pytest
from PIL import Image

from mmdeploy_llm.batch.corpus.cells import media_values
from mmdeploy_llm.batch.corpus.columns import ColumnOptions
from mmdeploy_llm.batch.sources import open_source
from mmdeploy_llm.data.records.ids import Selection
from mmdeploy_llm.data.rows.names import BUILT_IN_KINDS
from mmdeploy_llm.data.rows.rows import BadItem
from mmdeploy_llm.errors import RequestError
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.prompt import MediaPart

pa = pytest.importorskip("pyarrow", reason="needs pyarrow: the extra 'parquet'")
parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow: the extra 'parquet'")


def png():
    target = io.BytesIO()
    Image.new("RGB", (5, 4), "red").save(target, "PNG")
    return target.getvalue()


PNG = png()
TEXT = base64.b64encode(PNG).decode()
PIXELS = np.full((4, 5, 3), (255, 0, 0), np.uint8)
BYTES, TEXTS, INT = pa.binary(), pa.string(), pa.int32()
HF = pa.struct([("bytes", BYTES), ("path", TEXTS)])

# What a cell holds, its type in Arrow, and what the model gets.
CELLS = {
    "bytes": (PNG, BYTES, PNG),
    "large bytes": (PNG, pa.large_binary(), PNG),
    "a view of bytes": (PNG, pa.binary_view(), PNG),
    "datasets": ({"bytes": PNG, "path": "x.png"}, HF, PNG),
    "datasets and a size": (
        {"bytes": PNG, "path": "x.png", "width": 5, "height": 4},
        pa.struct([*HF, ("width", INT), ("height", INT)]),
        PNG,
    ),
    "a name and its type": (
        {"bytes": None, "path": "x.png", "mime": "image/png"},
        pa.struct([*HF, ("mime", TEXTS)]),
        "x.png",
    ),
    "a list of one": ([{"bytes": PNG, "path": None}], pa.list_(HF), PNG),
    "in a struct": ({"image": {"bytes": PNG}, "n": 3}, pa.struct([("image", HF), ("n", INT)]), PNG),
    "a URL": ({"url": "https://a.b/x.png"}, pa.struct([("url", TEXTS)]), "https://a.b/x.png"),
    "as in messages": (
        {"image_url": {"url": "https://a.b/x.png"}},
        pa.struct([("image_url", pa.struct([("url", TEXTS)]))]),
        "https://a.b/x.png",
    ),
    "another key": (
        {"data": PNG, "from": {"url": "https://a.b"}},
        pa.struct([("data", BYTES), ("from", pa.struct([("url", TEXTS)]))]),
        PNG,
    ),
    "base64": (TEXT, TEXTS, PNG),
    "base64 in lines": (
        "\n".join(TEXT[at : at + 76] for at in range(0, len(TEXT), 76)),
        TEXTS,
        PNG,
    ),
    "base64 in a struct": ({"bytes": TEXT}, pa.struct([("bytes", TEXTS)]), PNG),
    "a data URL": (f"data:image/png;base64,{TEXT}", TEXTS, f"data:image/png;base64,{TEXT}"),
    "numbers that are bytes": (list(PNG), pa.list_(pa.uint8()), PNG),
    "pixels": (PIXELS.tolist(), pa.list_(pa.list_(pa.list_(pa.uint8()))), PIXELS),
    "gray": (PIXELS[:, :, 0].tolist(), pa.list_(pa.list_(pa.int64())), PIXELS[:, :, 0]),
    "a map": ([("bytes", PNG)], pa.map_(TEXTS, BYTES), PNG),
}


def media(item):
    (message,) = item.prompt.messages
    parts = (part.item for part in message.content if isinstance(part, MediaPart))
    return [getattr(item.source, "uri", item.source) for item in parts]


@pytest.fixture
def read(tmp_path):
    """read(table, question, **columns) -> the items of a Parquet file."""

    def opened(table, question="What is it?", **columns):
        parquet.write_table(table, tmp_path / "in.parquet")
        given = {"question": question, "columns": ColumnOptions(**columns)}
        source = open_source(str(tmp_path / "in.parquet"), SamplingParams(), Selection(), **given)
        return list(source)

    return opened


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("column", ["image", None])
def test_forms(read, tmp_path, name, column):
    cell, kind, expected = CELLS[name]
    (item,) = read(pa.table({"image": pa.array([cell], kind)}), image=column)
    (found,) = media(item)
    if isinstance(expected, np.ndarray):
        np.testing.assert_array_equal(found, expected)
    elif isinstance(expected, str) and ":" not in expected:
        assert found == str(tmp_path / expected)
    else:
        assert found == expected


def test_tensors_of_one_shape(read):
    cells = pa.FixedShapeTensorArray.from_numpy_ndarray(np.stack([PIXELS, PIXELS + 1]))
    first, second = read(pa.table({"image": cells}))
    np.testing.assert_array_equal(media(first)[0], PIXELS)
    np.testing.assert_array_equal(media(second)[0], PIXELS + 1)


def test_several(read):
    (item,) = read(pa.table({"image": pa.array([[PNG, PNG]], pa.list_(BYTES))}))
    assert media(item) == [PNG, PNG]


@pytest.mark.parametrize(
    ("cell", "kind", "words"),
    [
        ({"height": 4, "data": b"raw"}, pa.struct([("height", INT), ("data", BYTES)]), "'height'"),
        ({"a": PNG, "b": PNG}, pa.struct([("a", BYTES), ("b", BYTES)]), "keys 'a', 'b'"),
        ({"rle": [1, 2]}, pa.struct([("rle", pa.list_(INT))]), "in which no image was found"),
        (3, INT, "a number or a row of numbers"),
    ],
)
def test_other_forms_are_refused_by_name(read, cell, kind, words):
    (item,) = read(pa.table({"image": pa.array([cell], kind)}), image="image")
    assert isinstance(item, BadItem)
    assert "column 'image': " in item.message
    assert words in item.message


def test_samples_with_their_rate():
    cell = {"array": [0.0, 0.5], "sampling_rate": 8000, "path": "a.wav"}
    (found,) = media_values(cell, "audio", BUILT_IN_KINDS)
    assert found == {"array": [0.0, 0.5], "sampling_rate": 8000}


def test_frames_are_one_video_and_several_images():
    frames = np.stack([PIXELS, PIXELS]).tolist()
    (video,) = media_values(frames, "video", BUILT_IN_KINDS)
    assert video.shape == (2, 4, 5, 3)
    assert [own.shape for own in media_values(frames, "image", BUILT_IN_KINDS)] == [(4, 5, 3)] * 2


def test_numbers_of_no_array_are_refused():
    with pytest.raises(RequestError, match="a row of numbers, which is no image"):
        list(media_values([[1], [1, 2]], "image", BUILT_IN_KINDS))


def test_a_column_that_is_not_used_is_told(read, caplog):
    table = pa.table({"image": [PNG], "mask": [PNG], "odd": [{"a": PNG, "b": PNG}], "n": [1]})
    with caplog.at_level(logging.WARNING):
        read(table, image="image")
    (record,) = caplog.records
    assert record.message.startswith("columns that look like media and are not used: 'mask', 'odd'")
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        read(pa.table({"image": [PNG], "n": [1], "title": ["a.png"]}), "{n}?")
    assert caplog.records == []


def test_columns_of_pixels_and_of_their_texts_are_told(read, caplog):
    """Pixels in a column that is not named after media, and what programs make of a picture when
    they write a text: no model sees it, and the person has to know."""
    large = np.full((1, 32, 24, 3), 200)
    table = pa.table(
        {
            "x": large.tolist(),
            "depth": large[..., 0].tolist(),
            "floats": (large / 255).tolist(),
            "dict": [str({"bytes": PNG, "path": None})],
            "object": [str(Image.new("RGB", (5, 4)).__repr__())],
            "image": ["[[[255 0 0]\n  [255 0 0]]]"],
            "vectors": (np.ones((1, 32, 24)) / 3).tolist(),
            "boxes": np.full((1, 32, 4), 7).tolist(),
            "points": np.full((1, 32, 20, 2), 0.5).tolist(),
            "ids": np.full((1, 500), 7).tolist(),
            "words": ["b or c, {'bytes': 3}"],
        }
    )
    with caplog.at_level(logging.WARNING):
        read(table)
    told = caplog.records[0].message.partition("not used: ")[2].partition(";")[0]
    expected = ["x", "depth", "floats", "dict", "object", "image"]
    assert told == ", ".join(map(repr, expected))


def test_media_after_the_first_rows_are_not_left_out_in_silence(read):
    """The first rows show which columns have media: one that is empty there may have some later."""
    cells = [None] * 20
    table = pa.table(
        {
            "pic": pa.array([*cells, PNG], BYTES),
            "image": pa.array([*cells[1:], "x.png", None], TEXTS),
            "words": pa.array([*cells[2:], "a", "b", "c"], TEXTS),
        }
    )
    *others, named, with_bytes = read(table)
    assert not any(isinstance(item, BadItem) for item in others)
    assert "the column 'image' looks like media, and is empty in the first" in named.message
    assert "name it with --media-column KIND=pic" in with_bytes.message
    *_, last = read(table, image="pic")
    assert media(last) == [PNG]


def test_a_second_column_of_media_after_the_first_rows_is_told(read, caplog):
    """Beside a column that is named it is told once; beside one that was looked for its rows are
    errors, as the whole table would be if the first rows showed it."""
    later = pa.array([None] * 20 + [PNG, PNG], BYTES)
    table = pa.table({"pic": pa.array([PNG] * 22, BYTES), "depth": later})
    with caplog.at_level(logging.WARNING):
        *_, last = read(table, image="pic")
    assert media(last) == [PNG]
    (told,) = caplog.records
    assert "not used: 'depth'; name them with --media-column" in told.message
    *others, row, _ = read(table)
    assert not any(isinstance(item, BadItem) for item in others[:20])
    assert "the column 'depth' looks like media" in row.message


def test_a_column_of_names_of_files_is_told_where_no_media_are_read(read, caplog):
    names = {"photo": ["a.png", "b c.jpg"], "note": ["see a.png", "none"], "of": ["a.py", "b.py"]}
    with caplog.at_level(logging.WARNING):
        read(pa.table(names))
    assert "are not used: 'photo'; name" in caplog.records[0].message
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        read(pa.table({**names, "image": [PNG, PNG]}))
        read(pa.table(names), "What is {photo}?")
    assert not caplog.records
