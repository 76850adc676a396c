"""Sounds of any form are the samples that transformers' load_audio reads, or an error of the item.

What soundfile reads was compared once, bit for bit, for WAV of 8, 16, 24 and 32 bits, floats,
mu-law, A-law and IMA ADPCM, FLAC, AIFF, W64, RF64, AU and CAF, with 1 to 8 channels (2026-11-26,
soundfile 0.13); the same numbers are computed here.
"""

import io
import struct
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import av
import numpy as np
import pytest
import torch

from mmdeploy_llm.errors import MediaError, MediaLimitError, UnsupportedMediaError
from mmdeploy_llm.hooks import MediaLimits
from mmdeploy_llm.media import SoundDecoder
from mmdeploy_llm.media.sound.files import PIECE
from mmdeploy_llm.media.sound.headers.appended import files_in
from mmdeploy_llm.media.sound.headers.ogg import links
from mmdeploy_llm.media.sound.headers.riff import corrected
from tests.media.sound_files import RATE, encoded, floats, noise, wav, wav16

HERE = MediaLimits(isolation="thread")
SAMPLES = noise()


@pytest.fixture
def decoder():
    made = SoundDecoder()
    yield made
    made.close()


def read(decoder, source, rate=RATE, options=None, limits=HERE, **more):
    return decoder.open(source, limits).samples(rate, options or {}, **more)


@pytest.mark.parametrize("channels", [1, 2, 6])
def test_pcm_is_bit_equal(decoder, channels):
    samples = noise(channels=channels)
    assert np.array_equal(read(decoder, wav16(samples)), floats(samples))


