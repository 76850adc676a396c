"""Channels that are transcribed apart: who spoke when, from how the sound was made."""

import io
import json
from dataclasses import asdict
from types import SimpleNamespace

import av
import numpy as np
import pytest

from mmdeploy_llm.batch.speech.plan import plan
from mmdeploy_llm.batch.speech.run import Transcriber, Wish
from mmdeploy_llm.batch.speech.writing import FORMATS
from mmdeploy_llm.data.records.configuration import Configuration
from mmdeploy_llm.hooks import Heard, Spoken, Sureness
from tests.media.sound_files import RATE, encoded, noise, wav16

SURE = Sureness(no_speech=0.0, mean_logprob=-0.2)


class Ears:
    """Hears tones: answers the frequency of a window, where it begins and where it ends, in
    hundredths of a second. sure: of each answer."""

    def __init__(self, sure=SURE):
        self.num_asked, self.sure = 0, sure

    def answer_each(self, asks):
        for ask in asks:
            self.num_asked += 1
            samples = ask.prompt["multimodal_data"]["audio"]["array"]
            loud = np.flatnonzero(np.abs(samples) > 0.02)
            frequency = np.abs(np.fft.rfft(samples)).argmax() * RATE / len(samples)
            first, last = (loud[0], loud[-1]) if len(loud) else (0, 0)
            ids = [round(frequency, -2), first * 100 // RATE, -(-last * 100 // RATE)]
            ids = ids if len(loud) else [0, 0, 0]
            outputs = SimpleNamespace(token_ids=[int(one) for one in ids], finish_reason="stop")
            output = SimpleNamespace(is_ok=True, outputs=outputs, error_msg=None, sure=self.sure)
            yield SimpleNamespace(ask=ask, output=output)

    def get_tokenizer(self):
        return SimpleNamespace(decode=lambda ids, **_: f"{ids[0]} Hz" if ids[0] else "")


class Rule:
    seconds, rate = 3.0, RATE

    def prompt(self, language, task, before):
        return "prompt"

    def read(self, ids):
        start, end = (one / 100 for one in ids[1:])
        return Heard(language="en", spoken=(Spoken(start=start, end=end, ids=tuple(ids[:1])),))

    def sureness(self, output):
        return output.sure


def tones(seconds, *spans, rate=RATE):
    """Returns int16 samples of a channel, silence but for tones of (begin, end, frequency)."""
    times = np.arange(round(seconds * rate)) / rate
    samples = np.zeros(len(times))
    for begin, end, frequency in spans:
        samples += ((begin <= times) & (times < end)) * np.sin(2 * np.pi * frequency * times) * 0.4
    return np.round(samples * 2**15).astype(np.int16)


def transcribed(path, blob, engine=None, channels="apart", overlap=0.5):
    path.write_bytes(blob)
    wish = Wish(overlap=overlap, channels=channels)
    (found,) = Transcriber(engine or Ears(), Rule(), wish).run([path])
    return found


def said(found):
    return [(line.speaker, line.text, round(line.start, 1)) for line in found.lines]


ONE = (0.2, 1.0, 400), (5.2, 6.0, 400)  # windows begin each 2.5 seconds
TWO = (1.2, 2.0, 900), (5.6, 6.6, 900)
CALL = np.stack([tones(7, *ONE), tones(7, *TWO)], axis=1)
TURNS = [
    ("channel 1", "400 Hz", 0.2), ("channel 2", "900 Hz", 1.2), ("channel 1", "400 Hz", 5.2),
    ("channel 2", "900 Hz", 5.6),
]  # fmt: skip


def test_each_channel_is_a_speaker(tmp_path):
    found = transcribed(tmp_path / "a.wav", wav16(CALL))
    assert (said(found), found.notes, found.seconds) == (TURNS, (), 7)
    ends = [line.end for line in found.lines]
    assert ends == pytest.approx([1.0, 2.0, 6.0, 6.6], abs=0.02), "both may speak at one time"
    mixed = transcribed(tmp_path / "a.wav", wav16(CALL), channels="mixed")
    assert {line.speaker for line in mixed.lines} == {None}
    assert len(mixed.lines) < 4


@pytest.mark.parametrize(
    ("codec", "container", "rate", "sample_format"),
    [
        ("flac", "flac", 8000, "s16"),  # a telephone's rate, resampled
        ("flac", "matroska", 44_100, "s16"),
        ("pcm_s16le", "wav", 8000, None),
        ("pcm_mulaw", "wav", 8000, "s16"),
        ("aac", "mp4", 48_000, "fltp"),
        ("libmp3lame", "mp3", 44_100, "s16p"),
        ("libopus", "ogg", 48_000, "s16"),
    ],
)
def test_channels_of_other_formats_and_rates(tmp_path, codec, container, rate, sample_format):
    call = np.stack([tones(7, *ONE, rate=rate), tones(7, *TWO, rate=rate)], axis=1)
    if sample_format in ("fltp", "s16p"):
        blob = planar(call, codec, container, rate, sample_format)
    else:
        blob = encoded(call, codec, container, rate=rate, sample_format=sample_format)
    found = transcribed(tmp_path / "a", blob)
    assert [one[:2] for one in said(found)] == [one[:2] for one in TURNS]
    starts = [line.start for line in found.lines]
    assert starts == pytest.approx([one[2] for one in TURNS], abs=0.06)


def planar(samples, codec, container, rate, sample_format):
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as file:
        stream = file.add_stream(codec, rate=rate, layout="stereo")
        values = samples.T if sample_format == "s16p" else samples.T.astype(np.float32) / 2**15
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(values), sample_format, "stereo")
        frame.sample_rate, frame.pts = rate, 0
        resampler = av.AudioResampler(stream.format, "stereo", rate, frame_size=1024)
        for part in (*resampler.resample(frame), *resampler.resample(None)):
            file.mux(stream.encode(part))
        file.mux(stream.encode(None))
    return buffer.getvalue()


