"""Stretches without speech are not heard. A detector of the test finds voices where tones are, so
that the right answers follow from how each sound was made."""

import json
import sys
from dataclasses import asdict
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from mmdeploy_llm.batch.speech.plan import made_by, plan
from mmdeploy_llm.batch.speech.run import Transcriber, Wish, detector_of
from mmdeploy_llm.batch.speech.windows import heard_of, windows_of, windows_of_speech
from mmdeploy_llm.data.records.configuration import Configuration
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import Heard, Spoken
from mmdeploy_llm.media.sound.voice import NOT_INSTALLED, VoiceDetector
from tests.batch.speech.test_channels import SURE, Ears, Rule, tones
from tests.media.sound_files import RATE, wav16

PAUSE = 0.5


class Voices:
    """Finds tones; a pause of PAUSE ends one."""

    rate = RATE

    def stretches(self, samples):
        loud = np.flatnonzero(np.abs(samples) > 0.02)
        if not len(loud):
            return []
        cuts = np.flatnonzero(np.diff(loud) > PAUSE * RATE)
        firsts, lasts = [0, *(cuts + 1)], [*cuts, len(loud) - 1]
        return [(int(loud[a]), int(loud[b]) + 1) for a, b in zip(firsts, lasts, strict=True)]


class Listener(Ears):
    """Hears each tone of a window as a line. is_one_line: but all of them as one line; is_short:
    but the first one alone."""

    def __init__(self, *, is_one_line=False, is_short=False):
        super().__init__()
        self.lengths, self.is_one_line, self.is_short = [], is_one_line, is_short

    def answer_each(self, asks):
        for ask in asks:
            samples = ask.prompt["multimodal_data"]["audio"]["array"]
            self.lengths.append(len(samples) / RATE)
            loud = np.abs(samples) > 0.02
            places = np.flatnonzero(loud)
            cuts = np.flatnonzero(np.diff(places) > 0.2 * RATE)
            firsts, lasts = [places[0], *places[cuts + 1]], [*places[cuts], places[-1]]
            found = []
            for first, last in zip(firsts, lasts, strict=True):
                own = samples[first:last]
                pitch = np.abs(np.fft.rfft(own)).argmax() * RATE / len(own)
                found.append((int(round(pitch, -2)), first / RATE, last / RATE))
            if self.is_one_line and len(found) > 1:
                found = [(found[0][0] + 1, found[0][1], found[-1][2])]
            found = found[:1] if self.is_short else found
            ids = [int(x) for one in found for x in (one[0], one[1] * 1000, one[2] * 1000 + 1)]
            outputs = SimpleNamespace(token_ids=ids, finish_reason="stop")
            output = SimpleNamespace(is_ok=True, outputs=outputs, error_msg=None, sure=SURE)
            yield SimpleNamespace(ask=ask, output=output)


class Lines(Rule):
    def read(self, ids):
        spoken = [
            Spoken(start=ids[at + 1] / 1000, end=ids[at + 2] / 1000, ids=(ids[at],))
            for at in range(0, len(ids), 3)
        ]
        return Heard(language="en", spoken=tuple(spoken))


def transcribed(path, samples, engine=None, **wish):
    path.write_bytes(wav16(samples if samples.ndim == 2 else samples[:, None]))
    wish = Wish(**{"overlap": 0.5, "vad": True, **wish})
    (found,) = Transcriber(engine or Listener(), Lines(), wish, None, Voices()).run([path])
    assert found.error is None
    return found


def rows(found):
    return [(one.text, round(one.start, 1), round(one.end, 1)) for one in found.lines]


LONG = (0.5, 1.0, 300), (21.0, 21.5, 400), (42.0, 42.6, 500)


@pytest.mark.parametrize("seconds", [43.0, 43.5, 70.0])
def test_times_are_those_of_the_recording(tmp_path, seconds):
    engine = Listener()
    found = transcribed(tmp_path / "a.wav", tones(seconds, *LONG), engine)
    assert rows(found) == [("300 Hz", 0.5, 1.0), ("400 Hz", 21.0, 21.5), ("500 Hz", 42.0, 42.6)]
    last = 1.3 if seconds == 43 else 1.2  # an end that is near is heard too
    last = 1.8 if seconds == 43.5 else last
    heard = 1.3 + 1.1 + last
    assert sum(engine.lengths) == pytest.approx(heard, abs=0.01)
    assert len(engine.lengths) == 2, "windows of 3 s"
    assert found.seconds == seconds
    assert found.skipped == (pytest.approx(seconds - heard, abs=0.01), seconds)
    assert "without speech skipped" in found.told