@pytest.mark.parametrize(
    ("code", "bits", "stored", "wanted"),
    [
        (1, 8, lambda x: (x // 256 + 128).astype(np.uint8), lambda x: (x // 256) / 128),
        (1, 24, lambda x: (x.astype("<i4") * 256).view("u1").reshape(-1, 4)[:, :3], None),
        (1, 32, lambda x: x.astype("<i4") * 65536, None),
        (3, 32, lambda x: (x / 32768).astype("<f4"), None),
        (3, 64, lambda x: (x / 32768).astype("<f8"), None),
    ],
)
def test_other_widths_are_bit_equal(decoder, code, bits, stored, wanted):
    data = np.ascontiguousarray(stored(SAMPLES)).tobytes()
    found = read(decoder, wav(data, code=code, bits=bits))
    expected = SAMPLES / 32768 if wanted is None else wanted(SAMPLES)
    assert np.array_equal(found, expected[:, 0].astype(np.float32))


@pytest.mark.parametrize(
    ("codec", "container"), [("flac", "flac"), ("flac", "ogg"), ("alac", "ipod")]
)
def test_lossless_files_are_bit_equal(decoder, codec, container):
    form = "s16p" if codec == "alac" else "s16"
    samples = noise(channels=2)
    blob = encoded(samples, codec, container, sample_format=form)
    assert np.array_equal(read(decoder, blob), floats(samples))


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("codec", "container", "rate"),
    [
        ("libmp3lame", "mp3", 44100),
        ("libopus", "ogg", 48000),
        ("aac", "ipod", 44100),
        ("aac", "adts", 44100),
        ("aac", "matroska", 44100),
        ("pcm_mulaw", "wav", 8000),
    ],
)
def test_lossy_files_sound_alike(decoder, codec, container, rate):
    time = np.arange(rate) / rate
    tone = np.round(8000 * np.sin(2 * np.pi * 440 * time)).astype(np.int16)[:, None]
    found = read(decoder, encoded(tone, codec, container, rate))
    assert abs(len(found) - RATE) <= 0.15 * RATE  # some write their delay, some do not
    spectrum = np.abs(np.fft.rfft(found[2000:10000]))
    assert abs(np.argmax(spectrum) * RATE / 8000 - 440) < 4
    assert abs(found).max() == pytest.approx(8000 / 32768, rel=0.1)


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 192_000])
def test_other_rates_are_resampled_to_the_length_of_the_reference(decoder, rate):
    time = np.arange(rate + 7) / rate
    wave = (0.5 * np.sin(2 * np.pi * 440 * time)).astype(np.float32)
    found = read(decoder, (wave, rate))
    assert len(found) == -(-(rate + 7) * RATE // rate)
    wanted = 0.5 * np.sin(2 * np.pi * 440 * np.arange(len(found)) / RATE)
    assert abs(found - wanted)[300:-300].max() < 1e-4


def test_resampled_in_one_piece_or_packet_by_packet(decoder):
    samples = noise(seconds=2, rate=44100)
    by_packets = read(decoder, wav16(samples, 44100))
    assert np.array_equal(by_packets, read(decoder, (samples, 44100)))


def forms(samples):
    ints, values = samples[:, 0], samples[:, 0] / np.float32(32768)
    sound = SimpleNamespace(data=torch.tensor(values)[None], sample_rate=RATE)
    return [
        (ints, RATE),
        (RATE, ints),
        {"array": values, "sampling_rate": RATE},
        {"raw": values.tolist(), "sampling_rate": float(RATE)},
        {"path": "x.wav", "array": values.astype(np.float64), "sampling_rate": np.int64(RATE)},
        {"bytes": wav16(samples), "path": None},
        (torch.tensor(values)[None], RATE),
        (samples.astype(np.int32) * 65536, RATE),
        sound,
        SimpleNamespace(get_all_samples=lambda: sound),
        bytearray(wav16(samples)),
    ]


@pytest.mark.parametrize("number", range(11))
def test_forms_that_libraries_have(decoder, number):
    assert np.array_equal(read(decoder, forms(SAMPLES)[number]), floats(SAMPLES))


def test_start_and_end(decoder):
    for source in (wav16(SAMPLES), (SAMPLES[:, 0], RATE)):
        found = read(decoder, source, options={"start": 0.1, "end": 0.3})
        assert np.array_equal(found, floats(SAMPLES)[1600:4800])
        assert len(read(decoder, source, options={"start": 0.4, "end": 9})) == 1600
        with pytest.raises(MediaError, match=r"ends after 0\.50 s, before its option start = 0\.5"):
            read(decoder, source, options={"start": 0.5})


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"begin": 1}, "no option 'begin'"),
        ({"star": 1}, "did you mean 'start'"),
        ({"start": -1}, "start must be seconds"),
        ({"start": float("nan")}, "start must be seconds"),
        ({"start": True}, "start must be seconds"),
        ({"start": 2, "end": 2}, "must be after its start"),
        ({"sampling_rate": 0}, "sampling_rate must be a whole number"),
        ({"sampling_rate": Fraction(1, 3)}, "sampling_rate must be a whole number"),
        ({"sampling_rate": 10**9}, "sampling_rate must be a whole number"),
        ({"sampling_rate": float("inf")}, "sampling_rate must be a whole number"),
        ({"sampling_rate": "16000"}, "sampling_rate must be a whole number"),
        ({"sampling_rate": 16000}, "option of sounds that are arrays"),
    ],
)
def test_wrong_options(decoder, options, message):
    with pytest.raises(MediaError, match=message):
        read(decoder, wav16(SAMPLES), options=options)


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ((np.zeros(0, np.float32), RATE), MediaError, "no samples"),
        ((np.array([np.nan], np.float32), RATE), MediaError, "not finite"),
        ((np.array([1e300]), RATE), MediaError, "not finite"),
        ((np.array([20000.0]), RATE), MediaError, "full volume is 1"),
        ((np.zeros(4, np.int64), RATE), UnsupportedMediaError, "holds int64"),
        ((np.zeros(4, bool), RATE), UnsupportedMediaError, "holds bool"),
        ((np.zeros((2, 2, 2), np.float32), RATE), UnsupportedMediaError, "the shape"),
        ((np.zeros((99, 400), np.float32), RATE), MediaLimitError, "neither axis"),
        ((np.zeros((3, 3), np.float32), RATE), MediaLimitError, "neither axis"),
        ((["a"], RATE), UnsupportedMediaError, "list must hold numbers"),
        (np.zeros(4, np.float32), MediaError, "needs its sampling rate"),
        ({"array": np.zeros(4)}, UnsupportedMediaError, "'array' and 'sampling_rate'"),
        ({}, UnsupportedMediaError, "found nothing"),
        (3.0, UnsupportedMediaError, "type float"),
        (b"", MediaError, "is empty"),
        (b"xyz", UnsupportedMediaError, "match no sound format"),
        (b"#EXTM3U\nhttp://x/", UnsupportedMediaError, "match no sound format"),
        (wav(b""), MediaError, "no samples"),
        (wav(struct.pack("<2f", 0, np.inf), code=3, bits=32), MediaError, "not finite"),
        (b"fLaC" + bytes(500), MediaError, "corrupt"),
        (wav(b"1234", code=0x999), UnsupportedMediaError, "codec is not known"),
    ],
)
def test_what_is_no_sound(decoder, source, error, message):
    with pytest.raises(error, match=message):
        read(decoder, source)


