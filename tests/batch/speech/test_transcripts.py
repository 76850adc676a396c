"""Windows of long sounds, what is joined of them, and the files that are written."""

import io
import json
import os
from dataclasses import replace
from hashlib import blake2b
from html import unescape
from pathlib import Path
from types import SimpleNamespace

import av
import numpy as np
import pytest

from mmdeploy_llm.batch.speech.doubts import is_poor
from mmdeploy_llm.batch.speech.joining import Line, joined
from mmdeploy_llm.batch.speech.plan import plan as plan_of
from mmdeploy_llm.batch.speech.run import Transcriber, Transcript, Wish
from mmdeploy_llm.batch.speech.sources import Source, Sources, digest_of_file
from mmdeploy_llm.batch.speech.windows import windows_of
from mmdeploy_llm.batch.speech.writing import FORMATS, read_formats, write
from mmdeploy_llm.data.records.configuration import Configuration
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import Heard, Spoken, Sureness
from tests.media.sound_files import RATE, noise, wav16
from tests.media.test_sound_clock import film


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (0, [(0, 0)]),
        (30, [(0, 30)]),
        (31, [(0, 30), (25, 31)]),
        (55, [(0, 30), (25, 55)]),
        (56, [(0, 30), (25, 55), (50, 56)]),
    ],
)
def test_windows_cover_a_sound_once(length, expected):
    assert [(own.first, own.end) for own in windows_of(length, 30, 5)] == expected


@pytest.mark.parametrize("overlap", [-1, 15, 40])
def test_windows_that_overlap_too_far(overlap):
    with pytest.raises(ConfigError, match="less than half a window"):
        next(windows_of(100, 30, overlap))


def lines(*rows):
    return [Line(start=start, end=end, text=text) for start, end, text in rows]


def rows(found):
    return [(line.start, line.end, line.text) for line in found]


def test_a_sentence_that_both_windows_have_stands_once():
    one = lines((0, 20, "A b."), (20, 27, "C d."), (27, 30, "E f g"))
    two = lines((20.5, 27.1, "C d."), (27.1, 33, "E f g h."), (33, 40, "I."))
    found = joined([(0, 30, one), (25, 55, two)])
    assert rows(found) == [
        (0, 20, "A b."), (20, 27, "C d."), (27.1, 33, "E f g h."), (33, 40, "I.")
    ]  # fmt: skip


def test_words_of_a_sentence_that_was_cut_stand_once():
    one = lines((0, 22, "Yes."), (22, 30, "Then we went to the st"))
    two = lines((25, 33, "went to the station, they say."), (33, 40, "I."))
    found = joined([(0, 30, one), (25, 55, two)])
    assert rows(found) == [
        (0, 22, "Yes."), (22, 25, "Then we"), (25, 33, "went to the station, they say."),
        (33, 40, "I."),
    ]  # fmt: skip


def test_characters_of_scripts_without_spaces():
    found = joined([
        (0, 30, lines((20, 30, "然后我们去了火车"))),
        (25, 55, lines((25, 33, "去了火车站。"))),
    ])  # fmt: skip
    assert rows(found) == [(20, 25, "然后我们"), (25, 33, "去了火车站。")]


def test_words_that_differ_stay():
    found = joined([(0, 30, lines((20, 30, "a b"))), (25, 55, lines((26, 33, "c d")))])
    assert rows(found) == [(20, 26, "a b"), (26, 33, "c d")]


def test_punctuation_alone_is_not_said_twice():
    found = joined([(0, 30, lines((20, 30, "a -"))), (25, 55, lines((26, 33, "- b")))])
    assert rows(found) == [(20, 26, "a -"), (26, 33, "- b")]


def test_windows_are_cut_where_a_sentence_ends_near_the_middle_of_the_overlap():
    one = lines((0, 25.5, "A."), (25.5, 27.4, "B."), (27.4, 30, "C d"))
    two = lines((25, 25.6, "A."), (25.6, 27.4, "X."), (27.4, 33, "C d e."))
    found = joined([(0, 30, one), (25, 55, two)])
    assert rows(found) == [(0, 25.5, "A."), (25.5, 27.4, "B."), (27.4, 33, "C d e.")]


def test_times_never_fall():
    rng = np.random.default_rng(0)
    for _ in range(200):
        windows = []
        for index in range(4):
            begin = index * 25.0
            times = np.sort(rng.uniform(0, 30, 8)) + begin
            own = [(a, b, rng.choice(["a b", "b c", "c"])) for a, b in times.reshape(4, 2)]
            windows.append((begin, begin + 30, lines(*own)))
        found = joined(windows)
        times = [moment for line in found for moment in (line.start, line.end)]
        assert times == sorted(times)


