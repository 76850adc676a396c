"""A sound is heard at the time at which players play it, in every container and codec.

Clicks at known times are encoded by PyAV; where they are is how the file was made, and what the
times of the decoded frames say.
"""

import io
from fractions import Fraction

import av
import numpy as np
import pytest

from mmdeploy_llm.hooks import MediaLimits
from mmdeploy_llm.media import SoundDecoder
from mmdeploy_llm.media.sound.clock import Clock
from tests.media.sound_files import RATE, noise, wav16

HERE = MediaLimits(isolation="thread")
SECONDS = 2.0  # of each part of a sound, with a click in its middle
VIDEOS = {"webm": "libvpx", "flv": "flv1", "mpeg": "mpeg2video", None: "mpeg4"}


def part(rate):
    samples = np.zeros(round(SECONDS * rate), np.int16)
    samples[rate - 24 : rate + 24] = 29_000
    return samples


def film(container, codec, starts, picture=0.0, rate=48_000, damaged=(), end=8.0):
    """Returns a file whose sound has parts that start at these seconds. picture: the second at
    which its picture starts, None: it has none. damaged: numbers of packets of sound that are."""
    buffer, packets = io.BytesIO(), []
    with av.open(buffer, "w", format=container) as file:
        if picture is not None:
            seen = file.add_stream(VIDEOS.get(container, VIDEOS[None]), rate=10)
            seen.width = seen.height = 32
            seen.pix_fmt, seen.codec_context.max_b_frames = "yuv420p", 0
        heard = file.add_stream(codec, rate=rate, layout="mono")
        own = heard.codec_context
        for start in starts:
            split = av.AudioResampler(own.format.name, "mono", rate, own.frame_size or 1024)
            frame = av.AudioFrame.from_ndarray(part(rate)[None], format="s16", layout="mono")
            frame.sample_rate, frame.pts, at = rate, 0, round(start * rate)
            for piece in split.resample(frame) + split.resample(None):
                piece.pts, piece.time_base, at = at, Fraction(1, rate), at + piece.samples
                packets += heard.encode(piece)
        packets += heard.encode(None)
        for number in damaged:
            packets[number].update(bytes(packets[number].size))
        if picture is not None:
            for number in range(round(end * 10)):
                frame = av.VideoFrame.from_ndarray(
                    np.full((32, 32, 3), number, np.uint8), format="rgb24"
                )
                frame.pts = number + round(picture * 10)
                packets += seen.encode(frame)
            packets += seen.encode(None)
        packets = [packet for packet in packets if packet.dts is not None]
        for packet in sorted(packets, key=lambda own: own.dts * own.time_base):
            file.mux(packet)
    return buffer.getvalue()


def heard(blob, options=None):
    """Returns the seconds of the clicks, the length and the notes."""
    with_decoder = SoundDecoder()
    try:
        sound = with_decoder.open(blob, HERE)
        samples = sound.samples(RATE, options or {})
    finally:
        with_decoder.close()
    return clicks(samples, RATE), len(samples) / RATE, sound.notes


