"""Rows of a corpus as items: which columns are the media, what is asked, what records repeat."""

import datetime
import decimal
import io
import json
import math
import tarfile

import pytest
from PIL import Image

from mmdeploy_llm.batch.corpus.columns import ColumnOptions, Template, detect
from mmdeploy_llm.batch.sources import open_source
from mmdeploy_llm.data.records.ids import Selection
from mmdeploy_llm.data.records.item import Item
from mmdeploy_llm.data.records.template import column_value
from mmdeploy_llm.data.rows.rows import BadItem
from mmdeploy_llm.errors import ConfigError, RequestError
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.prompt import PromptParts, TextPart

PNG = b"\x89PNG\r\n\x1a\n rest"
MP4 = b"\0\0\0\x20ftypisom rest"

pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow: the extra 'parquet'")


@pytest.fixture
def source(tmp_path):
    """source(rows, suffix, **options) -> the source of a file with these rows."""
    from pyarrow import parquet

    def opened(rows, suffix="parquet", question=None, **columns):
        given = rows
        if suffix is not None:
            given = path = tmp_path / f"in.{suffix}"
            if suffix == "parquet":
                parquet.write_table(pyarrow.Table.from_pylist(rows), path)
            else:
                path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return open_source(
            given,
            SamplingParams(),
            Selection(),
            question=question,
            columns=ColumnOptions(**columns),
        )

    return opened


def content(item):
    """The media and texts of an item, each with its kind."""
    assert isinstance(item, Item), item
    (message,) = item.prompt.messages
    return [
        ("text", part.text)
        if isinstance(part, TextPart)
        else (part.item.kind, getattr(part.item.source, "uri", part.item.source))
        for part in message.content
    ]


def asked(item):
    kind, text = content(item)[-1]
    assert kind == "text"
    return text


@pytest.mark.full
def test_the_only_column_with_images_is_asked_about(source):
    found = source([{"photo": PNG, "title": "a", "vector": b"\0\1\2"}] * 2)
    assert found.about == "images: column 'photo' (found in the first rows)"
    first, second = found
    assert content(first) == [("image", PNG), ("text", "Describe the image.")]
    assert [item.name for item in first.media] == ["(photo of row 1)"]
    assert (first.id, second.id) == (1, 2)


@pytest.mark.parametrize(
    ("cell", "kind"),
    [
        (PNG, "image"),
        (MP4, "video"),
        (b"RIFF\0\0\0\0WEBP", "image"),
        (b"RIFF\0\0\0\0AVI ", "video"),
        ({"bytes": PNG, "path": "x"}, "image"),
        ({"bytes": MP4, "path": None}, "video"),
        ({"bytes": None, "path": "a/b.jpg"}, "image"),
        ({"path": "a/b.mp4"}, "video"),
        ([{"bytes": PNG}], "image"),
        (b"RIFF\0\0\0\0WAVE", "audio"),
        ({"bytes": b"ID3", "path": "a.mp3"}, "audio"),
        ({"bytes": PNG, "other": 1}, "image"),
        ("a.jpg", None),
        (None, None),
        ([], None),
    ],
)
def test_media_are_found_by_their_values(cell, kind):
    assert [own.kind for own in detect([{"it": None}, {"it": cell}])] == ([kind] if kind else [])


@pytest.mark.parametrize(("name", "kind"), [("image", "image"), ("JPG", "image"), ("mp4", "video")])
def test_texts_are_media_by_the_name_of_their_column(name, kind):
    assert [own.kind for own in detect([{name: "a.x", "title": "b"}])] == [kind]


@pytest.mark.full
def test_a_name_in_the_corpus_never_names_a_file_here(source):
    (item,) = source([{"image": {"bytes": PNG, "path": "/etc/passwd"}}])
    assert content(item)[0] == ("image", PNG)
    assert not item.media[0].is_file


@pytest.mark.full
def test_paths_are_relative_to_the_file(source, tmp_path):
    (item,) = source([{"image": "sub/a.png"}])
    assert content(item)[0] == ("image", f"{tmp_path}/sub/a.png")
    assert item.media[0].is_file