TWO = lines((0, 1.5, "A <b> & c"), (3661.0019, 3662, "two\n\nlines"))


def test_formats():
    assert FORMATS["srt"](TWO) == (
        "1\n00:00:00,000 --> 00:00:01,500\nA <\u2060b> & c\n\n"
        "2\n01:01:01,002 --> 01:01:02,000\ntwo lines\n"
    )
    assert FORMATS["vtt"](TWO) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nA &lt;b&gt; &amp; c\n\n"
        "01:01:01.002 --> 01:01:02.000\ntwo lines\n"
    )
    assert FORMATS["txt"](TWO) == "A <b> & c\ntwo lines\n"
    row = {"start": 0, "end": 1.5, "text": "A <b> & c", "language": None, "speaker": None,
           "doubtful": False}  # fmt: skip
    assert json.loads(FORMATS["json"](TWO))[0] == row
    assert [make([]) for make in FORMATS.values()] == ["[]\n", "", "", "WEBVTT\n"]


TEXTS = {  # what a model may say -> what a reader of subtitles makes of it
    "a --> b": "a --> b",
    "00:00:01,000 --> 00:00:02,000": "00:00:01,000 --> 00:00:02,000",
    "at 1:02:03.5 and 01:02:03,500": "at 1:02:03.5 and 01:02:03,500",
    "R&D & <i>x</i> <b": "R&D & <i>x</i> <b",
    "a<b and c>d, {\\i1}, C:\\New": "a<b and c>d, {\\i1}, C:\\New",
    "< font>": "< font>",
    "1": "1",
    "NOTE this": "NOTE this",
    "WEBVTT": "WEBVTT",
    "two\n\nlines\r\nthree": "two lines three",
    "nul\x00 byte\x1b[31m": "nul byte[31m",
    "line\u2028separator": "line separator",
    "\x00": None,
    "": None,
    "the end": "the end",
}


@pytest.mark.parametrize("name", ["srt", "vtt"])
def test_another_reader_finds_every_text(name):
    """FFmpeg reads what is written, also around whole hours, in lines that overlap or run back."""
    spans = [(3599.9996 + 2 * at, 3602 + 2 * at) for at in range(len(TEXTS))]
    spans[-1] = (360_000, 359_999)
    own = [Line(start=a, end=b, text=text) for (a, b), text in zip(spans, TEXTS, strict=True)]
    with av.open(
        io.BytesIO(FORMATS[name](own).encode()), format={"vtt": "webvtt"}.get(name, name)
    ) as file:
        read = [bytes(packet).decode() for packet in file.demux() if packet.size]
    wanted = [text for text in TEXTS.values() if text is not None]
    found = [unescape(text) for text in read] if name == "vtt" else read
    assert [text.replace("\u2060", "") for text in found] == wanted


def test_pysubs2_reads_every_text():
    """By default it reads tags, overrides and lines with two times; none of these texts is one."""
    pysubs2 = pytest.importorskip("pysubs2", reason="needs pysubs2, which the extra 'dev' installs")
    own = lines(*((at, at + 1, text) for at, text in enumerate(TEXTS)))
    found = pysubs2.SSAFile.from_string(FORMATS["srt"](own), format_="srt")
    wanted = [(at * 1000, text) for at, text in enumerate(TEXTS.values()) if text is not None]
    assert [(one.start, one.text.replace("\u2060", "")) for one in found] == wanted
    assert ["\u2060" in one.text for one in found] == [
        any(mark in text for mark in ("<i", "<b", "< f", "{\\", ":0")) for _, text in wanted
    ], "only what would be read as something else is changed"


@pytest.mark.parametrize("name", ["srt", "vtt"])
def test_times_of_a_hundred_hours(name):
    times = [0.0, 3599.9994, 86_400.5, 359_999.999, 360_000.25, 3_600_000.0]
    own = lines(*((at, at + 2, "yes") for at in times))
    with av.open(
        io.BytesIO(FORMATS[name](own).encode()), format={"vtt": "webvtt"}.get(name, name)
    ) as file:
        found = [float(p.pts * p.time_base) for p in file.demux() if p.size]
    assert found == pytest.approx(times, abs=0.00051)


