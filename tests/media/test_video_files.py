"""Videos of all formats are opened and read: the right frames, or a clear error."""

import io
import re
import struct
from dataclasses import replace

import av
import numpy as np
import pytest
import torch
from PIL import Image

from mmdeploy_llm.errors import MediaError, MediaLimitError, UnsupportedMediaError
from mmdeploy_llm.hooks import MediaLimits
from mmdeploy_llm.media.image import decode as decode_module
from mmdeploy_llm.media.isolation import Workers
from mmdeploy_llm.media.video import container
from mmdeploy_llm.media.video.opening import open_video

LIMITS = MediaLimits()
FORMATS = [
    ("mp4", "libx264"),
    ("mov", "libx264"),
    ("mp4", "libx265"),
    ("matroska", "libx264"),
    ("webm", "libvpx"),
    ("avi", "mpeg4"),
    ("mpegts", "libx264"),
    ("flv", "libx264"),
    ("asf", "wmv2"),
]


@pytest.fixture
def files(load_file):
    return load_file("media/video_files.py")


@pytest.fixture(scope="module")
def numbered(load_file):
    return load_file("media/numbered_videos.py")


@pytest.fixture
def add_sound():
    def with_sound(blob, seconds):
        buffer = io.BytesIO()
        with av.open(io.BytesIO(blob)) as source, av.open(buffer, "w", format="matroska") as file:
            video = file.add_stream_from_template(source.streams.video[0])
            track = file.add_stream("pcm_s16le", rate=8000)
            for packet in source.demux(source.streams.video[0]):
                if packet.size:
                    packet.stream = video
                    file.mux(packet)
            samples = np.zeros((1, 8000 * seconds), np.int16)
            frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
            frame.sample_rate = 8000
            file.mux(track.encode(frame))
            file.mux(track.encode())
        return buffer.getvalue()

    return with_sound


def read(blob, indices, limits=LIMITS):
    return list(open_video(blob, limits).read(indices))


@pytest.mark.one_is_quick
@pytest.mark.parametrize(("name", "codec"), FORMATS)
def test_containers(files, name, codec):
    opened = open_video(files.video(40, 10, name=name, codec=codec), LIMITS)
    line = opened.timeline
    assert (line.num_frames, line.width, line.height) == (40, 160, 96)
    assert line.duration == pytest.approx(4.0, abs=0.01)
    assert line.is_constant
    wanted = [0, 1, 7, 13, 30, 39]
    found = [files.index_of(frame, 40) for frame in opened.read(wanted)]
    assert found == pytest.approx(wanted, abs=1)


@pytest.mark.parametrize("codec", ["libx264", "mpeg4"])
def test_avi_with_frames_that_refer_to_later_ones(files, codec):
    """AVI has no times of presentation; a frame is found by its place among those shown."""
    opened = open_video(files.video(40, 10, name="avi", codec=codec, bf=2), LIMITS)
    line = opened.timeline
    assert (line.num_frames, line.is_constant) == (40, True)
    assert line.times == pytest.approx([number / 10 for number in range(40)])
    assert [files.index_of(frame, 40) for frame in opened.read(range(40))] == list(range(40))
    assert [files.index_of(frame, 40) for frame in opened.read([5, 6, 31])] == [5, 6, 31]


def test_mpeg_program_stream(files):
    """Not all packets of the file have a time."""
    opened = open_video(files.video(40, 25, name="mpeg", codec="mpeg2video"), LIMITS)
    wanted = [0, 5, 20, 39]
    found = [files.index_of(frame, 40) for frame in opened.read(wanted)]
    assert found == pytest.approx(wanted, abs=1)


@pytest.mark.full
def test_every_frame_is_the_one_of_reading_on(files):
    """Seeking to key frames, with frames that refer to later ones, returns the same pictures."""
    blob = files.video(60, 10, gop=9, bf=3)
    opened = open_video(blob, LIMITS)
    whole = list(opened.read(range(60)))
    for index in (0, 8, 9, 10, 26, 27, 44, 59):
        [alone] = opened.read([index])
        assert alone.tobytes() == whole[index].tobytes()