@pytest.mark.parametrize("size", [10, 11, 1000, 2**31, 2**31 + 10**6, 2**32 - 1])
def test_lengths_of_headers_are_not_believed(decoder, size):
    """One that is too small is that of a recorder that lost power before it wrote the true one."""
    found = read(decoder, wav16(SAMPLES, size=size))
    assert np.array_equal(found, floats(SAMPLES))


def test_limits(decoder):
    blob = wav16(noise(2))
    with pytest.raises(MediaLimitError, match=r"longer than the 1 seconds that the model allows"):
        read(decoder, blob, most=1.0)
    assert len(read(decoder, blob, most=2.0)) == 2 * RATE
    assert len(read(decoder, blob, most=1.0, options={"start": 0.5, "end": 1.5})) == RATE
    with pytest.raises(MediaLimitError, match="max_video_seconds"):
        read(decoder, blob, limits=replace(HERE, max_duration=1.5))
    with pytest.raises(MediaLimitError, match="max_video_seconds"):
        read(decoder, (noise(2), RATE), limits=replace(HERE, max_duration=1.5))
    with pytest.raises(MediaLimitError, match="raise max_media_bytes"):
        read(decoder, blob, limits=replace(HERE, max_bytes=1000))
    with pytest.raises(MediaLimitError, match="raise max_media_bytes"):
        read(decoder, (noise(2), RATE), limits=replace(HERE, max_bytes=1000))