def test_a_channel_has_the_samples_of_a_file_of_its_own(tmp_path):
    """Resampled too: what the model hears is what it would hear of a mono recording."""
    heard = []

    class Engine(Ears):
        def answer_each(self, asks):
            for ask in asks:
                heard.append(ask.prompt["multimodal_data"]["audio"]["array"])
                yield from super().answer_each([ask])

    samples = noise(2, channels=2, rate=11_025)
    transcribed(tmp_path / "both.wav", wav16(samples, rate=11_025), Engine())
    for at in range(2):
        own = np.ascontiguousarray(samples[:, at : at + 1])
        transcribed(tmp_path / f"{at}.wav", wav16(own, rate=11_025), Engine(), channels="mixed")
    assert len(heard) == 4
    for at in range(2):
        assert np.array_equal(heard[at], heard[2 + at])


def test_a_silent_channel_gives_no_lines_and_is_told(tmp_path):
    silent = np.stack([tones(7), tones(7, *TWO)], axis=1)
    engine = Ears()
    found = transcribed(tmp_path / "a.wav", wav16(silent), engine)
    assert said(found) == [TURNS[1], TURNS[3]]
    assert found.notes == ("channel 1 is silent",)
    assert found.told.endswith("4 windows of digital silence; channel 1 is silent")
    assert engine.num_asked == 2


@pytest.mark.parametrize(
    ("num_channels", "note"),
    [(1, "it has one channel"), (2, "its 2 channels are the same sound, which is heard once")],
)
def test_one_sound_is_heard_once_and_told(tmp_path, num_channels, note):
    same = np.stack([tones(7, *ONE)] * num_channels, axis=1)
    found = transcribed(tmp_path / "a.wav", wav16(same))
    assert said(found) == [(None, "400 Hz", 0.2), (None, "400 Hz", 5.2)]
    assert found.notes == (note,)
    assert found.told.count(note) == 1