@pytest.mark.full
def test_several_columns_with_media_are_listed(source):
    rows = [{"a": PNG, "b": PNG, "clip": MP4}]
    with pytest.raises(ConfigError, match=r"'a', 'b', 'clip'; choose with --image-column"):
        source(rows)
    (item,) = source(rows, image="b", video="clip")
    assert [kind for kind, _ in content(item)] == ["image", "video", "text"]


@pytest.mark.full
def test_a_list_of_images_is_one_prompt(source):
    (item,) = source([{"pages": [{"bytes": PNG, "path": None}, {"bytes": PNG, "path": None}]}])
    assert [kind for kind, _ in content(item)] == ["image", "image", "text"]
    assert [own.name for own in item.media] == ["(pages[0] of row 1)", "(pages[1] of row 1)"]


class TestQuestions:
    @pytest.mark.full
    def test_columns_fill_the_prompt(self, source):
        rows = [{"image": PNG, "title": "a {b}", "number": 3}]
        (item,) = source(rows, question="Is {title} {number}? {{x}}")
        assert asked(item) == "Is a {b} 3? {x}"

    @pytest.mark.full
    def test_a_column_is_the_prompt(self, source):
        assert asked(*source([{"image": PNG, "ask": "Why?"}], prompt="ask")) == "Why?"
        assert asked(*source([{"image": PNG, "prompt": "Why?"}])) == "Why?"
        assert asked(*source([{"clip": MP4}])) == "Describe the video."

    @pytest.mark.full
    def test_texts_alone_are_asked_about(self, source):
        (item,) = source([{"text": "abc"}], question="Shorten: {text}")
        assert content(item) == [("text", "Shorten: abc")]

    def test_lines_of_ours_may_be_asked_with_columns_too(self, source):
        rows = [{"url": "a.png", "title": "x"}, {"url": "b.png"}]
        first, bad = source(rows, "jsonl", question="{title}?", image="url")
        assert asked(first) == "x?"
        assert "has no column 'title'; it has 'url'" in bad.message

    def test_media_of_lines_that_are_asked_with_columns_are_found(self, source):
        """They were left out in silence, and the question answered without them."""
        cut = {"audio": "b.mp3", "end": 2}
        rows = [
            {"audio": "a.wav", "ask": "Who?"},
            {"audio": cut, "ask": "?"},
        ]
        for options in ({"prompt": "ask"}, {"question": "{ask}"}):
            found = source(rows, "jsonl", **options)
            assert found.about == "audio: column 'audio' (found in the first rows)"
            first, second = found
            assert [kind for kind, _ in content(first)] == ["audio", "text"]
            (sound,) = second.prompt.items
            assert sound.options == {"end": 2}
        with pytest.raises(ConfigError, match="several columns have media"):
            source([{"audio": "a.wav", "image": "b.png"}], "jsonl", question="Why?")

    @pytest.mark.parametrize(
        "template",
        ["{title.x}", "{title[0]}", "{title!r}", "{title:>999999999}", "{}", "{0", "}", "{a{b}}"],
    )
    def test_only_plain_names_are_allowed(self, template):
        with pytest.raises(ConfigError, match="cannot be filled"):
            Template(template)

    def test_a_name_reaches_nothing_but_columns(self):
        with pytest.raises(RequestError, match="no column '__class__'"):
            Template("{__class__}").fill({"a": 1})

    @pytest.mark.parametrize("value", [None, b"x", [b"x"], {"a": {"b": b"x"}}, math.nan])
    def test_bytes_and_nothing_fill_no_question(self, value):
        with pytest.raises(RequestError, match="column 'a'"):
            Template("{a}").fill({"a": value})

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            ('a\n"b"', 'a\n"b"'),
            (3, "3"),
            (0.1, "0.1"),
            (True, "true"),
            ([1, "é"], '[1, "é"]'),
            ({"x": {"y": None}}, '{"x": {"y": null}}'),
            ([math.inf, 1.5], "[null, 1.5]"),
            (decimal.Decimal("1.20"), "1.20"),
            (datetime.date(2026, 11, 5), "2026-11-05"),
            (datetime.datetime(2026, 11, 5, 7, 8), "2026-11-05 07:08:00"),
            (datetime.timedelta(days=1, seconds=5), "1 day, 0:00:05"),
            ([datetime.date(2026, 11, 5)], '["2026-11-05"]'),
        ],
    )
    def test_values_stand_in_questions_as_in_records(self, value, text):
        assert Template("<{a}>").fill({"a": value}) == f"<{text}>"
        kept = column_value({"a": value}, "a")
        assert json.loads(text) == kept if not isinstance(kept, str) else kept == text