def test_a_file_that_is_cut_off_is_read_to_its_end(decoder):
    samples = noise(1, channels=2)
    found = read(decoder, wav16(samples)[:-5000])
    assert np.array_equal(found, floats(samples)[: len(found)])
    assert len(found) == len(samples) - 1250
    flac = encoded(samples, "flac", "flac", sample_format="s16")
    cut = read(decoder, flac[: len(flac) // 2])
    assert 0 < len(cut) < len(samples)
    assert np.array_equal(cut, floats(samples)[: len(cut)])


def notes(decoder, blob, options=None, limits=HERE):
    sound = decoder.open(blob, limits)
    sound.samples(RATE, options or {})
    return sound.notes


def test_what_is_left_out_is_noted(decoder):
    samples = noise(4)
    whole = [wav16(samples), wav16(samples, size=2**32 - 1), wav16(samples, size=0)]
    whole += [encoded(samples, "flac", "flac", sample_format="s16")]
    whole += [encoded(samples, "aac", "adts"), encoded(samples, "libmp3lame", "mp3")]
    assert {notes(decoder, blob) for blob in whole} == {()}
    (told,) = notes(decoder, wav16(samples)[: -2 * RATE])
    assert told == "it ends after 3.0 s, though its header says 4.0 s: it may be cut off"
    assert notes(decoder, wav16(samples)[: -2 * RATE], {"end": 1}) == ()
    flac = whole[3]
    assert "header says 4.0 s" in notes(decoder, flac[: len(flac) // 2])[0]


def test_lengths_that_ffmpeg_guesses_are_not_what_a_header_says(decoder):
    """It takes the bit rate of the first frames, here of silence, for that of the whole file."""
    samples = noise(9)
    samples[: 3 * RATE] = 0
    bare = {"write_xing": "0", "id3v2_version": "0"}
    parts = (samples[: 3 * RATE], "8000"), (samples[3 * RATE :], "128000")
    plain = b"".join(
        encoded(part, "libmp3lame", "mp3", options={"b": bits}, muxing=bare) for part, bits in parts
    )
    adts = encoded(samples, "aac", "adts")
    for blob, name in ((plain, "mp3"), (adts, "aac")):
        with av.open(io.BytesIO(blob), format=name) as file:
            assert file.duration / av.time_base > 10, name  # FFmpeg's guess
        assert notes(decoder, blob) == ()
    stated = encoded(samples, "libmp3lame", "mp3")
    assert notes(decoder, stated) == ()
    assert "though its header says 9.0 s" in notes(decoder, stated[: len(stated) // 2])[0]


def test_other_sound_tracks_are_noted(decoder):
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as file:
        streams = [file.add_stream("pcm_s16le", rate=RATE, layout="mono") for _ in range(2)]
        for stream, language in zip(streams, ("deu", "eng"), strict=True):
            stream.metadata["language"] = language
        for stream in streams:
            frame = av.AudioFrame.from_ndarray(SAMPLES.reshape(1, -1), "s16", "mono")
            frame.sample_rate, frame.pts = RATE, 0
            for packet in (*stream.encode(frame), *stream.encode(None)):
                file.mux(packet)
    wanted = ("heard is sound track 1 of 2 (deu, eng); the others are left out",)
    assert notes(decoder, buffer.getvalue()) == wanted
    apart = MediaLimits(isolation="process")
    assert notes(decoder, buffer.getvalue(), limits=apart) == wanted


def test_damage_within_a_file_is_an_error(decoder):
    mp3 = bytearray(encoded(noise(4, rate=44100), "libmp3lame", "mp3", 44100))
    mp3[4000:-4000] = np.random.default_rng(1).bytes(len(mp3) - 8000)
    with pytest.raises(MediaError, match="corrupt"):
        read(decoder, bytes(mp3))


def test_tags_and_chunks_before_the_sound(decoder):
    listed = b"LIST" + struct.pack("<I", 26) + b"INFOISFT\x0e\0\0\0Lavf58.29.100\0"
    assert np.array_equal(read(decoder, wav16(SAMPLES, chunks=listed)), floats(SAMPLES))
    mp3 = encoded(noise(1), "libmp3lame", "mp3")
    size = 2 * 2**20
    tag = b"ID3\x04\0\0" + bytes(size >> shift & 0x7F for shift in (21, 14, 7, 0)) + bytes(size)
    plain = mp3[mp3.index(b"\xff\xf3") :] if mp3.startswith(b"ID3") else mp3
    assert np.array_equal(read(decoder, tag + plain), read(decoder, plain))


def test_numbers_of_24_bits_in_containers_of_32(decoder):
    """FFmpeg takes them for floats."""
    form = struct.pack("<HHIIHHHHI", 0xFFFE, 1, RATE, RATE * 4, 4, 32, 22, 24, 4)
    form += bytes.fromhex("0100000000001000800000aa00389b71")
    data = (SAMPLES.astype("<i4") * 65536).tobytes()
    chunks = b"JUNK\x03\0\0\0abc\0", b"fmt " + struct.pack("<I", len(form)) + form
    body = b"WAVE" + b"".join(chunks) + b"data" + struct.pack("<I", len(data)) + data
    blob = b"RIFF" + struct.pack("<I", len(body)) + body
    assert np.array_equal(read(decoder, blob), floats(SAMPLES))
    assert corrected(blob[:50]) == blob[:50]


def test_the_links_of_an_ogg_chain_are_decoded_each_for_itself(decoder):
    """FFmpeg keeps the state of the first one: samples of 16 times full volume, or none."""
    rate = 48000
    ogg = [encoded(noise(1, each, rate, each), "libopus", "ogg", rate) for each in (1, 1, 2)]
    found = read(decoder, b"".join(ogg), rate)
    assert np.array_equal(found, np.concatenate([read(decoder, each, rate) for each in ogg]))
    assert len(found) == 3 * rate
    assert [link.num_lost for link in links(b"".join(ogg) + b"OggS")] == [0, 0, 0]
    assert [link.blob for link in links(b"no pages")] == [b"no pages"]


LOSSLESS = {"w64": "pcm_s16le", "aiff": "pcm_s16be", "mov": "pcm_s16le"}


@pytest.mark.parametrize("name", ["wav", "RF64", *LOSSLESS])
def test_files_that_were_written_into_one_are_all_heard(decoder, name):
    """`cat a.wav b.wav c.wav` writes such files, of which FFmpeg reads the first part."""
    pieces = [noise(seconds, seed=at) for at, seconds in enumerate((1, 0.5, 2))]
    if name in LOSSLESS:
        files = [encoded(piece, LOSSLESS[name], name) for piece in pieces]
    else:
        files = [wav16(piece) for piece in pieces]
    if name == "RF64":
        files = [_as_rf64(file) for file in files]
    found = read(decoder, b"".join(files))
    assert np.array_equal(found, np.concatenate([floats(piece) for piece in pieces]))
    told = "3 recordings stand in it, one after the other: all are heard"
    assert notes(decoder, b"".join(files)) == (told,)
    assert notes(decoder, files[0]) == ()


def _as_rf64(file):
    """Returns a WAV file with its sizes where RF64 has them (EBU Tech 3306)."""
    riff, data = len(file) + 28, len(file) - 44
    sizes = struct.pack("<QQQI", riff, data, data // 2, 0)
    head = b"RF64" + b"\xff" * 4 + b"WAVEds64" + struct.pack("<I", len(sizes)) + sizes
    return head + file[12:40] + b"\xff" * 4 + file[44:]


@pytest.mark.parametrize(
    ("codec", "container"),
    [("aac", "ipod"), ("aac", "mp4"), ("aac", "flv"), ("libmp3lame", "flv")],
)
def test_lossy_files_that_were_written_into_one_are_all_heard(decoder, codec, container):
    rate = 22050  # FLV has no other
    files = [encoded(noise(1, rate=rate, seed=at), codec, container, rate) for at in range(2)]
    found = read(decoder, b"".join(files), rate)
    assert np.array_equal(found, np.concatenate([read(decoder, each, rate) for each in files]))
    assert len(found) >= 2 * rate


def test_files_in_one_may_differ_in_rate_and_channels(decoder):
    files = [wav16(noise(1)), wav16(noise(1, channels=2, rate=8000), 8000)]
    assert len(read(decoder, b"".join(files))) == 2 * RATE


def test_one_file_is_not_divided():
    """Bytes of another file in samples, tags and pictures, and sizes that nobody knows."""
    inner = wav16(noise(0.1))
    film = encoded(SAMPLES, "aac", "mp4", muxing={"movflags": "frag_keyframe+empty_moov"})
    moov = b"\0\0\0\x08moov"
    for name, blob in (
        ("wav", wav(inner)),
        ("wav", wav(b"", chunks=b"LIST" + struct.pack("<I", len(inner)) + inner)),
        ("wav", wav16(SAMPLES) + b"TAG" + inner),
        ("wav", b"RIFF\xff\xff\xff\xff" + inner[8:] + inner),
        ("wav", b"RIFF\0\0\0\0" + inner[8:] + inner),
        ("wav", wav16(SAMPLES) + inner[:4] + inner[4:8] + b"AVI " + inner[12:]),
        ("w64", b"riff" + bytes(40)),
        ("aiff", b"FORM\0\0"),
        ("mp4", film),
        ("mp4", film + film[:24]),
        ("mp4", moov + b"\0\0\0\x08ftyp"),
        ("mp4", moov + bytes(64)),
        ("flv", b"FLV\x01" + bytes(3)),
        ("flv", b"FLV\x01\x04\0\0\0\x09" + bytes(100)),
        ("mp3", wav16(SAMPLES) * 2),
    ):
        assert files_in(blob, name) == (blob,), (name, blob[:16])


def test_damaged_pages_of_ogg_are_counted(decoder):
    """FFmpeg skips them in silence: of a second 5 ms were left."""
    ogg = bytearray(encoded(noise(1, rate=48000), "libopus", "ogg", 48000))
    ogg[len(ogg) // 2] ^= 1
    with pytest.raises(MediaError, match="50 of its 52 packets"):
        read(decoder, bytes(ogg), 48000)


def test_a_short_vorbis_has_the_samples_that_its_last_page_says():
    """FFmpeg reads 8192 of the 8000 of such a file; no encoder for it is part of PyAV."""
    page = b"OggS\0\x02" + bytes(8) + struct.pack("<III", 7, 0, 0) + b"\1\7\1vorbis"[:9]
    last = b"OggS\0\x04" + struct.pack("<qIII", 8000, 7, 1, 0) + b"\1\1x"
    blob = b"".join(_with_checksum(each) for each in (page, last))
    (link,) = links(blob)
    assert (link.num_samples, link.num_lost) == (8000, 0)


def _with_checksum(page):
    """Computes Ogg's checksum bit by bit, as RFC 3533 describes it."""
    crc = 0
    for byte in page:
        crc ^= byte << 24
        for _ in range(8):
            crc = (crc << 1 ^ (0x04C11DB7 if crc & 2**31 else 0)) & 0xFFFFFFFF
    return page[:22] + struct.pack("<I", crc) + page[26:]


@pytest.mark.parametrize("rate", [1, 2**30])
def test_rates_of_files_are_bounded(decoder, rate):
    with pytest.raises(MediaError, match=f"sampling rate of {rate}"):
        read(decoder, wav16(SAMPLES[:100], rate))


def test_several_tags_and_one_with_a_footer(decoder):
    flac = encoded(SAMPLES, "flac", "flac", sample_format="s16")
    tag = b"ID3\4\0\0\0\0\2\0" + bytes(256)
    footer = b"ID3\4\0\x10\0\0\2\0" + bytes(256) + b"3DI\4\0\x10\0\0\2\0"
    for tags in (tag + tag, footer, footer + tag):
        assert np.array_equal(read(decoder, tags + flac), floats(SAMPLES))


def test_a_video_without_sound_says_so(decoder):
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as file:
        stream = file.add_stream("mpeg4", rate=5)
        stream.width = stream.height = 32
        frame = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")
        for packet in (*stream.encode(frame), *stream.encode(None)):
            file.mux(packet)
    with pytest.raises(UnsupportedMediaError, match="no sound in it, only video"):
        read(decoder, buffer.getvalue())


def test_digests_tell_sounds_apart(decoder):
    blob = wav16(SAMPLES)
    last = bytearray(blob)
    last[-1] ^= 1
    sources = [blob, bytes(last), (SAMPLES, RATE), (SAMPLES, 8000), (SAMPLES[:-1], RATE)]
    digests = [decoder.open(source, HERE).digest for source in sources]
    assert len(set(digests)) == len(digests)
    assert decoder.open(blob, HERE).digest == digests[0]


def test_in_a_process_as_in_a_thread(decoder):
    apart = MediaLimits(isolation="process")
    samples = noise(1, channels=2, rate=44100)
    blob = wav16(samples, 44100)
    assert np.array_equal(read(decoder, blob, limits=apart), read(decoder, blob))
    with pytest.raises(MediaError, match="ends after"):
        read(decoder, blob, options={"start": 3}, limits=apart)
    assert len(read(decoder, blob, limits=apart)) == RATE


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_channels_of_a_file_apart(isolation):
    """More samples than one message of a decoder process holds, in the order of the file."""
    samples = noise(60, channels=5)
    decoder = SoundDecoder()
    try:
        opened = decoder.open(wav16(samples), MediaLimits(isolation=isolation))
        found = opened.channels(RATE)
        opened.samples(RATE, {"end": 1.0})
    finally:
        decoder.close()
    assert samples.size > PIECE
    assert (found.dtype, found.flags.c_contiguous) == (np.float32, True)
    assert np.array_equal(found, samples.T / np.float32(2**15))
    assert opened.notes == ()


def test_channels_that_cannot_be_apart(decoder):
    limits = MediaLimits(isolation="thread", max_duration=1.0)
    with pytest.raises(MediaLimitError, match="longer than the 1 seconds that max_video_seconds"):
        decoder.open(wav16(noise(1.1, channels=2)), limits).channels(RATE)
    with pytest.raises(MediaError, match="only the channels of a file"):
        decoder.open((noise(0.1, channels=2), RATE), limits).channels(RATE)
