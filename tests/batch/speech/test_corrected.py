"""Transcripts that a person has corrected as subtitles: the others say the same afterwards."""

import os

import pytest
from typer.testing import CliRunner

from mmdeploy_llm.batch.speech.corrected import read_subtitles
from mmdeploy_llm.batch.speech.joining import Line
from mmdeploy_llm.batch.speech.writing import FORMATS
from mmdeploy_llm.cli import app
from mmdeploy_llm.errors import ConfigError
from tests.media.sound_files import noise, wav16

LINES = [
    Line(start=0.0, end=1.5, text="Hello <b>there</b>, 12:30:45.5."),
    Line(start=1.5, end=4.0, text="It is 7.", is_doubtful=True, speaker="channel 1"),
    Line(start=3725.25, end=3726.0, text="2026"),
]


@pytest.fixture
def talk(tmp_path, monkeypatch):
    """Writes a sound with its transcripts, the subtitles first."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "talk.wav").write_bytes(wav16(noise(0.1)))
    for age, name in enumerate(("srt", "txt", "vtt")):
        (tmp_path / f"talk.{name}").write_text(FORMATS[name](LINES), "utf-8")
        os.utime(tmp_path / f"talk.{name}", (1_000_000 + age, 1_000_000 + age))
    return tmp_path


def corrected(*words):
    done = CliRunner().invoke(app, ["transcribe", "talk.wav", "--corrected", *words])
    return done.exit_code, done.stdout, done.stderr


def test_what_nobody_has_corrected_stays_to_the_byte(talk):
    before = {path: path.read_bytes() for path in talk.iterdir()}
    code, told, _ = corrected("--transcripts", "srt,txt,vtt")
    assert (code, told) == (0, "talk.srt: all others say the same\n")
    assert {path: path.read_bytes() for path in talk.iterdir()} == before


def test_a_correction_reaches_the_others_with_its_marks_removed(talk):
    text = (talk / "talk.srt").read_text("utf-8").replace("channel 1: [?] It is 7.", "It was 8!")
    (talk / "talk.srt").write_text("\ufeff" + text.replace("\n", "\r\n"), "utf-8", newline="")
    code, told, _ = corrected("--transcripts", "txt,vtt")
    assert (code, told) == (0, "talk.srt: talk.txt and talk.vtt\n")
    expected = [LINES[0], Line(start=1.5, end=4.0, text="It was 8!"), LINES[2]]
    for name in ("txt", "vtt"):
        assert (talk / f"talk.{name}").read_text("utf-8") == FORMATS[name](expected)
    assert (talk / "talk.srt").read_text("utf-8").startswith("\ufeff")


def test_a_text_that_was_changed_later_stays(talk):
    (talk / "talk.txt").write_text("mine\n")
    code, _, errors = corrected()
    assert code == 1
    assert "'talk.txt' was changed after these subtitles" in errors
    assert (talk / "talk.txt").read_text() == "mine\n"
    assert corrected("--overwrite")[0] == 0
    assert (talk / "talk.txt").read_text("utf-8") == FORMATS["txt"](LINES)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("00:00:01,000 --> 00:00:02,000\na\nb\n00:00:03.000 --> 00:00:04.000\nc", ["a b", "c"]),
        ("1\n00:00:01,000 --> 00:00:02,000\n12\n\n2\n00:00:03,000 --> 00:00:04,000\n", ["12", ""]),
        ("1\n00:00:01,000 --> 00:00:02,000\n12\n", ["12"]),
        ("", []),
    ],
)
def test_subtitles_are_read_as_people_edit_them(tmp_path, text, found):
    (tmp_path / "a.srt").write_text(text)
    assert [line.text.strip() for line in read_subtitles(tmp_path / "a.srt")] == found


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"Only words.", "begin with 'Only words.'"),
        (b"lost\n00:00:01,000 --> 00:00:02,000\na", "begin with 'lost'"),
        (b"00:00:01,000 --> 00:00:02,000\n\xff", "not UTF-8"),
        (None, "no such subtitles"),
    ],
)
def test_what_is_no_subtitles_is_told(tmp_path, data, message):
    if data is not None:
        (tmp_path / "a.srt").write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        read_subtitles(tmp_path / "a.srt")


@pytest.mark.parametrize("names", ["json", "srt", "txt,json"])
def test_what_subtitles_cannot_fill_is_refused(talk, names):
    code, _, errors = corrected("--transcripts", names)
    assert code == 2
    assert "--corrected writes txt and vtt" in errors