def test_only_what_is_needed_is_decoded(files, monkeypatch):
    blob, counted = files.video(120, 10, gop=10, bf=0, sc_threshold=0), []
    decode = container._decoded

    def counting(packet):
        frames = decode(packet)
        counted.extend(frames)
        return frames

    opened = open_video(blob, LIMITS)
    monkeypatch.setattr(container, "_decoded", counting)
    list(opened.read([0, 60, 119]))
    assert len(counted) < 30


def test_variable_frame_rate(files):
    times = [0, 100, 200, 1000, 1100, 3000, 3100, 3200]
    line = open_video(files.video(8, 10, times=times), LIMITS).timeline
    assert not line.is_constant
    assert [round(1000 * line.time_of(index)) for index in range(8)] == times


TURNS = [
    (1, 0, 0, 1),
    (-1, 0, 0, 1),
    (1, 0, 0, -1),
    (-1, 0, 0, -1),
    (0, 1, -1, 0),
    (0, -1, 1, 0),
    (0, 1, 1, 0),
    (0, -1, -1, 0),
]


@pytest.mark.one_is_quick
@pytest.mark.parametrize("matrix", TURNS)
def test_a_display_matrix_is_followed(files, matrix):
    """Each stored pixel (x, y) is shown at (a x + c y, b x + d y), mirrored where that says so."""
    blob = files.video(8, 10, pixels=files.quarters())
    [stored] = open_video(blob, LIMITS).read([4])
    stored = np.asarray(stored)
    a, b, c, d = matrix
    ys, xs = np.mgrid[: stored.shape[0], : stored.shape[1]]
    columns, lines = a * xs + c * ys, b * xs + d * ys
    columns, lines = columns - columns.min(), lines - lines.min()
    expected = np.zeros((lines.max() + 1, columns.max() + 1, 3), np.uint8)
    expected[lines, columns] = stored
    opened = open_video(files.turned(blob, matrix), LIMITS)
    assert (opened.timeline.height, opened.timeline.width) == expected.shape[:2]
    [frame] = opened.read([4])
    assert np.array_equal(np.asarray(frame), expected)


@pytest.mark.parametrize("matrix", [(0, 0, 0, 0), (1, 1, -1, 1), (2, 0, 0, 2)])
def test_a_display_matrix_of_no_right_angle_leaves_frames_as_stored(files, matrix):
    blob = files.video(8, 10)
    [stored], [frame] = (
        open_video(file, LIMITS).read([4]) for file in (blob, files.turned(blob, matrix))
    )
    assert np.array_equal(np.asarray(frame), np.asarray(stored))


def test_odd_sizes(files):
    opened = open_video(files.video(4, 10, name="avi", codec="mpeg4", size=(101, 67)), LIMITS)
    assert (opened.timeline.width, opened.timeline.height) == (101, 67)
    [frame] = opened.read([3])
    assert frame.size == (101, 67)


def test_one_frame(files):
    opened = open_video(files.video(1, 10), LIMITS)
    assert opened.timeline.num_frames == 1
    assert opened.timeline.duration == pytest.approx(0.1)
    assert len(list(opened.read([0]))) == 1


@pytest.mark.parametrize("name", ["GIF", "WEBP", "PNG"])
def test_animations(files, name):
    opened = open_video(files.animation(name), LIMITS)
    assert opened.timeline.num_frames == 6
    assert opened.timeline.duration == pytest.approx(1.2)
    assert [files.index_of(frame, 6) for frame in opened.read([0, 2, 5])] == [0, 2, 5]


def test_animation_of_uneven_length(files):
    line = open_video(files.animation("GIF", 3, [100, 500, 0]), LIMITS).timeline
    assert [round(time, 2) for time in line.times] == [0, 0.1, 0.6]
    assert line.duration == pytest.approx(0.7)  # a frame of length 0 lasts a tenth of a second