class TestErrors:
    @pytest.mark.full
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"question": "{titel}"}, "no column 'titel'; the columns are 'image', 'title'"),
            ({"image": "photo"}, "no column 'photo'"),
            ({"prompt": "ask"}, "no column 'ask'"),
            ({"id": "key"}, "no column 'key'"),
            ({"carried": ("url",)}, "no column 'url'"),
            ({"question": "x", "prompt": "title"}, "contradict"),
        ],
    )
    def test_an_unknown_column_is_an_error_at_once(self, source, options, words):
        with pytest.raises(ConfigError, match=words):
            source([{"image": PNG, "title": "a"}], **options)

    @pytest.mark.full
    def test_a_table_without_media_and_prompts_is_an_error(self, source):
        with pytest.raises(ConfigError, match="no column has media or prompts: 'text'"):
            source([{"text": "a"}])

    def test_a_folder_of_media_has_no_columns(self, tmp_path):
        (tmp_path / "a.png").touch()
        with pytest.raises(ConfigError, match="has no columns"):
            open_source(
                tmp_path, SamplingParams(), Selection(), columns=ColumnOptions(carried=("a",))
            )

    @pytest.mark.full
    def test_an_empty_cell_harms_no_other(self, source):
        rows = [{"image": None, "t": "a"}, {"image": PNG, "t": "b"}, {"image": PNG, "t": None}]
        bad, good, other = source(rows, question="{t}")
        assert "the column 'image' is empty" in bad.message
        assert asked(good) == "b"
        assert "the column 't' is empty" in other.message

    @pytest.mark.full
    def test_a_row_with_messages_and_media_is_an_error(self, source):
        messages = json.dumps([{"role": "user", "content": "x"}])
        (bad,) = source([{"image": PNG, "messages": messages}])
        assert isinstance(bad, BadItem)
        assert "'messages', and media of its own" in bad.message


class TestColumns:
    @pytest.mark.full
    def test_records_repeat_columns(self, source):
        rows = [{"image": PNG, "n": float("nan"), "tags": ["a"], "id": "x", "none": None}]
        (item,) = source(rows, carried=("n", "tags", "id", "none"))
        assert item.columns == {"n": None, "tags": ["a"], "id": "x", "none": None}
        assert item.id == "x"

    @pytest.mark.full
    def test_lines_with_prompts_may_have_columns(self, source):
        (item,) = source([{"prompt": "a", "url": "u"}], carried=("url",))
        assert (item.prompt, item.columns) == (PromptParts(text="a"), {"url": "u"})

    @pytest.mark.full
    def test_bytes_cannot_be_repeated(self, source):
        (bad,) = source([{"image": PNG}], carried=("image",))
        assert "holds bytes" in bad.message

    @pytest.mark.full
    def test_ids_come_from_a_column(self, source):
        rows = [{"image": PNG, "key": "a"}, {"image": PNG, "key": None}]
        item, bad = source(rows, id="key")
        assert item.id == "a"
        assert "'key' with the id is empty" in bad.message

    def test_dicts_of_a_program_have_columns_too(self, source):
        image = Image.open(io.BytesIO(_png()))
        rows = ({"image": image, "t": str(number)} for number in range(2))
        first, _ = source(rows, None, question="{t}?", image="image")
        assert content(first)[0][1] is image
        assert asked(first) == "0?"


def _png():
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.full
def test_the_digest_follows_what_the_row_says(source):
    def digest(row, **options):
        (item,) = source([row], **options)
        return item.digest

    row = {"image": PNG, "t": "a", "other": 1}
    same = digest(row, question="{t}")
    assert digest({**row, "other": 2}, question="{t}") == same
    assert digest({**row, "t": "b"}, question="{t}") != same
    assert digest({**row, "image": PNG + b"x"}, question="{t}") != same
    assert digest(row, question="{t}", carried=("other",)) != same


