"""The n-th moment of a video shows the n-th moment's picture, in every container and codec: each
frame shows its own number, and its time is the one with which it was encoded."""

import io
from itertools import product

import av
import pytest
from PIL import Image

from mmdeploy_llm.errors import MediaError, UnsupportedMediaError
from mmdeploy_llm.hooks import MediaLimits
from mmdeploy_llm.media.image.decode import decode_image
from mmdeploy_llm.media.video.opening import open_video

LIMITS = MediaLimits()
NUM = 12
EVEN = tuple(range(NUM))
UNEVEN = (0, 1, 2, 10, 11, 20, 21, 30, 31, 32, 33, 40)
CONTAINERS = {
    "avi": ("libx264", "mpeg4", "mjpeg", "ffv1"),
    "mp4": ("libx264", "libx265", "mpeg4", "mjpeg", "libvpx-vp9", "libsvtav1"),
    "mov": ("libx264", "libx265", "mjpeg", "prores_ks"),
    "matroska": ("libx264", "libx265", "mpeg4", "mjpeg", "ffv1"),
    "webm": ("libvpx-vp9", "libsvtav1"),
    "mpegts": ("libx264", "libx265", "mpeg4"),
    "flv": ("libx264", "flv"),
    "asf": ("libx264", "mpeg4", "wmv2"),
}
REORDER = ("libx264", "libx265", "mpeg4")
CASES = [
    (name, codec, b_frames, ticks)
    for name, codecs in CONTAINERS.items()
    for codec in codecs
    for b_frames, ticks in product((0, 2) if codec in REORDER else (0,), (EVEN, UNEVEN))
]


@pytest.fixture(scope="session")
def videos(load_file):
    return load_file("media/numbered_videos.py")


def numbers(videos, opened, indices=None):
    indices = range(opened.timeline.num_frames) if indices is None else indices
    return [videos.number_of(frame) for frame in opened.read(indices)]


@pytest.mark.few_in_ci(24)
@pytest.mark.parametrize(("name", "codec", "b_frames", "ticks"), CASES)
def test_each_frame_is_at_its_time(videos, name, codec, b_frames, ticks):
    blob = videos.encoded(name, codec, ticks=ticks, b_frames=b_frames)
    opened = open_video(blob, LIMITS)
    assert numbers(videos, opened) == list(range(NUM))
    for index in (3, 7, 11):
        assert numbers(videos, opened, [index]) == [index]
    # AVI and ASF say when a packet is read: of the last two frames, which come later, not when.
    num_known = NUM - 2 if name in ("avi", "asf") and b_frames else NUM
    expected = [tick / 10 for tick in ticks[:num_known]]
    assert opened.timeline.times[:num_known] == pytest.approx(expected, abs=0.002)
    assert list(opened.timeline.times) == sorted(opened.timeline.times)


def test_m2ts_and_an_open_group(videos):
    m2ts = {"mpegts_m2ts_mode": "1"}
    blob = videos.encoded("mpegts", "libx264", ticks=EVEN, b_frames=2, container=m2ts)
    assert numbers(videos, open_video(blob, LIMITS)) == list(range(NUM))
    blob = videos.encoded(
        "matroska", "libx264", ticks=EVEN, b_frames=2, gop=4, **{"x264-params": "open-gop=1"}
    )
    opened = open_video(blob, LIMITS)
    for index in range(NUM):
        assert numbers(videos, opened, [index]) == [index]


@pytest.mark.parametrize("b_frames", [0, 2])
@pytest.mark.parametrize("hidden", [3, 5, 10])
def test_an_edit_list_hides_what_comes_before_it(videos, hidden, b_frames):
    """Frames before 0 of an MP4 are decoded, and not shown, wherever the key frames are."""
    whole = videos.encoded("mp4", "libx264", ticks=range(24), b_frames=b_frames)
    buffer, settings = io.BytesIO(), {"use_editlist": "1", "avoid_negative_ts": "disabled"}
    with (
        av.open(io.BytesIO(whole)) as source,
        av.open(buffer, "w", format="mp4", options=settings) as file,
    ):
        stream = file.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(source.streams.video[0]):
            if packet.size:
                shift = int(hidden / 10 / packet.time_base)
                packet.pts, packet.dts = packet.pts - shift, packet.dts - shift
                packet.stream = stream
                file.mux(packet)
    opened = open_video(buffer.getvalue(), LIMITS)
    assert numbers(videos, opened) == list(range(hidden, 24))
    assert numbers(videos, opened, [7]) == [hidden + 7]
    assert not opened.timeline.notes