@pytest.mark.parametrize(
    "convert", [list, np.stack, lambda frames: torch.tensor(np.stack(frames)).permute(0, 3, 1, 2)]
)
def test_frames_in_memory(files, convert):
    frames = [files.frame_of(index, 5) for index in range(5)]
    opened = open_video(convert(frames), LIMITS)
    assert opened.timeline.num_frames == 5
    for index, image in zip([1, 4], opened.read([1, 4]), strict=True):
        assert np.array_equal(np.asarray(image), frames[index])


def test_encoded_frames_are_decoded_once_and_only_those_that_are_read(files, monkeypatch):
    def encoded(index):
        buffer = io.BytesIO()
        Image.fromarray(files.frame_of(index, 5)).save(buffer, "PNG")
        return buffer.getvalue()

    decoded, decode = [], decode_module.decode_file
    monkeypatch.setattr(
        decode_module,
        "decode_file",
        lambda blob, *rest: decoded.append(blob) or decode(blob, *rest),
    )
    blobs = [encoded(index) for index in range(5)]
    opened = open_video(blobs, LIMITS)
    for index, image in zip([1, 4], opened.read([1, 4]), strict=True):
        assert np.array_equal(np.asarray(image), files.frame_of(index, 5))
    assert decoded == [blobs[1], blobs[4]]
    assert opened.digest != open_video([*blobs[:4], blobs[0]], LIMITS).digest


def test_frames_of_different_sizes(files):
    opened = open_video([files.frame_of(0, 2), files.frame_of(1, 2, 80, 96)], LIMITS)
    with pytest.raises(MediaError, match="frame 1 of the video has 80 x 96 pixels"):
        list(opened.read([0, 1]))