def test_a_sample_without_media_is_not_described(tmp_path):
    """The model described what it did not get. A question that reads a text is asked."""
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, data in (("a.xyz", b"1"), ("b.png", PNG), ("b.txt", b"red"), ("c.txt", b"blue")):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))

    def items(question):
        return list(
            open_source(tmp_path / "a.tar", SamplingParams(), Selection(), question=question)
        )

    a, b, c = items("Describe it.")
    assert "no member of the sample has the suffix of media" in a.message
    assert (c.id, isinstance(c, BadItem), isinstance(b, Item)) == ("a.tar/c", True, True)
    a, b, c = items("Shorten: {txt}")
    assert asked(c) == "Shorten: blue"


class TestQuestionsAboutFiles:
    """Files have no columns, so a question about them that names one is never asked."""

    @pytest.fixture
    def folder(self, tmp_path):
        train = tmp_path / "train"
        train.mkdir()
        (train / "0.png").write_bytes(b"")
        return tmp_path

    def opened(self, folder, question):
        return open_source(str(folder), SamplingParams(), Selection(), question=question)

    def test_a_column_of_no_table(self, folder):
        with pytest.raises(ConfigError, match=r"no column fills \{title\} .* have no columns$"):
            self.opened(folder, "Describe {title}.")

    def test_the_folder_with_the_metadata_is_named(self, folder):
        (folder / "train" / "metadata.csv").write_text("file_name,title\n0.png,a\n")
        with pytest.raises(ConfigError, match=r"'.*train' has metadata: name that folder"):
            self.opened(folder, "Describe {title}.")

    @pytest.mark.one_is_quick
    @pytest.mark.parametrize(
        "question", ["Describe it.", 'Write {"a": 1}.', "{{title}}", "{}", "{ title }", "{1}"]
    )
    def test_other_braces_are_text(self, folder, question):
        (item,) = self.opened(folder, question)
        assert item.prompt.messages[0].text == question


@pytest.mark.parametrize(
    "bad", ["b", "b,1.png,x", 'b,"1.png', "b,"], ids=["short", "long", "quote", "no image"]
)
def test_a_bad_row_keeps_its_id(tmp_path, bad):
    """So that a resumed run knows the row again once it is mended."""
    (tmp_path / "a.csv").write_text(f"id,image\na,0.png\n{bad}\nc,2.png\n")
    items = list(open_source(tmp_path / "a.csv", SamplingParams(), Selection()))
    assert [item.id for item in items] == ["a", "b", "c"]
    assert [isinstance(item, BadItem) for item in items] == [False, True, False]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"drawing": b"SKETCH 1"}, "sketch"),
        ({"it": {"bytes": b"SKETCH 1", "path": None}}, "sketch"),
        ({"it": {"bytes": None, "path": "a.sketch"}}, "sketch"),
        ({"SKETCH": "a/b.x"}, "sketch"),
        ({"audio": "a dog barks"}, None),  # a text
        ({"audio": "my sounds/a dog.wav"}, "audio"),
        ({"audio": "https://a.org/?id=1"}, "audio"),
    ],
)
def test_columns_of_kinds_of_plugins_are_found(kinds_of, values, kind):
    first = (b"SKETCH",)
    own = {
        "kind": "sketch",
        "suffixes": (".sketch",),
        "columns": ("drawing",),
        "first_bytes": first,
    }
    found = detect([values], kinds_of(own))
    assert [column.kind for column in found] == ([kind] if kind else [])


@pytest.mark.full
def test_a_sound_that_datasets_has_decoded_keeps_its_rate(source):
    array = {"path": "a.wav", "array": [0.0, 0.5], "sampling_rate": 8000}
    options = ColumnOptions.given({"audio_column": "it", "media_column": {"audio": ["more"]}})
    assert [column.name for column in options.media_columns] == ["it", "more"]
    (item,) = source([{"it": array}], audio="it")
    (sound,) = item.prompt.items
    assert (sound.source, sound.options) == ([0.0, 0.5], {"sampling_rate": 8000})
    assert [media.kind for media in item.media] == ["audio"]
