"""Films and sounds are what their tracks are, whatever brand or name the file has."""

import io
import struct
from fractions import Fraction

import av
import numpy as np
import pytest

from mmdeploy_llm.batch.corpus.columns import by_suffix, detect
from mmdeploy_llm.batch.speech.plan import plan
from mmdeploy_llm.data.files.chosen_kinds import ChosenKinds, installed_kinds
from mmdeploy_llm.data.files.files import find_media
from mmdeploy_llm.data.files.kinds import Media, NotMedia, kind_of, kind_of_bytes
from mmdeploy_llm.data.records.configuration import Configuration
from mmdeploy_llm.errors import ConfigError, UnsupportedMediaError
from mmdeploy_llm.hooks import MediaLimits
from mmdeploy_llm.media import SoundDecoder
from mmdeploy_llm.media.tracks import PICTURE, SOUND, reader, tracks_of
from mmdeploy_llm.values.first_bytes import HEAD, format_of

KINDS = installed_kinds()


def film(container, sound=None, picture=None, *, rate=48_000, layout="mono", options=None):
    """Returns a second of sound, or picture, or both; PyAV writes them."""
    buffer, packets = io.BytesIO(), []
    with av.open(buffer, "w", format=container, options=options or {}) as file:
        seen = heard = None
        if picture:
            seen = file.add_stream(picture, rate=10)
            seen.width = seen.height = 32
            seen.pix_fmt = "yuvj420p" if picture == "mjpeg" else "yuv420p"
        if sound:
            heard = file.add_stream(sound, rate=rate, layout=layout)
            own = heard.codec_context
            split = av.AudioResampler(own.format.name, layout, rate, own.frame_size or 1024)
            tone = np.round(9000 * np.sin(np.arange(rate) / 20)).astype(np.int16)
            frame = av.AudioFrame.from_ndarray(tone[None], format="s16", layout="mono")
            frame.sample_rate, frame.pts = rate, 0
            for piece in split.resample(frame) + split.resample(None):
                piece.time_base = Fraction(1, rate)
                packets += heard.encode(piece)
            packets += heard.encode(None)
        for number in range(10 if seen else 0):
            frame = av.VideoFrame.from_ndarray(np.full((32, 32, 3), number, np.uint8), "rgb24")
            frame.pts = number
            packets += seen.encode(frame)
        packets += seen.encode(None) if seen else []
        for packet in packets:
            if packet.dts is not None:
                file.mux(packet)
    return buffer.getvalue()


def branded(blob, brand):
    """Returns an MP4 file whose major brand is another one."""
    return blob[:8] + brand + blob[12:]


PARTS = {"movflags": "frag_keyframe+empty_moov"}
SOUNDS = {  # names that phones, recorders and browsers write -> what makes such a file
    "isom.m4a": lambda: branded(film("mp4", "aac"), b"isom"),
    "mp42.m4a": lambda: branded(film("mp4", "aac"), b"mp42"),
    "3gp4.m4a": lambda: branded(film("mp4", "aac"), b"3gp4"),
    "m4v.m4v": lambda: branded(film("mp4", "aac"), b"M4V "),
    "m4a.m4a": lambda: film("ipod", "aac"),
    "parts.m4a": lambda: film("mp4", "aac", options=PARTS),
    "flac.mp4": lambda: film("mp4", "flac"),
    "a.3gp": lambda: film("3gp", "amr_nb", rate=8000),
    "a.mov": lambda: film("mov", "pcm_s16le"),
    "a.webm": lambda: film("webm", "libopus"),
    "live.webm": lambda: film("webm", "libopus", options={"live": "1"}),
    "a.mka": lambda: film("matroska", "flac"),
    "a.mkv": lambda: film("matroska", "aac"),
    "a.ogg": lambda: film("ogg", "libopus"),
    "a.oga": lambda: film("ogg", "flac"),
    "a.wma": lambda: film("asf", "libmp3lame"),
    "a.flv": lambda: film("flv", "aac", rate=44_100),
    "a.avi": lambda: film("avi", "pcm_s16le"),
    "a.ac3": lambda: film("ac3", "ac3", layout="stereo"),
    "a.eac3": lambda: film("eac3", "eac3", layout="stereo"),
    "a.amr": lambda: film("amr", "amr_nb", rate=8000),
    "a.caf": lambda: film("caf", "alac"),
    "a.au": lambda: film("au", "pcm_s16be"),
    "a.aiff": lambda: film("aiff", "pcm_s16be"),
    "a.w64": lambda: film("w64", "pcm_s16le"),
    "a.rf64": lambda: film("wav", "pcm_s16le", options={"rf64": "always"}),
    "a.mp2": lambda: film("mp2", "mp2"),
    "a.mts": lambda: film("mpegts", "mp2"),
    "b.m2ts": lambda: film("mpegts", "ac3", options={"mpegts_m2ts_mode": "1"}),
}
VIDEOS = {
    "a.mp4": lambda: film("mp4", "aac", "mpeg4"),
    "silent.mp4": lambda: film("mp4", None, "mpeg4"),
    "parts.mp4": lambda: film("mp4", "aac", "mpeg4", options=PARTS),
    "brand.m4a": lambda: branded(film("mp4", "aac", "mpeg4"), b"M4A "),
    "a.mov": lambda: film("mov", "aac", "mjpeg"),
    "a.webm": lambda: film("webm", "libopus", "libvpx"),
    "live.webm": lambda: film("webm", "libopus", "libvpx", options={"live": "1"}),
    "a.mkv": lambda: film("matroska", "aac", "mpeg4"),
    "a.wmv": lambda: film("asf", "libmp3lame", "mpeg4"),
    "a.flv": lambda: film("flv", "aac", "flv1", rate=44_100),
    "a.avi": lambda: film("avi", "libmp3lame", "mpeg4"),
    "b.m2ts": lambda: film("mpegts", "ac3", "mpeg4", options={"mpegts_m2ts_mode": "1"}),
    "a.m2ts": lambda: film("mpegts", "mp2", "mpeg4"),
}
ALL = [("audio", name, make) for name, make in SOUNDS.items()]
ALL += [("video", name, make) for name, make in VIDEOS.items()]