def test_all_formats_hold_the_same_words():
    own = lines(*((at, at + 1, text) for at, text in enumerate(TEXTS)))
    wanted = [text for text in TEXTS.values() if text is not None]
    assert [row["text"] for row in json.loads(FORMATS["json"](own))] == wanted
    assert FORMATS["txt"](own).splitlines() == wanted


def test_each_line_says_its_language(tmp_path):
    path = written(tmp_path / "a.wav", 4)
    (found,) = run([path], Engine()).values()
    assert [line.language for line in found.lines] == ["de", "de"]
    Heard_ = Rule.read
    try:
        Rule.read = lambda self, ids: replace(Heard_(self, ids), language=None)
        (found,) = run([path], Engine(), language="french").values()
    finally:
        Rule.read = Heard_
    assert {row["language"] for row in json.loads(FORMATS["json"](found.lines))} == {"french"}


def words_of(found):
    return " ".join(line.text for line in found)


def test_words_that_only_one_window_has_heard_stay():
    """Lines of Whisper tiny.en, of a book that is read: the second window's first line begins
    before the cut and ends after it."""
    one = lines(
        (17.88, 24.56, "Had he married a more amiable woman he might have been made still more."),
        (24.56, 28.56, "He might even have been made amiable himself."),
    )
    two = lines(
        (25.0, 31.62, "have been made amiable himself. And Mr. John Dashwood had then leisure"),
        (31.62, 38.1, "to consider how much there might be prudently in his power to do."),
    )
    assert words_of(joined([(0, 30, one), (25, 55, two)])).endswith(
        "still more. He might even have been made amiable himself. And Mr. John Dashwood had then "
        "leisure to consider how much there might be prudently in his power to do."
    )


@pytest.mark.parametrize(
    ("one", "two", "expected"),
    [
        # The first window has heard nothing of the overlap, or the second one.
        ([(0, 22, "a.")], [(25, 27, "b."), (27, 33, "c.")], "a. b. c."),
        ([(0, 25, "a."), (25, 27, "b."), (27, 30, "c")], [(30.5, 33, "d.")], "a. b. c d."),
        ([(0, 25, "a."), (25, 27, "b."), (27, 30, "c")], [], "a. b. c"),
        ([], [(25, 27, "b."), (27, 33, "c.")], "b. c."),
        # Two sentences of the first are one of the second, which goes on.
        (
            [(0, 25, "x y."), (25, 26.5, "a b."), (26.5, 28.5, "c d.")],
            [(25, 32, "A b, c d, e f g.")],
            "x y. A b, c d, e f g.",
        ),
        # Nothing alike: the words after the cut stay.
        (
            [(0, 25, "x."), (25, 28, "one two three")],
            [(25, 30.9, "won too free four five six")],
            "x. one two three four five six",
        ),
        # A time that differs a little is no sentence of its own.
        ([(0, 25, "x."), (25, 28, "Hello you.")], [(25, 28.2, "Hallo Hugh.")], "x. Hello you."),
    ],
)
def test_no_words_are_lost_and_none_stand_twice(one, two, expected):
    found = joined([(0, 30, lines(*one)), (25, 55, lines(*two))])
    assert words_of(found) == expected
    times = [moment for line in found for moment in (line.start, line.end)]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("one", "two", "expected"),
    [
        # The next window begins within a word, or hears its end as a word.
        ([(20, 25.3, "at the station.")], [(25, 28, "tion. They say so.")],
         "at the station. They say so."),
        ([(20, 27, "we went to the station")], [(25, 30, "shun to the station they say")],
         "we went to the station they say"),
        # A sentence ends a little after the next window begins, which has the one after it.
        ([(20, 26.1, "not an ill man.")], [(25, 31, "He might have been.")],
         "not an ill man. He might have been."),
        # The last word of one and the first of the other, whose times differ.
        ([(20, 26.7, "four of hearts.")], [(25, 31, "Hearts. And he had")],
         "four of hearts. And he had"),
        # Said twice for real: in one window each, or in both.
        ([(20, 23, "Thank you.")], [(28, 29, "Thank you.")], "Thank you. Thank you."),
        ([(25, 26, "Thank you."), (28, 29, "Thank you.")],
         [(25, 26, "Thank you."), (28, 29, "Thank you."), (30, 31, "Yes.")],
         "Thank you. Thank you. Yes."),
        # Spelled in two ways between words that are alike.
        ([(24, 29, "he was cold-hearted and ill")], [(25, 33, "was cold hearted and ill too")],
         "he was cold hearted and ill too"),
        ([(24, 29, "I have 42 of them now")], [(25, 33, "have forty two of them now, yes")],
         "I have forty two of them now, yes"),
        # One of them has left out a word, or a sentence.
        ([(24, 30, "one two three four five six")], [(25, 33, "two three five six seven")],
         "one two three four five six seven"),
        ([(24, 26, "one two."), (28, 29, "five six.")],
         [(25, 26, "two."), (26.2, 27.8, "Three four."), (28, 33, "Five six seven.")],
         "one two. Three four. Five six seven."),
        # Times that jump: the next window says all later, or all at once.
        ([(24, 29, "and now we go on to it")], [(27.5, 33, "now we go on to it again")],
         "and now we go on to it again"),
        ([(24, 29, "and now we go on to it")], [(25, 25.2, "now we go on to it again")],
         "and now we go on to it again"),
        # Scripts without spaces, and texts that mix them.
        ([(20, 28, "今日は天気がいい")], [(25, 33, "天気がいいね。")], "今日は天気がいいね。"),
        ([(20, 28, "ฉันไปสถานี")], [(25, 33, "ไปสถานีรถไฟ")], "ฉันไปสถานีรถไฟ"),
        ([(20, 28, "我用 Whisper 转写")], [(25, 33, "Whisper 转写文件")], "我用 Whisper 转写文件"),
        ([(20, 28, "나는 역에 갔다")], [(25, 33, "역에 갔다 왔다")], "나는 역에 갔다 왔다"),
        # A window of which nothing was heard.
        ([], [], ""),
        ([(20, 25, "...")], [(26, 28, "...")], "... ..."),
    ],
)  # fmt: skip
def test_words_and_times_decide_what_both_windows_have_heard(one, two, expected):
    found = joined([(0, 30, lines(*one)), (25, 55, lines(*two))])
    spaced = words_of(found)
    assert spaced.replace(" ", "").casefold() == expected.replace(" ", "").casefold()
    times = [moment for line in found for moment in (line.start, line.end)]
    assert times == sorted(times)


