"""One table says how files begin: what finds media, decodes and stores them agrees."""

import io

import pytest

from mmdeploy_llm.data.files.kinds import kind_of_bytes
from mmdeploy_llm.data.records.item import Item
from mmdeploy_llm.data.records.media import first_media
from mmdeploy_llm.data.rows.names import BUILT_IN_KINDS
from mmdeploy_llm.media.image.files import sniff as sniff_image
from mmdeploy_llm.media.sound.headers.formats import sniff as sniff_sound
from mmdeploy_llm.media.video.container import sniff as sniff_video
from mmdeploy_llm.messages import MediaItem
from mmdeploy_llm.values.first_bytes import FORMATS, HEAD, format_of
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.prompt import PromptParts


def boxes(major, *others):
    """The first box of a file, with its brands."""
    brands = b"".join(other.encode() for other in others)
    size = (16 + len(brands)).to_bytes(4, "big")
    return size + b"ftyp" + major.encode() + bytes(4) + brands + bytes(32)


def stored_as(head, name=None):
    """The suffix under which a sample of a tar holds these bytes, of a file of this name."""
    source = head if name is None else str(name)
    prompt = PromptParts(media=(MediaItem(kind="image", source=source, options={}),))
    with first_media(Item(line=1, id=1, prompt=prompt, params=SamplingParams(), media=())) as blob:
        return blob.suffix


# Heads on which the tables that were one for each reader disagreed, and what their formats say.
@pytest.mark.parametrize(
    ("head", "kind", "image", "container", "suffix"),
    [
        # ISO/IEC 23008-12: all these brands are of images, not of an MP4.
        (boxes("heis"), "image", "HEIF", "mp4", "heic"),
        (boxes("hevx"), "image", "HEIF", "mp4", "heic"),
        (boxes("msf1"), "image", "HEIF", "mp4", "heif"),
        (boxes("mif2"), "image", "HEIF", "mp4", "heif"),
        (boxes("msf1", "avis"), "image", "AVIF", "mp4", "avif"),
        # The brands of books and of protected music, registered as those of sounds.
        (boxes("M4B "), "audio", None, "mp4", "m4a"),
        (boxes("M4P "), "audio", None, "mp4", "m4a"),
        # Photos of a camera are no TIFF images and no videos.
        (b"II*\0\x10\0\0\0CR\2\0" + bytes(32), None, "TIFF", None, "cr2"),
        (boxes("crx "), None, None, "mp4", "cr3"),
        # BigTIFF.
        (b"II+\0\x08\0\0\0" + bytes(32), "image", "TIFF", None, "tiff"),
        # A GIF has one of two versions.
        (b"GIF88a" + bytes(32), None, None, None, "bin"),
        # A bitmap has a second header of a known size.
        (b"BM" + bytes(12) + b"\x28" + bytes(32), "image", "BMP", None, "bmp"),
        (b"BM" + bytes(48), None, None, None, "bin"),
        # EBU Tech 3306 and RIFX: sounds, large or of the other byte order.
        (b"RF64\xff\xff\xff\xffWAVEds64" + bytes(32), "audio", None, "wav", "wav"),
        (b"BW64\xff\xff\xff\xffWAVEds64" + bytes(32), "audio", None, "wav", "wav"),
        (b"RIFX\0\0\0\x24WAVEfmt " + bytes(32), "audio", None, "wav", "wav"),
        (b"RF64\xff\xff\xff\xffWEBP" + bytes(32), None, None, None, "bin"),
        # Only version 1 of FLV and of CAF is specified, and the offset in AU is small.
        (b"FLV\x05" + bytes(32), None, None, None, "bin"),
        (b"caff\0\2\0\0" + bytes(32), None, None, None, "bin"),
        (b"caff\0\1\0\0" + bytes(32), "audio", None, "caf", "caf"),
        (b".snd\0\0\0\x18" + bytes(32), "audio", None, "au", "au"),
        # Frames of sound; the version that is reserved is none.
        (b"\xff\xf1\x50\x80" + bytes(32), "audio", None, "aac", "aac"),
        (b"\xff\xfb\x90\x44" + bytes(32), "audio", None, "mp3", "mp3"),
        (b"\xff\xeb\x90\x44" + bytes(32), None, None, None, "bin"),
        # A frame of layer 1 with a sum begins as a text in UTF-16 does.
        (b"\xff\xfe\x90\x44" + bytes(range(0xD0, 0xE0)) * 4, "audio", None, "mp3", "mp1"),
        ("a text".encode("utf-16"), None, None, None, "bin"),
        # A stream is told by its packets, and Ogg by its first one.
        (b"OggS\0\2" + bytes(22) + b"OpusHead", "audio", None, "ogg", "opus"),
        (b"OggS\0\2" + bytes(22) + b"\x80theora", "video", None, "ogg", "ogv"),
    ],
)
def test_all_readers_say_the_same(head, kind, image, container, suffix):
    assert kind_of_bytes(head, BUILT_IN_KINDS) == kind
    assert sniff_image(head) == image
    assert sniff_sound(head) == container
    assert sniff_video(head) == (container if container in ("mp4", "ogg") else None)
    assert stored_as(head) == suffix


@pytest.mark.parametrize(
    ("name", "head", "suffix"),
    [
        ("a.jpeg", b"\xff\xd8\xff\xe0", "jpg"),
        ("a.mkv", b"\x1a\x45\xdf\xa3", "mkv"),
        ("a.m4b", boxes("M4B "), "m4b"),
        ("a.png", b"\x1a\x45\xdf\xa3", "webm"),
        ("a.xyz", b"\1\2\3", "xyz"),
        ("a.json", b"\1\2\3", "bin"),
    ],
)
def test_a_name_may_say_more_than_first_bytes(tmp_path, name, head, suffix):
    (tmp_path / name).write_bytes(head)
    assert stored_as(head, tmp_path / name) == suffix


@pytest.mark.one_is_quick
@pytest.mark.parametrize("row", FORMATS, ids=lambda row: row.name)
def test_every_row_is_found(row):
    """No earlier row hides what another begins with."""
    for begin in row.begins if row.check is None else ():
        offset, own = begin if isinstance(begin, tuple) else (0, begin)
        head = bytearray(offset + len(own) + 8)
        head[: len(row.outer[0]) if row.outer else 0] = row.outer[0] if row.outer else b""
        head[offset : offset + len(own)] = own
        assert format_of(bytes(head[:HEAD])) is row
    for text in row.texts:
        assert format_of(b"\xef\xbb\xbf \n" + text.upper() + b" and more").name == row.name


def test_files_that_pillow_writes_are_told(tmp_path):
    from PIL import Image

    for form, suffix in (("PNG", "png"), ("JPEG", "jpg"), ("BMP", "bmp"), ("WEBP", "webp")):
        file = io.BytesIO()
        Image.new("RGB", (9, 7), "red").save(file, form)
        assert stored_as(file.getvalue()) == suffix