@pytest.mark.few_in_ci(14)
@pytest.mark.parametrize(("kind", "name", "make"), ALL, ids=[f"{a}-{b}" for a, b, _ in ALL])
def test_the_tracks_say_what_a_file_is(tmp_path, kind, name, make):
    blob, path = make(), tmp_path / name
    path.write_bytes(blob)
    with av.open(io.BytesIO(blob)) as file:  # how it was made, as its reader sees it
        assert bool(file.streams.video) == (kind == "video")
    assert kind_of(str(path), True, KINDS) == Media(kind=kind)
    assert kind_of_bytes(blob, KINDS) == kind
    assert detect([{"x": blob}], KINDS)[0].kind == kind
    assert [own.kind for own in by_suffix({path.suffix[1:]: blob}, KINDS)] == [kind]
    if kind == "audio":
        wanted = ChosenKinds(table=KINDS, chosen=("audio",))
        (found,) = find_media([str(tmp_path)], wanted=wanted).files
        assert found.path == str(path)
        assert len(plan([str(tmp_path)], ("srt",), None, Configuration()).tasks) == 1
        sound = SoundDecoder().open(blob, MediaLimits(isolation="thread"))
        assert len(sound.samples(16_000, {})) == pytest.approx(16_000, abs=2000)


def box(name, *content):
    data = b"".join(content)
    return struct.pack(">I", len(data) + 8) + name + data


def track(number, handler, *more):
    header = box(b"tkhd", bytes(12), struct.pack(">I", number), bytes(68))
    return box(b"trak", header, *more, box(b"mdia", box(b"hdlr", bytes(8), handler, bytes(12))))


@pytest.mark.parametrize(
    ("tracks", "kinds"),
    [
        ([track(1, b"soun")], {SOUND}),
        # A book that is read, with a picture for each chapter, or titles.
        ([track(1, b"soun", box(b"tref", box(b"chap", b"\0\0\0\2"))), track(2, b"vide")], {SOUND}),
        ([track(1, b"soun", box(b"tref", box(b"chap", b"\0\0\0\2"))), track(2, b"text")], {SOUND}),
        ([track(1, b"soun"), track(2, b"vide")], {SOUND, PICTURE}),
        ([track(1, b"vide"), track(2, b"hint")], {PICTURE}),
        ([track(1, b"text")], set()),
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_tracks_of_mp4(tracks, kinds, is_first):
    """Boxes as ISO/IEC 14496-12 has them; the list of tracks before or after what they hold, whose
    size may have 64 bits."""
    media = struct.pack(">I", 1) + b"mdat" + struct.pack(">Q", 1016) + bytes(1000)
    film_ = box(b"moov", box(b"mvhd", bytes(100)), *tracks)
    blob = box(b"ftyp", b"isom", bytes(4)) + (film_ + media if is_first else media + film_)
    assert tracks_of("mp4", reader(blob), len(blob)) == kinds


def test_sounds_alone_are_no_videos(tmp_path):
    for name in ("isom.m4a", "a.webm"):
        (tmp_path / name).write_bytes(SOUNDS[name]())
    with pytest.raises(ConfigError, match=r"2 audio|audio"):
        find_media([str(tmp_path)], wanted=ChosenKinds(table=KINDS, chosen=("video",)))


@pytest.mark.parametrize(
    ("name", "codec", "noun"),
    [
        ("wv", "wavpack", "a WavPack sound"),
        ("tta", "tta", "a True Audio sound"),
        ("voc", "pcm_u8", "a Creative Voice file"),
        ("rm", "real_144", "a RealAudio or RealMedia file"),
    ],
)
def test_sounds_that_are_not_read_are_refused_by_name(tmp_path, name, codec, noun):
    blob, path = film(name, codec, rate=8000), tmp_path / f"a.{name}"
    path.write_bytes(blob)
    found = kind_of(str(path), True, KINDS)
    assert isinstance(found, NotMedia)
    assert found.reason == f"it is {noun}; convert it to FLAC or WAV"
    with pytest.raises(UnsupportedMediaError, match=f"is {noun}"):
        SoundDecoder().open(blob, MediaLimits())


@pytest.mark.parametrize(
    "name", ["isom.m4a", "a.webm", "a.ogg", "a.wma", "a.flv", "a.avi", "a.mts"]
)
def test_headers_that_are_cut_off_or_damaged(name):
    """Nothing is raised, and no more is said than what is there."""
    blob = SOUNDS[name]()
    container = format_of(blob[:HEAD]).container
    rng = np.random.default_rng(0)
    for size in (*range(0, 200, 7), *range(200, len(blob), max(1, len(blob) // 20))):
        part = blob[:size]
        assert tracks_of(container, reader(part), size) <= {SOUND}
    assert tracks_of(container, reader(blob), len(blob)) == {SOUND}
    for _ in range(100):
        damaged = bytearray(blob)
        for place in rng.integers(0, min(len(blob), 3000), 8):
            damaged[place] = rng.integers(256)
        assert tracks_of(container, reader(bytes(damaged)), len(damaged)) <= {SOUND, PICTURE}
    loop = b"\0\0\0\x08free" * 20_000
    assert tracks_of("mp4", reader(loop), len(loop)) == frozenset()