def test_a_speech_that_is_divided_anywhere_is_joined_to_itself():
    """Windows that hear the same words, but for one that is cut off at each edge."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        said = [f"w{rng.integers(30)}" for _ in range(240)]
        times = np.cumsum(rng.uniform(0.2, 0.6, len(said)))
        windows, begin = [], 0.0
        while begin < times[-1]:
            heard = [at for at in range(1, len(said)) if begin < times[at - 1]
                     and times[at] < begin + 30]  # fmt: skip
            own = [heard[at : at + 9] for at in range(0, len(heard), 9)]
            windows.append((begin, begin + 30, lines(*(
                (times[part[0] - 1] + rng.uniform(-0.1, 0.1), times[part[-1]],
                 " ".join(said[at] for at in part)) for part in own))))  # fmt: skip
            begin += 25
        assert words_of(joined(windows)).split() == said[1:]


def test_a_subtitle_ends_after_it_begins():
    line = [Line(start=2.0, end=2.0, text="yes")]
    assert FORMATS["vtt"](line) == "WEBVTT\n\n00:00:02.000 --> 00:00:02.100\nyes\n"
    assert "00:00:02,000 --> 00:00:02,100" in FORMATS["srt"](line)


def test_names_of_formats():
    assert read_formats("SRT, txt,srt") == ("srt", "txt")
    for text in ("doc", ""):
        with pytest.raises(ConfigError, match="json, srt, txt, vtt"):
            read_formats(text)


def test_a_file_is_written_whole(tmp_path):
    write(tmp_path / "sub" / "a.txt", "ä\n")
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["a.txt"]
    assert (tmp_path / "sub" / "a.txt").read_bytes() == "ä\n".encode()


MADE = Configuration(model="a-model", values={"model": "12ab", "task": "transcribe"})


def plan(paths, formats, folder, made_by=MADE, **more):
    return plan_of(paths, formats, folder, made_by, **more)


def done(path, *names, made_by=MADE, stem=None):
    """Writes empty transcripts of a file, and what they are made of."""
    stem = stem or path.with_suffix("")
    for name in names:
        stem.with_name(f"{stem.name}.{name}").write_text("")
    state, digest = path.stat(), blake2b(path.read_bytes(), digest_size=20).hexdigest()
    source = Source(path=path, digest=digest, num_bytes=state.st_size, modified=state.st_mtime_ns)
    Sources(stem).write(names, source, made_by)


def names(planned, root):
    return {
        str(path.relative_to(root))
        for task in planned.tasks.values()
        for path in task.targets.values()
    }


def test_where_transcripts_go(tmp_path):
    for name in ("a.wav", "b/c.wav", "b/c.mp3", "d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(wav16(noise(0.1)) if name[0] != "d" else b"text")
    whole = plan([str(tmp_path)], ("srt", "txt"), None)
    expected = {"a.srt", "a.txt", "b/c.wav.srt", "b/c.wav.txt", "b/c.mp3.srt", "b/c.mp3.txt"}
    assert (names(whole, tmp_path), whole.num_done) == (expected, 0)
    assert ".txt" in "".join(whole.told), "a file that is no sound is told"
    other = plan([str(tmp_path / "b")], ("vtt",), tmp_path / "out")
    assert names(other, tmp_path) == {"out/c.wav.vtt", "out/c.mp3.vtt"}
    done(tmp_path / "a.wav", "srt", "txt")
    done(tmp_path / "b" / "c.mp3", "txt", stem=tmp_path / "b" / "c.mp3")
    rest = plan([str(tmp_path)], ("srt", "txt"), None)
    assert names(rest, tmp_path) == {"b/c.wav.srt", "b/c.wav.txt", "b/c.mp3.srt"}
    assert rest.num_done == 1
    again = plan([str(tmp_path)], ("srt", "txt"), None, overwrite=True)
    assert names(again, tmp_path) == expected
    with pytest.raises(ConfigError):
        plan([str(tmp_path / "out")], ("srt",), None)


def test_a_transcript_of_another_sound_is_never_taken_for_this_one(tmp_path):
    for day, seconds in (("mon", 0.1), ("tue", 0.2), ("wed", 0.1)):
        (tmp_path / day).mkdir()
        written(tmp_path / day / "r.wav", seconds)
    (tmp_path / "wed" / "r.wav").write_bytes(wav16(noise(0.1, seed=1)))  # as many bytes as mon's
    out = tmp_path / "out"
    out.mkdir()
    done(tmp_path / "mon" / "r.wav", "srt", stem=out / "r")

    def refused(day, formats=("srt",), made_by=MADE):
        found = plan([str(tmp_path / day)], formats, out, made_by)
        return found.num_done, len(found.tasks), "".join(own.error for own in found.refused)

    assert refused("mon") == (1, 0, "")
    for day in ("tue", "wed"):
        num_done, num_tasks, error = refused(day)
        assert (num_done, num_tasks) == (0, 0)
        assert "it was made of another sound, '../mon/r.wav'; --output writes elsewhere" in error
    for values in ({"task": "translate"}, {"model": "34cd"}, {"language": "de"}):
        other = replace(MADE, values={**MADE.values, **values})
        num_done, num_tasks, error = refused("mon", made_by=other)
        assert (num_done, num_tasks, next(iter(values)) in error) == (0, 0, True)
        again = plan([str(tmp_path / "mon")], ("srt",), out, other, overwrite=True)
        assert names(again, tmp_path) == {"out/r.srt"}
    # A format that is missing is made with the options of now; the other one keeps its own.
    assert refused("tue", ("vtt",)) == (0, 1, "")


@pytest.mark.parametrize("how", ["moved", "copied", "touched", "changed", "same size"])
def test_a_sound_is_known_by_its_content(tmp_path, how):
    path = written(tmp_path / "a.wav", 0.1)
    done(path, "srt")
    if how == "moved":
        path = tmp_path.rename(tmp_path.with_name("elsewhere")) / "a.wav"
    elif how == "copied":
        (tmp_path / "b").mkdir()
        for name in ("a.wav", "a.srt", "a.source"):
            (tmp_path / "b" / name).write_bytes((tmp_path / name).read_bytes())
        path = tmp_path / "b" / "a.wav"
    elif how == "touched":
        os.utime(path, ns=(1, 1))
    else:
        path.write_bytes(wav16(noise(0.2 if how == "changed" else 0.1, seed=3)))
        os.utime(path, ns=(1, 1))
    found = plan([str(path)], ("srt",), None)
    is_same = how in ("moved", "copied", "touched")
    assert (found.num_done, len(found.refused)) == (int(is_same), int(not is_same))


@pytest.mark.parametrize("text", [None, "[]", "no json", '{"srt": 1}', '{"vtt": {}}'])
def test_a_transcript_of_unknown_origin_stays_and_is_told(tmp_path, text):
    path = written(tmp_path / "a.wav", 0.1)
    (tmp_path / "a.srt").write_text("by hand")
    if text is not None:
        (tmp_path / "a.source").write_text(text)
    (own,) = plan([str(path)], ("srt",), None).refused
    assert "says what" in own.error or "say what" in own.error
    assert (tmp_path / "a.srt").read_text() == "by hand"


def test_what_is_written_says_what_it_is_made_of(tmp_path):
    path = written(tmp_path / "a.wav", 1)
    planned = plan([str(path)], ("srt", "json"), None)
    transcriber = Transcriber(Engine(), Rule(), Wish(overlap=1.0))
    (found,) = planned.run(transcriber)
    assert found.error is None
    said = json.loads((tmp_path / "a.source").read_text())
    assert set(said) == {"srt", "json"}
    assert said["srt"] == {
        "source": "a.wav", "bytes": path.stat().st_size, "modified": path.stat().st_mtime_ns,
        "digest": blake2b(path.read_bytes(), digest_size=20).hexdigest(),
        "model": "a-model", "values": MADE.values,
    }  # fmt: skip
    assert plan([str(path)], ("srt", "json"), None).num_done == 1


def test_no_two_files_have_one_transcript(tmp_path):
    """Neither those of one name in two folders, nor one whose name another's becomes."""
    for name in ("one/a.wav", "two/a.wav", "two/b.mp3", "two/b.wav", "two/b.mp3.wav"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(wav16(noise(0.1)))
    both = [str(tmp_path / name) for name in ("one", "two")]
    expected = {"one/a.srt", "two/a.srt", "two/b.mp3.srt", "two/b.wav.srt", "two/b.mp3.wav.srt"}
    for folder in (None, tmp_path):
        assert names(plan(both, ("srt",), folder), tmp_path) == expected
    assert names(plan(both[:1], ("srt",), tmp_path), tmp_path) == {"a.srt"}


def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.wav")
    (found,) = run([tmp_path / "a.wav"], Engine()).values()
    assert found.error.endswith("the file is not a regular file")


def test_no_program_is_waited_for_to_say_what_transcripts_are_made_of(tmp_path):
    path = written(tmp_path / "a.wav", 0.1)
    (tmp_path / "a.srt").write_text("by hand")
    os.mkfifo(tmp_path / "a.source")
    (own,) = plan([str(path)], ("srt",), None).refused
    assert "a.source" in own.error
    assert "does not say" in own.error


@pytest.mark.parametrize("is_link", [False, True])
def test_a_sound_is_hashed_if_it_is_a_file(tmp_path, is_link):
    path, pipe = written(tmp_path / "a.wav", 0.1), tmp_path / "pipe"
    os.mkfifo(pipe)
    for place, digest in ((path, blake2b(path.read_bytes(), digest_size=20).hexdigest()),
                          (pipe, None), (tmp_path / "none", None)):  # fmt: skip
        named = tmp_path / "link" if is_link else place
        if is_link:
            named.unlink(missing_ok=True)
            named.symlink_to(place)
        assert digest_of_file(named) == digest


def test_folders_that_cannot_be_written_are_told_first(tmp_path, monkeypatch):
    path = written(tmp_path / "a.wav", 0.1)
    with pytest.raises(ConfigError, match=r"a\.wav cannot be made for transcripts: "):
        plan([str(path)], ("srt",), path)
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ConfigError, match="cannot be written to; give another folder by --output"):
        plan([str(path)], ("srt",), None)