def test_a_line_never_spans_silence_that_was_left_out(tmp_path):
    """The window's pieces are asked for one by one, once a line is said to go on."""
    engine = Listener(is_one_line=True)
    found = transcribed(tmp_path / "a.wav", tones(43, *LONG[:2]), engine)
    assert rows(found) == [("300 Hz", 0.5, 1.0), ("400 Hz", 21.0, 21.5)]
    assert len(engine.lengths) == 3
    assert engine.lengths[0] == pytest.approx(engine.lengths[1] + engine.lengths[2])


def test_speech_after_the_end_of_an_answer_is_asked_for(tmp_path):
    found = transcribed(tmp_path / "a.wav", tones(43, *LONG[:2]), Listener(is_short=True))
    assert rows(found) == [("300 Hz", 0.5, 1.0), ("400 Hz", 21.0, 21.5)]


def test_a_recording_without_speech_is_told(tmp_path):
    engine = Listener()
    found = transcribed(tmp_path / "a.wav", tones(5), engine)
    assert (found.lines, found.notes, found.skipped) == ((), ("nobody speaks in it",), (5, 5))
    assert found.told.endswith("0 lines, 5 s (100%) without speech skipped; nobody speaks in it")
    assert not engine.lengths


@pytest.mark.parametrize("num_samples", [0, 1, 100])
def test_hardly_a_sound(tmp_path, num_samples):
    samples = np.zeros(num_samples, np.int16)
    off = Transcriber(Listener(), Lines(), Wish(overlap=0.5))
    path = tmp_path / "a.wav"
    path.write_bytes(wav16(samples[:, None]))
    (without,) = off.run([path])
    (found,) = Transcriber(Listener(), Lines(), Wish(overlap=0.5, vad=True), None, Voices()).run(
        [path]
    )
    assert (found.error, found.lines) == (without.error, ())


def test_each_channel_has_its_own_speech(tmp_path):
    """A channel that listens for long has its answer at its time, and the other one is silent."""
    one, two = tones(30, (0.5, 1.0, 300)), tones(30, (25.0, 25.6, 700))
    found = transcribed(tmp_path / "a.wav", np.stack([one, two, one * 0 + 1], 1), channels="apart")
    said = [(line.speaker, line.text, round(line.start, 1)) for line in found.lines]
    assert said == [("channel 1", "300 Hz", 0.5), ("channel 2", "700 Hz", 25.0)]
    assert "nobody speaks in channel 3" in found.notes
    assert found.skipped == (pytest.approx(90 - 1.3 - 1.2, abs=0.1), 90)


def test_long_speech_without_a_pause_has_windows_that_overlap(tmp_path):
    engine = Listener()
    transcribed(tmp_path / "a.wav", tones(30, (10, 17, 300), (25, 26, 500)), engine)
    assert max(engine.lengths) <= Rule.seconds
    assert sum(engine.lengths) > 7.6


def test_without_long_silence_windows_are_those_of_the_whole_recording():
    """Stretches of 2 s with pauses of 0.6 s: a cut in a pause costs words, overlaps do not."""
    voices = [(0, 2 * RATE), (round(2.6 * RATE), 4 * RATE), (round(4.6 * RATE), 6 * RATE)]
    heard = heard_of(voices, 6 * RATE, RATE)
    assert heard == [(0, 6 * RATE)]
    assert list(windows_of_speech(heard, 3 * RATE, RATE)) == list(
        windows_of(6 * RATE, 3 * RATE, RATE)
    )


def test_windows_are_cut_in_silence():
    """Three stretches of 1.2 s fit into 3 s by twos."""
    voices = [(at * RATE, round((at + 1.2) * RATE)) for at in (10, 20, 30)]
    windows = list(windows_of_speech(heard_of(voices, 60 * RATE, RATE), 4 * RATE, RATE))
    cuts = [[(a / RATE, b / RATE) for a, b in one.pieces] for one in windows]
    assert cuts == [[(9.7, 11.5), (19.7, 21.5)], []]
    assert (windows[1].first, windows[1].end) == (29.7 * RATE, 31.5 * RATE)


def test_random_voices_are_all_heard_once():
    """Whatever the stretches are, each sample of speech is heard, windows are short enough and
    moments come back to where they were."""
    rng = np.random.default_rng(3)
    for _ in range(200):
        edges = np.sort(rng.choice(100_000, 2 * rng.integers(1, 12), replace=False))
        voices = [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]
        heard = heard_of(voices, 100_000, 1000)
        assert all(a[1] <= b[0] for a, b in pairwise(heard))
        windows = list(windows_of_speech(heard, 30_000, 5000))
        counts = np.zeros(100_000, int)
        place = np.arange(100_000)
        for own in windows:
            sound = own.sound(place)
            assert 0 < len(sound) == own.num_heard <= 30_000
            counts[sound] += 1
            for at in rng.integers(0, len(sound), 5):
                begin, (first, end) = own.piece_at(int(at))
                assert first <= first + at - begin == sound[at] < end
            start = int(rng.integers(0, len(sound)))
            rest = np.concatenate([one.sound(place) for one in own.parts(start)])
            assert np.array_equal(rest, sound[start:])
        for first, end in voices:
            assert counts[first:end].all()
        assert all(counts[first:end].all() for first, end in heard)
        assert (counts > 0).sum() == sum(end - first for first, end in heard)