@pytest.mark.parametrize("name", ["matroska", "mpegts"])
def test_each_frame_of_open_groups_is_found_alone(videos, name):
    params = "log-level=none:keyint=10:min-keyint=10:open-gop=1:bframes=3"
    blob = videos.encoded(name, "libx265", ticks=range(40), **{"x265-params": params})
    opened = open_video(blob, LIMITS)
    for index in (0, 8, 9, 10, 11, 18, 19, 20, 39):
        assert numbers(videos, opened, [index]) == [index]


def test_a_video_that_begins_before_zero_or_late(videos):
    for offset in ("-0.7", "3.3"):
        blob = videos.encoded(
            "mpegts", "libx264", ticks=EVEN, b_frames=2, container={"output_ts_offset": offset}
        )
        opened = open_video(blob, LIMITS)
        assert numbers(videos, opened) == list(range(NUM))
        assert opened.timeline.times == pytest.approx([tick / 10 for tick in EVEN], abs=0.002)


@pytest.mark.parametrize("num_lost", [1, 15, 25, 39])
@pytest.mark.parametrize("name", ["mpegts", "matroska", "mp4"])
@pytest.mark.parametrize("codec", ["libx264", "mpeg4"])
@pytest.mark.few_in_ci(8)
def test_a_recording_that_begins_between_key_frames(videos, name, codec, num_lost):
    """The key frame is number 40; what comes before it and has none cannot be seen."""
    whole = videos.encoded(name, codec, ticks=range(60), gop=40)
    opened = open_video(videos.without_first(whole, num_lost, name), LIMITS)
    line = opened.timeline
    assert numbers(videos, opened) == list(range(40, 60))
    assert numbers(videos, opened, [19]) == [59]
    unseen = (40 - num_lost) / 10
    assert line.start == pytest.approx(unseen, abs=0.002)
    assert line.time_of(10) == pytest.approx(unseen + 1, abs=0.002)
    assert line.times[0] == 0
    [note] = line.notes
    assert f"first {unseen:.2f} s of the video cannot be seen" in note


def test_a_recording_without_any_key_frame_is_an_error(videos):
    whole = videos.encoded("mpegts", "libx264", ticks=range(60), gop=40)
    cut = videos.without_first(whole, 41, "mpegts")
    with pytest.raises(MediaError):
        list(open_video(cut, LIMITS).read([0]))


def test_a_whole_video_has_no_notes(videos):
    blob = videos.encoded("mp4", "libx264", ticks=EVEN, b_frames=2)
    assert not open_video(blob, LIMITS).timeline.notes