class Rule:
    """Hears the number of the second with which a window of 3 seconds begins."""

    seconds, rate = 3.0, RATE

    def prompt(self, language, task, before):
        return f"{before}/{language}/{task}"

    def read(self, ids):
        spoken = Spoken(start=0.5, end=None, ids=tuple(ids))
        return Heard(language="de", spoken=(spoken,))

    def sureness(self, output):
        return output.sure


SURE = Sureness(no_speech=0.0, mean_logprob=-0.2)


class Engine:
    """failing: numbers of prompts. poor: the temperature up to which prompt 0 is cut off. sure: of
    each answer."""

    def __init__(self, failing=(), poor=None, sure=SURE):
        self.sure = sure
        self.asked, self.failing, self.poor = [], failing, poor
        self.temperatures = []

    def answer_each(self, asks):
        for number, ask in enumerate(asks):
            self.asked.append(ask.prompt)
            self.temperatures.append(ask.params.temperature)
            is_ok = number not in self.failing
            is_cut = not number and self.poor is not None and ask.params.temperature <= self.poor
            reason = "length" if is_cut else "stop"
            ids = SimpleNamespace(token_ids=[number], finish_reason=reason) if is_ok else None
            output = SimpleNamespace(is_ok=is_ok, outputs=ids, error_msg="too hot", sure=self.sure)
            yield SimpleNamespace(ask=ask, output=output)

    def get_tokenizer(self):
        return SimpleNamespace(decode=lambda ids, **_: f" {ids[0]} ")