@pytest.mark.full
def test_damage_in_the_middle(files):
    """Damaged frames are replaced by a neighbour; the others are right."""
    blob = bytearray(files.video(60, 10, gop=6, bf=0, sc_threshold=0, qp=4))
    start = blob.index(b"mdat")
    middle = (start + blob.index(b"moov")) // 2
    blob[middle : middle + (middle - start) // 10] = b"\xff" * ((middle - start) // 10)
    opened = open_video(bytes(blob), LIMITS)
    assert opened.timeline.num_frames == 60
    found = [files.index_of(image, 60) for image in opened.read(range(60))]
    assert found[:20] == list(range(20))
    assert found[-15:] == list(range(45, 60))
    assert max(abs(index - frame) for index, frame in enumerate(found)) <= 10
    num_wrong = sum(index != frame for index, frame in enumerate(found))
    workers = Workers()
    try:
        apart = open_video(bytes(blob), LIMITS, workers)
        assert len(list(apart.read(range(60)))) == 60
    finally:
        workers.close()
    assert opened.notes == apart.notes
    words = r"(\d+) of the frames seen are damaged; the nearest ones, or their parts, stand in"
    told = int(re.fullmatch(words, opened.notes[0]).group(1))
    # Those after them, up to the next key frame, FFmpeg takes for whole.
    assert num_wrong / 2 <= told <= num_wrong


def test_damage_without_end(files):
    """A damaged frame too far from any good one is an error."""
    blob = bytearray(files.video(90, 10, gop=300, bf=0, sc_threshold=0))
    start, end = blob.index(b"mdat") + 1500, blob.index(b"moov") - 4
    blob[start:end] = b"\xff" * (end - start)
    with pytest.raises(MediaError, match="frame 45 of the video cannot be decoded"):
        read(bytes(blob), [45])


def test_truncated_file_gives_what_it_has(files):
    blob = files.video(60, 10, gop=6, bf=0, name="matroska", codec="libx264")
    opened = open_video(blob[: len(blob) // 2], LIMITS)
    count = opened.timeline.num_frames
    assert 10 < count < 50
    assert len(list(opened.read(range(count)))) == count


ANNOUNCED = {
    "mp4": ("libx264", {"moov_size": "3000"}, r"its last \d+ frames lie beyond the end"),
    "mov": ("mjpeg", {"moov_size": "3000"}, r"its last \d+ frames lie beyond the end"),
    "matroska": ("libx264", {}, r"lasts 6.0 s, and its last frame is at \d.\d s"),
    "webm": ("libvpx-vp9", {}, r"lasts 6.0 s, and its last frame is at \d.\d s"),
    "flv": ("libx264", {}, r"lasts 6.0 s, and its last frame is at \d.\d s"),
}


@pytest.mark.parametrize("name", ANNOUNCED)
def test_what_a_cut_file_lacks_is_told(numbered, name):
    codec, container, words = ANNOUNCED[name]
    blob = numbered.encoded(name, codec, ticks=range(60), container=container)
    assert open_video(blob, LIMITS).timeline.notes == ()
    [told] = open_video(blob[: len(blob) * 6 // 10], LIMITS).timeline.notes
    assert re.search(words, told)


def test_a_video_of_long_steps_or_beside_a_longer_sound_is_not_cut(numbered, add_sound):
    """The last picture of a slide show stays as long as one, and a sound may go on after it."""
    slides = numbered.encoded("matroska", "libx264", ticks=range(0, 600, 80))
    one = numbered.encoded("matroska", "libx264", ticks=[0])
    longer = add_sound(numbered.encoded("matroska", "libx264", ticks=range(20)), seconds=9)
    for blob in (slides, one, longer):
        assert open_video(blob, LIMITS).timeline.notes == ()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda files: b"", MediaError, "empty"),
        (lambda files: b"\0" * 500, UnsupportedMediaError, "no video format"),
        (
            lambda files: b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n",
            UnsupportedMediaError,
            "no video",
        ),
        (lambda files: files.video(8)[:400], MediaError, "corrupt or truncated"),
        (lambda files: files.sound(), UnsupportedMediaError, "no video in it, only audio"),
        (lambda files: [], MediaError, "empty list"),
        (lambda files: 7, UnsupportedMediaError, "a video int is not accepted"),
        (lambda files: files.frame_of(0, 2), UnsupportedMediaError, r"of shape \[96, 160, 3\]"),
    ],
)
def test_what_is_no_video(files, make, error, message):
    with pytest.raises(error, match=message):
        read(make(files), [0])


def test_a_still_image_is_no_video(files, encode, noise):
    for image in (noise(20, 20), encode(noise(20, 20), "JPEG"), encode(noise(20, 20), "PNG")):
        with pytest.raises(UnsupportedMediaError, match="image"):
            open_video(image, LIMITS)


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_pixels": 1000}, "160 x 96 = 15360 pixels, 1000 are allowed"),
        ({"max_duration": 3.0}, "4 seconds long, 3 are allowed"),
        ({"max_bytes": 500}, "500 are allowed"),
    ],
)
def test_limits(files, limits, message):
    with pytest.raises(MediaLimitError, match=message):
        open_video(files.video(40, 10), replace(LIMITS, **limits))


def test_a_claimed_length_is_checked_before_reading(files):
    """A header that claims ten hours is refused, whatever the file holds."""
    blob = bytearray(files.video(8, 10, name="matroska"))
    place = blob.index(b"\x44\x89\x88") + 3  # Matroska's Duration, in milliseconds
    blob[place : place + 8] = struct.pack(">d", 36_000_000.0)
    with pytest.raises(MediaLimitError, match="36000 seconds long"):
        open_video(bytes(blob), LIMITS)


def test_errors_have_no_addresses_and_paths(files):
    for blob in (files.video(8)[:400], files.sound(), b"\x1a\x45\xdf\xa3" + b"\0" * 100):
        with pytest.raises(MediaError) as caught:
            open_video(blob, LIMITS)
        assert not re.search(r"0x[0-9a-f]{6,}|/\w+/\w+", str(caught.value))