def two_tracks(videos, *, default):
    """A small track and a large one, of which only the one in this place is marked as default."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as file:
        streams = [file.add_stream("libx264", rate=10) for _ in range(2)]
        for stream, scale in zip(streams, (1, 2), strict=True):
            stream.width, stream.height, stream.pix_fmt = 128 * scale, 64 * scale, "yuv420p"
            if default is not None:
                stream.disposition = int(stream.index == default)
        for number, stream in product(range(5), streams):
            shown = videos.numbered(number + 100 * stream.index, stream.width, stream.height)
            frame = av.VideoFrame.from_ndarray(shown, format="rgb24")
            frame.pts = number
            file.mux(stream.encode(frame))
        for stream in streams:
            file.mux(stream.encode())
    return buffer.getvalue()


@pytest.mark.parametrize(("default", "width"), [(0, 128), (1, 256)])
def test_of_several_tracks_the_default_one_is_used(videos, default, width):
    opened = open_video(two_tracks(videos, default=default), LIMITS)
    assert opened.timeline.width == width
    assert numbers(videos, opened) == [number + 100 * default for number in range(5)]
    [note] = opened.timeline.notes
    assert note == f"the file has 2 videos in it, of which number {default} is used"


def test_a_cover_of_one_frame_gives_way_to_what_moves(videos):
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as file:
        cover, moving = file.add_stream("mjpeg", rate=10), file.add_stream("libx264", rate=10)
        cover.width, cover.height, cover.pix_fmt = 640, 320, "yuvj420p"
        moving.width, moving.height, moving.pix_fmt = 128, 64, "yuv420p"
        for number in range(6):
            frame = av.VideoFrame.from_ndarray(videos.numbered(number), format="rgb24")
            frame.pts = number
            file.mux(moving.encode(frame))
            if not number:
                large = av.VideoFrame.from_ndarray(videos.numbered(99, 640, 320), format="rgb24")
                large.pts = 0
                file.mux(cover.encode(large))
        file.mux(moving.encode())
        file.mux(cover.encode())
    opened = open_video(buffer.getvalue(), LIMITS)
    assert numbers(videos, opened) == list(range(6))


def animated(videos, name, lengths, **options):
    frames = [Image.fromarray(videos.numbered(number)) for number in range(5)]
    buffer = io.BytesIO()
    frames[0].save(
        buffer, name, save_all=True, append_images=frames[1:], duration=lengths, **options
    )
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("name", "stored", "shown"),
    [
        ("GIF", [0, 10, 20, 30, 100], [100, 100, 20, 30, 100]),
        ("WEBP", [5, 10, 11, 19, 20], [100, 100, 11, 19, 20]),
        ("PNG", [0, 10, 15, 19, 20], [100, 100, 15, 19, 20]),
    ],
)
def test_short_frames_of_animations_last_as_long_as_in_browsers(videos, name, stored, shown):
    """A frame of ten milliseconds or less lasts a tenth of a second."""
    line = open_video(animated(videos, name, stored), LIMITS).timeline
    ends = [*line.times[1:], line.duration]
    found = [round(1000 * (end - begin)) for begin, end in zip(line.times, ends, strict=True)]
    assert found == shown


def test_the_hidden_image_of_a_png_is_no_frame(videos):
    opened = open_video(animated(videos, "PNG", [200] * 4, default_image=True), LIMITS)
    assert numbers(videos, opened) == [1, 2, 3, 4]
    assert opened.timeline.duration == pytest.approx(0.8)
    as_image = decode_image(animated(videos, "PNG", [200] * 4, default_image=True)).image
    assert videos.number_of(as_image) == 1


def test_an_avif_sequence_is_a_video_and_a_still_one_is_not(videos):
    opened = open_video(animated(videos, "AVIF", [40, 40, 80, 40, 40]), LIMITS)
    assert numbers(videos, opened) == list(range(5))
    assert opened.timeline.times == pytest.approx([0, 0.04, 0.08, 0.16, 0.2])
    buffer = io.BytesIO()
    Image.fromarray(videos.numbered(3)).save(buffer, "AVIF")
    with pytest.raises(UnsupportedMediaError, match="give it as an image"):
        open_video(buffer.getvalue(), LIMITS)


@pytest.mark.parametrize("at", [0, 200])
@pytest.mark.parametrize(
    ("container", "codec", "b_frames"),
    [
        ("mpegts", "libx264", 0),
        ("mpegts", "libx264", 2),
        ("mpeg", "mpeg2video", 2),
        ("matroska", "libx264", 2),
        ("webm", "libvpx-vp9", 0),
    ],
)
def test_joined_recordings_follow_one_another(videos, container, codec, b_frames, at):
    """Two recordings in one file, whose second clock begins at 0 again: each frame is shown."""
    rate = 25 if container == "mpeg" else 10
    own = {"rate": rate, "b_frames": b_frames}
    first = videos.encoded(container, codec, ticks=range(at, at + NUM), **own)
    blob = first + videos.encoded(container, codec, ticks=EVEN, **own)
    with av.open(io.BytesIO(blob)) as file:
        frames = list(file.decode(video=0))
    expected = [videos.number_of(frame.to_image()) for frame in frames]
    assert expected == [*range(NUM), *range(NUM)]
    jump = frames[NUM].time - frames[NUM - 1].time - 1 / rate
    opened = open_video(blob, LIMITS)
    assert numbers(videos, opened) == expected
    for index in (3, NUM + 1, 2 * NUM - 1):
        assert numbers(videos, opened, [index]) == [expected[index]]
    even = [place / rate for place in range(2 * NUM)]
    assert opened.timeline.times == pytest.approx(even, abs=0.002)
    assert opened.timeline.start == 0
    [note] = opened.timeline.notes
    assert f"jumps by {jump:.2f} s after {NUM / rate:.2f} s" in note


def test_a_clock_that_leaps_is_a_new_one_as_for_sound(videos):
    first = videos.encoded("mpegts", "libx264", ticks=EVEN)
    blob = first + videos.encoded("mpegts", "libx264", ticks=range(5000, 5000 + NUM))
    opened = open_video(blob, LIMITS)
    assert numbers(videos, opened) == [*range(NUM), *range(NUM)]
    assert opened.timeline.duration == pytest.approx(2.4)
    assert "jumps by 498.80 s" in opened.timeline.notes[0]