def written(path, seconds):
    path.write_bytes(wav16(noise(seconds)))
    return path


def run(paths, engine, **wish):
    transcriber = Transcriber(engine, Rule(), Wish(overlap=1.0, **wish))
    return {found.path.name: found for found in transcriber.run(paths)}


def test_files_become_lines_and_failures_stay_alone(tmp_path):
    engine = Engine(failing=[3])
    paths = [written(tmp_path / "a.wav", 4), tmp_path / "gone.wav", written(tmp_path / "b.wav", 1)]
    paths += [written(tmp_path / "c.wav", 2), tmp_path / "bad.wav"]
    (tmp_path / "bad.wav").write_bytes(b"RIFF")
    found = run(paths, engine, language="de", before="ACME")
    assert rows(found["a.wav"].lines) == [(0.5, 2.5, "0"), (2.5, 4, "1")]
    assert (found["a.wav"].seconds, found["a.wav"].languages) == (4, ("de",))
    assert rows(found["b.wav"].lines) == [(0.5, 1, "2")]
    assert found["c.wav"].error == "from second 0 on: too hot"
    assert found["gone.wav"].error == "the file does not exist"
    assert found["bad.wav"].error
    sizes = [len(prompt["multimodal_data"]["audio"]["array"]) for prompt in engine.asked]
    assert sizes == [3 * RATE, 2 * RATE, RATE, 2 * RATE]
    assert {prompt["prompt"] for prompt in engine.asked} == {"ACME/de/transcribe"}


