"""What a file is, its first bytes say; the processors read them alike."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mmdeploy_llm.data.files.kinds import HEIF_HINT, Media, NotMedia, kind_of, read_kinds
from mmdeploy_llm.media.image.files import sniff as sniff_image
from mmdeploy_llm.media.video.container import sniff as sniff_video
from mmdeploy_llm.values.first_bytes import HEAD, format_of


def made(form, **options):
    file = io.BytesIO()
    Image.new("RGB", (9, 7), "red").save(file, form, **options)
    return file.getvalue()


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"])
def test_every_image_that_pillow_writes_is_one(form):
    head = made(form)[:HEAD]
    assert format_of(head).kind == "image"
    assert sniff_image(head[:16]) == form


@pytest.mark.parametrize(
    ("head", "name"),
    [
        (b"\0\0\0\x1cftypavif\0\0\0\0mif1miaf" + bytes(8), "AVIF"),
        (b"\0\0\0\x20ftypmif1\0\0\0\0mif1avifmiaf" + bytes(8), "AVIF"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(8), "HEIF"),
        (b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic" + bytes(8), "HEIF"),
        (b"\0\0\0\x18ftypmsf1\0\0\0\0msf1hevc" + bytes(8), "HEIF"),
        (b"\0\0\0\x08ftyp", "MP4 or QuickTime"),
        (b"\xff\xff\xff\xffftypqt  " + bytes(90), "MP4 or QuickTime"),
        (b"\0\0\0\x14ftypcrx \0\0\0\x01crx ", "a raw photo of a camera"),
        (b"\xef\xbb\xbf  <!DOCTYPE HTML><p>", "an HTML page"),
        (b"<?xml version='1.0'?><feed/>", "an XML file"),
        (b"<?xml version='1.0'?><!-- drawn --><svg/>", "an SVG drawing"),
        (b"OggS" + bytes(24) + b"OpusHead", "a sound file"),
        (b"OggS" + bytes(24) + b"\x80theora", "Ogg"),
        (b"RIFF\x24\0\0\0WAVEfmt ", "a sound file"),
        (b"\xff\xfb\x90\x44" + bytes(30), "a sound file"),
        (b"", "an empty file"),
        (b"\0", None),
        (b"BM is not all that a bitmap begins with", None),
        (b"BM" + bytes(30), None),
        (b"G" * HEAD, None),
        (b"it free moov mdat", None),
        (b"RIFF", None),
    ],
)
def test_formats_are_told_apart(head, name):
    found = format_of(head)
    assert (found and found.name) == name
    if name in ("AVIF", "HEIF"):
        assert sniff_image(head) == name


@pytest.mark.full
@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_no_bytes_break_it(head):
    format_of(head)


@given(st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=600))
def test_a_text_is_no_medium(text):
    found = format_of(text.encode()[:HEAD])
    assert found is None or found.kind == "other" or text.startswith(("GIF8", "\x00"))


def test_packets_of_two_sizes_are_a_transport_stream():
    for size, at in ((188, 0), (192, 4)):
        packet = bytearray(b"\x01" * size)
        packet[at] = 0x47
        head = bytes(packet * 3)[:HEAD]
        assert format_of(head).name == "MPEG transport stream"
        assert sniff_video(head) == "mpegts"


def test_names_count_only_where_bytes_say_nothing(tmp_path):
    wanted = {
        "a.jpg": (made("PNG"), Media(kind="image")),
        "b": (made("JPEG"), Media(kind="image")),
        "c.nef": (made("TIFF"), "a raw photo of a camera"),
        "d.nef": (made("JPEG"), Media(kind="image")),
        "e.png": (b"\x01\x02", Media(kind="image")),
        "f.mp4": (b"", Media(kind="video")),
        "g": (b"\x01\x02", "it is no image, video or audio"),
        "h.txt": (b"", "an empty file"),
        "i.mp4": (made("GIF"), Media(kind="image")),
    }
    for name, (data, _) in wanted.items():
        (tmp_path / name).write_bytes(data)
    for name, (_, kind) in wanted.items():
        found = kind_of(str(tmp_path / name), has_heif=True)
        if isinstance(kind, Media):
            assert found == kind, name
        else:
            assert kind in found.reason, name


def test_heif_is_skipped_with_what_reads_it(tmp_path):
    path = tmp_path / "a.heic"
    path.write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic")
    assert kind_of(str(path), has_heif=False) == NotMedia(
        label=".heic", reason="a HEIF image is not read", hint=HEIF_HINT
    )


def test_many_files_come_in_their_order(tmp_path):
    paths = []
    for number in range(700):
        path = tmp_path / f"{number}.bin"
        path.write_bytes(made("GIF") if number % 3 else b"\x01")
        paths.append(str(path))
    kinds = [isinstance(found, Media) for found in read_kinds(paths)]
    assert kinds == [number % 3 != 0 for number in range(700)]


@pytest.mark.parametrize("data", [b"GIF89a", b"GIF89a" + b"\x80" * 40, b"\x89PNG\r\n\x1a\n\0\0"])
def test_a_cut_animation_is_an_image(tmp_path, data):
    path = tmp_path / "a.gif"
    path.write_bytes(data)
    assert kind_of(str(path), has_heif=True) == Media(kind="image")


SKETCH = {
    "kind": "sketch",
    "suffixes": (".sketch", ".png2"),
    "first_bytes": (b"SKETCH1", b"\x89PNG\r\n\x1a\nsketch"),
}
NOTES = {"kind": "notes", "suffixes": (".notes",)}
VOLUMES = {"kind": "volume", "suffixes": (".nii.gz", ".ome.png")}


@pytest.mark.parametrize(
    ("name", "data", "kind"),
    [
        ("a.sketch", b"SKETCH1 and more", "sketch"),
        ("a", b"SKETCH1", "sketch"),
        ("a.jpg", b"SKETCH1", "sketch"),  # bytes win over names, as those of pictures do
        ("a.sketch", made("PNG"), "image"),
        ("a.PNG2", b"\x89PNG\r\n\x1a\nsketch", "sketch"),  # both say so
        ("a.png", b"\x89PNG\r\n\x1a\nsketch", "image"),
        ("a.SKETCH", b"", "sketch"),  # its own error tells more
        ("a.sketch", b"<html>", "HTML page named .sketch"),
        ("a.notes", b"<html>", "notes"),  # a kind without first bytes goes by its name
        ("a.notes", b"RIFF\x24\0\0\0WAVEfmt ", "audio"),
        ("a.wav", b"\xff\xd8\xff", "image"),
        ("a.txt", b"caffeine is no sound", ".txt"),
        ("a.txt", "a text".encode("utf-16"), ".txt"),
        ("a.mid", b"MThd\0\0", ".mid"),
        ("a.ogg", b"OggS" + bytes(24) + b"\x80theora", "video"),
        ("a.pdf", b"%PDF-1.7", ".pdf"),
        ("a.nii.GZ", b"\x1f\x8b\x08", "volume"),  # a longer suffix says more than first bytes
        ("a.gz", b"\x1f\x8b\x08", ".gz"),
        ("a.ome.png", made("PNG"), "volume"),
    ],
)
def test_kinds_of_plugins_are_found_as_images_are(tmp_path, kinds_of, name, data, kind):
    (tmp_path / name).write_bytes(data)
    found = kind_of(str(tmp_path / name), False, kinds_of(SKETCH, NOTES, VOLUMES))
    assert (found.kind if isinstance(found, Media) else found.label) == kind


@pytest.mark.parametrize(("first_bytes", "kind"), [((), "image"), ((b"\xff\xd8\xff",), "mine")])
def test_a_plugin_that_claims_a_suffix_of_pictures_leaves_them_what_they_are(
    tmp_path, kinds_of, first_bytes, kind
):
    """Unless it claims their first bytes too."""
    (tmp_path / "a.jpg").write_bytes(made("JPEG"))
    own = {"kind": "mine", "suffixes": (".jpg",), "first_bytes": first_bytes}
    assert kind_of(str(tmp_path / "a.jpg"), False, kinds_of(own)).kind == kind
    (tmp_path / "b.png").write_bytes(made("JPEG"))
    assert kind_of(str(tmp_path / "b.png"), False, kinds_of(own)).kind == "image"