def test_it_is_off_by_default_and_another_transcript(tmp_path, monkeypatch):
    path = tmp_path / "a.wav"
    path.write_bytes(wav16(tones(5, (0.5, 1.0, 300))[:, None]))
    engine = Configuration(model="m", values={})
    monkeypatch.setattr("mmdeploy_llm.batch.speech.plan.describe_engine", lambda config: engine)

    def planned(**wish):
        wish = Wish(overlap=0.5, **wish)
        by = made_by(None, wish)
        task = plan([str(path)], ("srt",), None, by)
        return task, Transcriber(Listener(), Lines(), wish, None, Voices())

    assert "vad" not in made_by(None, Wish()).values, "transcripts made before it stay done"
    assert [one.error for one in planned()[0].run(planned()[1])] == [None]
    assert "skipped" not in json.loads((tmp_path / "a.source").read_text())["srt"]
    (refused,) = planned(vad=True)[0].refused
    assert "vad is True, was not set" in refused.error
    (tmp_path / "a.srt").unlink()
    first, transcriber = planned(vad=True)
    assert [one.error for one in first.run(transcriber)] == [None]
    entry = json.loads((tmp_path / "a.source").read_text())["srt"]
    assert entry["values"]["vad"] is True
    assert entry["skipped"] == {"seconds": pytest.approx(3.7, abs=0.01), "of": 5}
    assert planned(vad=True)[0].num_done == 1
    assert asdict(Wish())["vad"] is False


def test_another_rate_than_the_models_is_refused():
    class Slow(Voices):
        rate = 8000

    with pytest.raises(ConfigError, match=f"vad hears 8000 .* this model {RATE}; leave vad out"):
        detector_of(Wish(vad=True), Lines(), Slow())
    assert detector_of(Wish(), Lines(), Slow()) is None


def test_without_the_package_the_error_says_how_to_install(monkeypatch):
    import torch

    before = torch.get_num_threads()
    monkeypatch.setitem(sys.modules, "silero_vad", None)
    with pytest.raises(ConfigError) as found:
        VoiceDetector()
    assert str(found.value) == NOT_INSTALLED
    assert 'pip install "mmdeploy-llm[vad]"' in NOT_INSTALLED
    assert torch.get_num_threads() == before


def test_the_real_detector_hears_no_voice_in_noise_and_keeps_the_threads():
    pytest.importorskip("silero_vad", reason="needs the extra vad")
    import torch

    before = torch.get_num_threads()
    detector = VoiceDetector()
    assert torch.get_num_threads() == before, "the package's import sets it to one"
    noise = np.random.default_rng(0).standard_normal(5 * RATE).astype(np.float32) * 0.05
    for samples in (noise, np.zeros(RATE, np.float32), np.zeros(0, np.float32), noise[:100]):
        assert detector.stretches(samples) == []


@pytest.mark.parametrize("level", [1.0, 0.003])
def test_the_real_detector_finds_what_sounds_like_a_voice(level):
    """Vowels: pulses of a larynx through three resonances, with a melody; 20 s of silence around.
    It is found in recordings that are 50 dB softer too."""
    pytest.importorskip("silero_vad", reason="needs the extra vad")
    times = np.arange(2 * RATE) / RATE
    sound = np.zeros(len(times))
    pitch = 2 * np.pi * np.cumsum(120 + 15 * np.sin(2 * np.pi * 3 * times)) / RATE
    for number in range(1, 30):
        at = number * 120
        strength = sum(
            1 / (1 + ((at - formant * (1 + 0.3 * np.sin(2 * np.pi * 4 * times))) / 90) ** 2)
            for formant in (600, 1200, 2500)
        )
        sound += strength * np.sin(number * pitch)
    sound *= (0.55 + 0.45 * np.sin(2 * np.pi * 4 * times)) * 0.1 * level
    silence = np.zeros(20 * RATE)
    samples = np.concatenate([silence, sound, silence]).astype(np.float32)
    found = VoiceDetector().stretches(samples)
    assert len(found) >= 1
    assert 19.7 <= found[0][0] / RATE <= 20.6
    assert found[-1][1] / RATE <= 22.6
    assert all(isinstance(one, int) for pair in found for one in pair)