@pytest.mark.one_is_quick
@pytest.mark.parametrize(("poor", "asked"), [(0.0, 1), (0.5, 3), (1.0, 5)])
def test_a_poor_answer_is_asked_for_again(tmp_path, poor, asked):
    engine = Engine(poor=poor)
    found = run([written(tmp_path / "a.wav", 4), written(tmp_path / "b.wav", 1)], engine)
    assert engine.temperatures == [0, 0, 0, 0.2, 0.4, 0.6, 0.8, 1.0][: 3 + asked]
    assert list(found) == ["b.wav", "a.wav"]
    assert rows(found["a.wav"].lines) == [(0.5, 2.5, "0"), (2.5, 4, "1")]
    assert (found["a.wav"].num_again, found["b.wav"].num_again) == (1, 0)
    assert found["a.wav"].doubtful == ((0.0,) if poor == 1.0 else ())
    words = "1 window asked for again, doubtful, marked [?], from 0 s"
    assert (words in found["a.wav"].told) == (poor == 1.0)


def test_files_with_poor_answers_do_not_wait_for_all_others(tmp_path, monkeypatch):
    """They are asked for again before more files are read; what waits holds its window alone."""
    monkeypatch.setattr("mmdeploy_llm.batch.speech.run.MOST_AGAIN", 1)
    engine = Engine(poor=0.0)
    found = run([written(tmp_path / f"{name}.wav", 4) for name in "abc"], engine)
    assert list(found) == ["a.wav", "b.wav", "c.wav"]
    assert [own.num_again for own in found.values()] == [1, 1, 1]
    assert engine.temperatures == [0, 0, 0.2] * 3
    arrays = [prompt["multimodal_data"]["audio"]["array"] for prompt in engine.asked]
    assert all(array.base is None for array in arrays)


@pytest.mark.parametrize(
    ("text", "reason", "expected"),
    [
        ("", "stop", False),
        ("Yes, of course. Then we went to the station, they say.", "stop", False),
        ("Thank you. " * 40, "stop", True),
        ("谢谢观看" * 30, "stop", True),
        ("no no no", "stop", False),
        ("Yes.", "length", True),
    ],
)
def test_poor_answers(text, reason, expected):
    assert is_poor(text, reason) is expected