def clicks(samples, rate):
    loud = np.flatnonzero(np.abs(samples) > 0.3 * np.abs(samples).max())
    groups = np.split(loud, np.flatnonzero(np.diff(loud) > rate // 10) + 1)
    return [float(group.mean()) / rate for group in groups if len(group)]


def clicks_by_times(blob):
    """Returns where PyAV's frames have the clicks, by their own times."""
    found = []
    with av.open(io.BytesIO(blob)) as file:
        for frame in file.decode(audio=0):
            values = np.abs(frame.to_ndarray().astype(np.float64).reshape(-1))
            found.append((float(values.max()), frame.time + values.argmax() / frame.sample_rate))
    loudest = max(loud for loud, _ in found)
    times = sorted(time for loud, time in found if loud > 0.5 * loudest)
    return [time for at, time in enumerate(times) if not at or time - times[at - 1] > 0.1]


FILMS = [
    ("mp4", "aac"), ("mp4", "libmp3lame"), ("mp4", "libopus"), ("mp4", "flac"), ("mp4", "alac"),
    ("mov", "aac"), ("matroska", "aac"), ("matroska", "libopus"), ("matroska", "pcm_s16le"),
    ("matroska", "libmp3lame"), ("matroska", "flac"), ("webm", "libopus"), ("flv", "aac"),
    ("mpegts", "aac"), ("mpegts", "mp2"), ("mpegts", "ac3"), ("mpeg", "mp2"), ("asf", "libmp3lame"),
]  # fmt: skip


@pytest.mark.few_in_ci(8)
@pytest.mark.parametrize(("container", "codec"), FILMS)
def test_a_sound_begins_when_players_play_it(container, codec):
    """It begins after its picture, and has a gap of a second in it."""
    rate = 44_100 if container == "flv" else 48_000
    blob = film(container, codec, (1.5, 4.5), rate=rate)
    found, length, notes = heard(blob)
    assert found == pytest.approx([2.5, 5.5], abs=0.003)
    assert found == pytest.approx(clicks_by_times(blob), abs=0.003) or container == "mpeg"
    assert length == pytest.approx(6.5, abs=0.1)
    assert [note.split(" of ")[0].split(" after ")[0] for note in notes] == [
        "its sound begins", "a gap"
    ]  # fmt: skip
    later, *_ = heard(blob, {"start": 4.0, "end": 6.0})
    assert later == pytest.approx([1.5], abs=0.003), "options count by the same clock"


@pytest.mark.few_in_ci(3)
@pytest.mark.parametrize(("container", "codec"), FILMS)
def test_a_sound_without_a_gap_has_no_silence_put_in(container, codec):
    rate = 44_100 if container == "flv" else 48_000
    blob = film(container, codec, (0.0, 2.0), rate=rate)
    found, length, notes = heard(blob)
    with av.open(io.BytesIO(blob)) as file:
        frames = sum(frame.samples for frame in file.decode(audio=0)) / rate
    assert length == pytest.approx(frames, abs=0.001)
    assert notes == ()
    assert found == pytest.approx([1.0, 3.0], abs=0.03)  # some keep what encoders put in front


@pytest.mark.parametrize(
    ("container", "codec", "picture", "expected"),
    [
        ("mp4", "aac", None, 5.9),  # its clock begins at 0
        ("mov", "alac", None, 5.9),
        ("matroska", "libopus", None, 1.0),  # players begin where the file does
        ("mpegts", "mp2", None, 1.01),
        ("ogg", "libopus", None, 1.0),
        ("matroska", "libopus", 3.0, 2.9),  # the picture begins later than 0, before the sound
        ("matroska", "libopus", 6.0, 1.0),  # the sound begins first
        ("flv", "aac", 0.0, 5.9),
    ],
)
def test_where_a_clock_begins(container, codec, picture, expected):
    rate = 44_100 if container == "flv" else 48_000
    found, _, notes = heard(film(container, codec, (4.9,), picture=picture, rate=rate))
    assert found == pytest.approx([expected], abs=0.003)
    assert ("begins after" in "".join(notes)) == (expected > 1.5)
    assert "cut off" not in "".join(notes)


@pytest.mark.parametrize("gap", [0.02, 0.06, 0.3, 5.0])
def test_small_and_large_gaps(gap):
    found, *_ = heard(film("matroska", "pcm_s16le", (0.0, 2 + gap), end=4))
    assert found == pytest.approx([1.0, 3.0 + gap], abs=0.003)


@pytest.mark.parametrize(
    ("container", "codec"), [("matroska", "flac"), ("mp4", "flac"), ("flac", "flac")]
)
def test_packets_that_are_damaged_keep_their_time(container, codec):
    picture = None if container == "flac" else 0.0
    blob = film(container, codec, (0.0, 2.0), picture=picture, damaged=[5])
    found, length, _ = heard(blob)
    assert length == pytest.approx(4.0, abs=0.01)
    assert found == pytest.approx([1.0, 3.0], abs=0.003)


def test_a_clock_that_begins_anew_is_told():
    """Two recordings of a broadcast, one appended to the other."""
    one = film("mpegts", "mp2", (30.0,), picture=None)
    two = film("mpegts", "mp2", (2.0,), picture=None)
    found, length, notes = heard(one + two)
    assert length == pytest.approx(4.0, abs=0.1)
    assert found == pytest.approx([1.0, 3.0], abs=0.03)
    assert any(note.startswith("its clock jumps by -") for note in notes)


def test_a_gap_beyond_all_limits_is_a_new_clock():
    found, _, notes = heard(film("matroska", "pcm_s16le", (0.0, 20_000.0), end=3))
    assert found == pytest.approx([1.0, 3.0], abs=0.003)
    assert "its clock jumps by 19998.00 s after 2.00 s" in notes[0]


@pytest.mark.parametrize(
    ("faster", "most", "places"), [(1.0, 0.0, 0), (1.01, 0.3, 2), (1.001, 0.3, 0), (0.99, 0.5, 0)]
)
def test_times_that_drift_put_no_silence_between_all_packets(faster, most, places):
    """Packets of 20 ms for 100 s, whose times run a little faster or slower than their samples,
    vary by 4 ms, and lack one of them."""
    clock = Clock(zero=0.0, most=100.0)
    rng, filled = np.random.default_rng(0), []
    for number in range(5000):
        if number != 2500:
            time = number * 0.02 * faster + rng.uniform(-0.002, 0.002)
            if seconds := clock.silence_before(time):
                filled.append(seconds)
            clock.heard(0.02)
            assert abs(clock.position - 0.02 - time + clock.zero) < most + 0.03
    assert places <= len(filled) - 1 <= places + 1


def stereo(left, right):
    return np.ascontiguousarray(np.stack([left, right], axis=1))


@pytest.mark.parametrize("form", ["file", "array"])
def test_opposite_channels_do_not_cancel(form):
    left = noise(4)[:, 0]
    for samples, loud in ((stereo(left, -left), 0), (stereo(-left // 10 * 9, left), 1)):
        source = wav16(samples) if form == "file" else (samples, RATE)
        sound = SoundDecoder().open(source, HERE)
        found = sound.samples(RATE, {})
        assert np.array_equal(found, (samples[:, loud] / 32768).astype(np.float32))
        (note,) = sound.notes
        words = (
            f"its channels are opposite and cancel each other: channel {loud + 1} alone is heard"
        )
        assert note.startswith(words)


def test_one_speaker_with_swapped_wires_is_heard():
    """A conversation: the one in both channels alike, the other in both with opposite signs."""
    one, two = noise(4)[:, 0], noise(4, seed=1)[:, 0]
    samples = np.concatenate([stereo(one, one), stereo(two, -two)])
    sound = SoundDecoder().open(wav16(samples), HERE)
    found = sound.samples(RATE, {})
    half = len(one)
    assert np.array_equal(found[: half - 2**14], (one / 32768).astype(np.float32)[: half - 2**14])
    assert np.sqrt(np.mean(found[half:] ** 2)) > 0.25
    assert " in 50% of it " in sound.notes[0] or " in 49% of it " in sound.notes[0]


@pytest.mark.parametrize("channels", [2, 6, 8])
def test_channels_that_are_not_opposite_are_averaged_as_by_soundfile(channels):
    soundfile = pytest.importorskip("soundfile", reason="needs soundfile, of the extra 'dev'")
    rng = np.random.default_rng(channels)
    music = rng.integers(-9000, 9000, (RATE * 3, channels), dtype=np.int16)
    music[:, 0] = -music[:, 1] // 3 * 2  # nearly opposite, which a mean survives
    buffer = io.BytesIO()
    soundfile.write(buffer, music, RATE, format="WAV", subtype="PCM_16")
    sound = SoundDecoder().open(buffer.getvalue(), HERE)
    found = sound.samples(RATE, {})
    wanted = soundfile.read(io.BytesIO(buffer.getvalue()), dtype="float32")[0].mean(axis=1)
    assert np.allclose(found, wanted, atol=1e-7)
    assert sound.notes == ()


LYING = {  # format -> (the field of the size of its samples, bytes, order, what it counts besides)
    "WAV": (b"data", 4, "little", 0),
    "W64": (b"data\xf3\xac\xd3\x11\x8c\xd1\x00\xc0\x4f\x8e\xdb\x8a", 8, "little", 24),
    "AIFF": (b"SSND", 4, "big", 8),
    "CAF": (b"data", 8, "big", 4),
    "AU": (b".snd\0\0\0\x18", 4, "big", 0),
    "RF64": (b"ds64\x1c\0\0\0", 8, "little", 0),
}


@pytest.mark.parametrize("name", LYING)
@pytest.mark.parametrize("stated", [1.0, 60.0])
def test_headers_that_say_less_or_more_than_there_is(name, stated):
    """Samples that soundfile has written are heard whole, and the header's fault is told."""
    soundfile = pytest.importorskip("soundfile", reason="needs soundfile, of the extra 'dev'")
    samples, buffer = noise(10), io.BytesIO()
    soundfile.write(buffer, samples, RATE, format=name, subtype="PCM_16")
    blob = bytearray(buffer.getvalue())
    mark, width, order, more = LYING[name]
    at = blob.index(mark[:4] if name == "AU" else mark) + len(mark)
    at += 8 if name == "RF64" else 0
    blob[at : at + width] = (round(stated * RATE * 2) + more).to_bytes(width, order)
    sound = SoundDecoder().open(bytes(blob), HERE)
    found = sound.samples(RATE, {})
    assert np.array_equal(found, (samples[:, 0] / 32768).astype(np.float32))
    (note,) = sound.notes
    what = "it holds 10.0 s" if stated < 10 else "it ends after 10.0 s"
    assert note.startswith(f"{what}, though its header says {stated:.1f} s: ")


def test_chunks_after_the_samples_are_no_sound():
    samples = noise(1)
    listed = b"LIST\x1a\0\0\0INFOISFT\x0e\0\0\0Lavf58.29.100\0"
    odd = wav16(samples[:-1]) + listed  # the size of the samples is even all the same
    for blob in (wav16(samples) + listed, odd, wav16(samples) + b"TAG" + b"x" * 125):
        _, length, notes = heard(blob)
        assert (round(length, 3), notes) == (1.0, ())