@pytest.mark.parametrize("num_channels", [3, 8])
def test_more_channels_than_two(tmp_path, num_channels):
    many = [tones(3, (0.2 + at / 8, 2.5, 300 + 100 * at)) for at in range(num_channels)]
    found = transcribed(tmp_path / "a.wav", wav16(np.stack(many, axis=1)))
    assert [one[:2] for one in said(found)] == [
        (f"channel {at + 1}", f"{300 + 100 * at} Hz") for at in range(num_channels)
    ]


def test_too_many_channels(tmp_path):
    found = transcribed(tmp_path / "a.wav", wav16(noise(0.1, channels=9)))
    assert found.error == "the sound has 9 channels, of which 8 at most can be kept apart"


def test_channels_that_change_within_a_file(tmp_path):
    """Ogg files that follow one another; mixed they are one sound."""
    parts = [encoded(noise(0.5, channels=number), "flac", "ogg") for number in (1, 2)]
    found = transcribed(tmp_path / "a.ogg", b"".join(parts))
    assert found.error == (
        "the sound has 1 channels first and 2 later, which cannot be kept apart; mix them"
    )
    mixed = transcribed(tmp_path / "a.ogg", b"".join(parts), channels="mixed")
    assert (mixed.error, mixed.seconds) == (None, 1)


def test_words_that_leak_into_the_other_channel_stay(tmp_path):
    own = tones(2, (0.2, 1.0, 400))
    found = transcribed(tmp_path / "a.wav", wav16(np.stack([own, own // 4], axis=1)))
    assert said(found) == [("channel 1", "400 Hz", 0.2), ("channel 2", "400 Hz", 0.2)]


def test_all_formats_show_the_speaker(tmp_path):
    """FFmpeg and pysubs2 read what stands in the files."""
    pysubs2 = pytest.importorskip("pysubs2", reason="needs pysubs2, which the extra 'dev' installs")
    found = transcribed(tmp_path / "a.wav", wav16(CALL)).lines
    shown = [f"{speaker}: {text}" for speaker, text, _ in TURNS]
    assert FORMATS["txt"](found).splitlines() == shown
    parsed = [(row["speaker"], row["text"]) for row in json.loads(FORMATS["json"](found))]
    assert parsed == [(speaker, text) for speaker, text, _ in TURNS]
    for name, long in (("srt", "srt"), ("vtt", "webvtt")):
        text = FORMATS[name](found)
        with av.open(io.BytesIO(text.encode()), format=long) as file:
            assert [bytes(one).decode() for one in file.demux() if one.size] == shown
        assert [one.plaintext for one in pysubs2.SSAFile.from_string(text)] == shown


def test_a_doubtful_line_has_its_speaker_first(tmp_path):
    engine = Ears(sure=Sureness(no_speech=0.9, mean_logprob=-0.2))
    found = transcribed(tmp_path / "a.wav", wav16(CALL), engine)
    assert FORMATS["txt"](found.lines).startswith("channel 1: [?] 400 Hz\nchannel 2: [?] 900 Hz\n")
    assert found.doubtful == (0, 0, 2.5, 5, 5), "two windows hear the tone from 5.2 to 6 s"


def test_transcripts_of_mixed_channels_are_not_taken_for_those_of_channels_apart(tmp_path):
    path = tmp_path / "a.wav"
    path.write_bytes(wav16(CALL))

    def planned(channels):
        wish = Wish(overlap=0.5, channels=channels)
        made_by = Configuration(model="m", values=asdict(wish))
        return plan([str(path)], ("srt",), None, made_by), Transcriber(Ears(), Rule(), wish)

    first, transcriber = planned("mixed")
    assert [one.error for one in first.run(transcriber)] == [None]
    (refused,) = planned("apart")[0].refused
    assert "channels is 'apart', was 'mixed'" in refused.error
    assert planned("mixed")[0].num_done == 1