@pytest.mark.parametrize(
    ("no_speech", "mean", "num_lines", "is_doubtful"),
    [
        (0.0, -0.3, 1, False),
        (0.95, -1.5, 0, False),  # the model says that nobody speaks, and is not sure of the words
        (0.95, -0.3, 1, True),
        (0.45, -1.5, 1, True),
        (0.55, -0.6, 1, True),
        (0.55, -0.2, 1, False),  # a window that begins within a word
        (0.0, -1.5, 1, True),
    ],
)
def test_what_nobody_said_is_left_out_or_marked(tmp_path, no_speech, mean, num_lines, is_doubtful):
    sure = Sureness(no_speech=no_speech, mean_logprob=mean)
    engine = Engine(sure=sure)
    (found,) = run([written(tmp_path / "a.wav", 2)], engine).values()
    assert [line.is_doubtful for line in found.lines] == [is_doubtful] * num_lines
    assert (found.num_unspoken, len(found.doubtful)) == (1 - num_lines, int(is_doubtful))
    assert ("1 window in which nobody speaks" in found.told) == (not num_lines)
    assert len(engine.asked) == (6 if num_lines and mean < -1 else 1), "a guess is asked for again"
    for name, make in FORMATS.items():
        marked = '"doubtful": true' if name == "json" else "[?] 0"
        assert (marked in make(found.lines)) == is_doubtful, name


def test_a_window_of_nothing_keeps_its_time(tmp_path):
    (found,) = run([written(tmp_path / "a.wav", 4)], Engine(sure=Sureness(
        no_speech=0.9, mean_logprob=-2.0))).values()  # fmt: skip
    assert (found.lines, found.seconds, found.num_unspoken) == ((), 4, 2)


def test_the_rest_of_a_window_whose_answer_ends_early_is_asked_for(tmp_path, monkeypatch):
    """Else the next window would hear it without its begin."""

    def read(self, ids):
        early = Spoken(start=0.2, end=1.0, ids=tuple(ids))
        return Heard(language="de", spoken=(early,))

    monkeypatch.setattr(Rule, "read", read)
    engine = Engine()
    (found,) = run([written(tmp_path / "a.wav", 4)], engine).values()
    sizes = [len(one["multimodal_data"]["audio"]["array"]) for one in engine.asked]
    assert sizes == [3 * RATE, 2 * RATE, 2 * RATE], "the third is what is left of the first"
    assert [line.start for line in found.lines] == pytest.approx([0.2, 1.2, 2.2])


def test_silence_is_not_asked_about(tmp_path):
    engine, path = Engine(), tmp_path / "a.wav"
    path.write_bytes(wav16(noise(2) * 0))
    (found,) = run([path], engine).values()
    assert (engine.asked, found.lines, found.error) == ([], (), None)
    assert found.told == f"{path}: 2 s, 0 lines, 1 window of digital silence"


def test_what_is_not_asked_about_keeps_its_time(tmp_path):
    """Windows of digital silence, and a gap in a file whose packets have times."""
    speech = noise(3)
    quiet = tmp_path / "a.wav"
    quiet.write_bytes(wav16(np.concatenate([speech, speech * 0, speech * 0, speech])))
    gap = tmp_path / "b.mkv"
    gap.write_bytes(film("matroska", "pcm_s16le", (0.0, 9.0), picture=None))
    found = run([quiet, gap], Engine())
    assert (found["a.wav"].seconds, found["a.wav"].num_silent) == (12, 2)
    starts = [line.start for line in found["a.wav"].lines]
    assert starts == [0.5, 2.5, 8.5, 10.5], "windows begin each 2 seconds"
    assert found["b.mkv"].seconds == 11
    assert found["b.mkv"].lines[-1].end == 11
    assert found["b.mkv"].notes == ("a gap of 7.00 s in all, from 2.00 s on; silence stands there",)


def test_an_end_that_is_missing_is_told(tmp_path):
    path = tmp_path / "a.wav"
    path.write_bytes(wav16(noise(1), size=3 * 3600 * 2 * RATE))
    (found,) = run([path], Engine()).values()
    assert found.told.endswith("its header says 10800.0 s: it may be cut off")


def test_a_line_about_a_file_is_short():
    told = Transcript(path=Path("a"), seconds=700, doubtful=tuple(range(0, 300, 25))).told
    assert told.endswith("from 0 s, 25 s, 50 s, 75 s, 100 s, 7 more")


def test_wrong_wishes():
    for wish in (
        {"task": "summarize"},
        {"channels": "both"},
        {"overlap": -1.0},
        {"overlap": float("nan")},
    ):
        with pytest.raises(ConfigError):
            Wish(**wish)
    with pytest.raises(ConfigError, match=r"by 2 seconds: this model hears \S+ at once"):
        Transcriber(Engine(), Rule(), Wish(overlap=2.0))
    Transcriber(Engine(), Rule(), Wish())  # by default a quarter of what the model hears, at most
