"""Words with their times, from answers to files."""

import json
import re
from itertools import pairwise

import numpy as np
import pytest

from mmdeploy_llm.batch.speech.joining import Line, joined
from mmdeploy_llm.batch.speech.line_words import TimedWord
from mmdeploy_llm.batch.speech.run import Transcriber, Wish
from mmdeploy_llm.batch.speech.writing import FORMATS
from mmdeploy_llm.errors import ConfigError


def timed(*words):
    return tuple(
        TimedWord(text=text, start=start, end=end, probability=0.5) for text, start, end in words
    )


def line(start, end, *words, **more):
    text = "".join(word for word, *_ in words).strip()
    return Line(start=start, end=end, text=text, words=timed(*words), **more)


ONE = line(1, 3, (" R&D", 0.9, 1.4), (" <b>", 1.4, 1.9), (",", 1.9, 1.9), (" end", 2.5, 3.2))


def test_formats():
    (row,) = json.loads(FORMATS["json"]([ONE]))
    assert [word["word"] for word in row["words"]] == ["R&D", " <b>", ",", " end"]
    assert row["words"][1] == {"word": " <b>", "start": 1.4, "end": 1.9, "probability": 0.5}
    assert FORMATS["vtt"]([ONE]) == (
        "WEBVTT\n\n00:00:01.000 --> 00:00:03.000\nR&amp;D <00:00:01.400>&lt;b&gt;"
        "<00:00:01.900>, <00:00:02.500>end\n"
    )
    plain = Line(start=1, end=3, text=ONE.text)
    for name in ("srt", "txt"):
        assert FORMATS[name]([ONE]) == FORMATS[name]([plain])
    assert "words" not in json.loads(FORMATS["json"]([plain]))[0]
    doubtful = line(1, 3, (" a", 1.0, 1.5), (" b", 1.5, 2), is_doubtful=True, speaker="channel 1")
    assert "\nchannel 1: [?] a <00:00:01.500>b\n" in FORMATS["vtt"]([doubtful])


@pytest.mark.parametrize(
    "texts",
    [
        (" a\x00", " b\n", "c"),
        (" two  spaces", " \u2028x"),
        ("\x00", " a", "\n"),
        (" 狐", "は跳", "ぶ。"),
    ],
)
def test_words_of_odd_texts_are_the_text(texts):
    own = line(0, 9, *((text, at, at + 0.5) for at, text in enumerate(texts)))
    (row,) = json.loads(FORMATS["json"]([own]))
    assert "".join(word["word"] for word in row["words"]) == row["text"]


def test_times_in_webvtt_rise_within_their_cue():
    """The rule of its specification, for words whose times are anything."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        moments = rng.uniform(0, 6, (8, 2))
        words = [(f" w{at}", *sorted(own)) for at, own in enumerate(moments)]
        text = FORMATS["vtt"]([line(1, 5, *words)]).splitlines()[3]
        found = [float(one) for one in re.findall(r"<00:00:(\d\d\.\d{3})>", text)]
        assert found == sorted(set(found))
        assert all(1 < one < 5 for one in found)
        assert re.sub(r"<[^>]*>", "", text) == " ".join(f"w{at}" for at in range(8))


def test_windows_are_joined_by_the_times_of_words():
    """The first window ends with words that would lie seconds early if characters divided them."""
    first = line(0, 30, (" Well", 25.0, 25.3), (" then", 26, 26.4), (" we", 28, 28.2),
                 (" went", 29, 29.5))  # fmt: skip
    second = line(26, 32, (" then", 26.1, 26.5), (" we", 28.1, 28.3), (" went", 29.1, 29.4),
                  (" home.", 31, 31.5))  # fmt: skip
    found = joined([(0, 30, [first]), (25, 55, [second])])
    words = [word for one in found for word in one.words]
    assert [word.text.strip() for word in words] == ["Well", "then", "we", "went", "home."]
    assert [round(word.start) for word in words] == [25, 26, 28, 29, 31]
    assert " ".join(one.text for one in found) == "Well then we went home."


def test_a_speech_that_is_divided_anywhere_keeps_its_words():
    """All words stand once, whole, with times that do not fall, in scripts of both kinds."""
    rng = np.random.default_rng(1)
    for script in ("en", "ja"):
        for _ in range(30):
            names = [f" w{at}" if script == "en" else chr(0x4E00 + at) * 2 for at in range(60)]
            speech = [(name, at, at + 0.8) for at, name in enumerate(names)]
            windows, begin = [], 0.0
            while begin < 60:
                end = begin + 30
                own = [one for one in speech if begin <= one[1] and one[2] <= end]
                shift = rng.uniform(-0.1, 0.1)
                own = [(name, start + shift, stop + shift) for name, start, stop in own]
                cuts = [0, *sorted(rng.choice(range(1, len(own)), 2, replace=False)), len(own)]
                groups = [own[a:b] for a, b in pairwise(cuts)]
                windows.append((begin, end, [line(g[0][1], g[-1][2], *g) for g in groups]))
                begin += 30 - int(rng.integers(4, 9))
                if end >= 60:
                    break
            found = joined(windows)
            for one in found:
                assert "".join(word.text for word in one.words).strip() == one.text
            words = [word for one in found for word in one.words]
            assert [word.text.strip() for word in words] == [name.strip() for name in names]
            assert all(a.start <= b.start for a, b in pairwise(words))
            far = [abs(word.start - at) for at, word in enumerate(words)]
            assert max(far) < 0.2


def test_a_model_that_tells_no_times_of_words_is_refused():
    class Rule:
        seconds, rate = 30.0, 16_000

        def prompt(self, language, task, before):
            return ""

        read = sureness = None

    with pytest.raises(ConfigError, match="does not tell when a word is spoken"):
        Transcriber(None, Rule(), Wish(word_timestamps=True))
