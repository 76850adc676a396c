"""Writes a folder of 300 small files of all kinds that people have among their pictures, and says
what a run must make of each."""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

READ, FAILED, SKIPPED = "read", "failed", "skipped"


@dataclass
class Messy:
    """The folder. expected: what becomes of each path beneath it; that of a folder which is not
    read ends in "/". labels: the kinds of what is skipped. sounds: damaged ones, which a model
    without ears skips."""

    root: Path
    expected: dict[str, str] = field(default_factory=dict)
    labels: Counter[str] = field(default_factory=Counter)
    videos: set[str] = field(default_factory=set)
    sounds: set[str] = field(default_factory=set)
    number: int = 0

    def add(self, name: str, data: bytes, becomes: str = READ, label: str = "") -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        self.note(name, becomes, label)

    def note(self, name: str, becomes: str, label: str = "") -> None:
        assert name not in self.expected, name
        self.expected[name] = becomes
        if becomes == SKIPPED:
            assert label, name
            self.labels[label] += 1

    def picture(self, form: str = "PNG", **options) -> bytes:
        """Returns a picture that no other one equals."""
        self.number += 1
        colour = (self.number * 37 % 256, self.number * 101 % 256, self.number % 256)
        image = Image.new("RGB", (24, 16), colour)
        file = io.BytesIO()
        image.save(file, form, **options)
        return file.getvalue()

    def names(self, becomes: str) -> set[str]:
        return {name for name, found in self.expected.items() if found == becomes}


def clip(form: str, codec: str, **options) -> bytes:
    """Returns a video of a few small frames."""
    file = io.BytesIO()
    with av.open(file, "w", format=form, options=options) as container:
        stream = container.add_stream(codec, rate=25)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        for number in range(4):
            pixels = np.full((32, 32, 3), number * 40, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, "rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def frames(form: str) -> bytes:
    """Returns an animation of three frames."""
    file = io.BytesIO()
    images = [Image.new("RGB", (16, 16), (0, 0, 90 * number)) for number in range(3)]
    images[0].save(file, form, save_all=True, append_images=images[1:], duration=100)
    return file.getvalue()


def write_messy(root: Path, *, has_heif: bool) -> Messy:
    """Writes the corpus."""
    messy = Messy(root)
    _plain(messy)
    _misnamed(messy)
    _heif(messy, has_heif)
    _videos(messy)
    _other_files(messy)
    _broken(messy)
    _junk(messy)
    _names_and_links(messy)
    return messy


def _plain(messy: Messy) -> None:
    for number in range(75):
        messy.add(f"holiday/{number}.jpg", messy.picture("JPEG"))
        messy.add(f"holiday/{number}.txt", b"a caption", SKIPPED, ".txt")
    for suffix, form in (("png", "PNG"), ("bmp", "BMP"), ("tiff", "TIFF"), ("webp", "WEBP")):
        for number in range(8):
            messy.add(f"scans/{number}.{suffix}", messy.picture(form))
    messy.add("scans/UPPER.JPG", messy.picture("JPEG"))
    for suffix, form in (("gif", "GIF"), ("webp", "WEBP"), ("png", "PNG"), ("apng", "PNG")):
        messy.add(f"moving/frames.{suffix}", frames(form))
    messy.add("moving/still.gif", messy.picture("GIF"))


def _misnamed(messy: Messy) -> None:
    for number in range(6):
        messy.add(f"misnamed/png{number}.jpg", messy.picture("PNG"))
        messy.add(f"misnamed/jpeg{number}", messy.picture("JPEG"))
        page = f"<!DOCTYPE html><title>{404 + number}</title>".encode()
        messy.add(f"misnamed/page{number}.jpg", page, SKIPPED, "HTML page named .jpg")
    messy.add("misnamed/photo.dat", messy.picture("WEBP"))
    messy.add("misnamed/camera.JPG.bak", messy.picture("JPEG"))
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
    messy.add("misnamed/lfs.png", pointer, SKIPPED, "pointer of Git LFS named .png")
    messy.add("misnamed/report.png", b"%PDF-1.7\n%\xe2\xe3", FAILED)  # a document, and cut
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("a.txt", "a")
    messy.add("misnamed/all.jpeg", archive.getvalue(), SKIPPED, "ZIP archive named .jpeg")


def _heif(messy: Messy, has_heif: bool) -> None:
    pillow_heif = pytest.importorskip("pillow_heif")

    for name in ("IMG_1.HEIC", "IMG_2.heif", "no_suffix_heif"):
        file = io.BytesIO()
        messy.number += 1
        image = pillow_heif.from_pillow(Image.new("RGB", (24, 16), (9, messy.number % 256, 3)))
        image.save(file, quality=50)
        label = os.path.splitext(name)[1].lower() or "HEIF"
        messy.add(f"phone/{name}", file.getvalue(), READ if has_heif else SKIPPED, label)


def _videos(messy: Messy) -> None:
    clips = {
        "a.mp4": clip("mp4", "mpeg4"),
        "b.mov": clip("mp4", "mpeg4"),
        "c.mkv": clip("matroska", "mpeg4"),
        "d.avi": clip("avi", "mpeg4"),
        "e.wmv": clip("asf", "wmv2"),
        "f.flv": clip("flv", "flv1"),
        "g.mpg": clip("mpeg", "mpeg1video"),
        "h.m2ts": clip("mpegts", "mpeg2video", mpegts_m2ts_mode="1"),
        "i.jpg": clip("mp4", "mpeg4"),
        "clip_without_suffix": clip("matroska", "mpeg4"),
    }
    for name, data in clips.items():
        messy.add(f"clips/{name}", data)
        messy.videos.add(f"clips/{name}")


def _other_files(messy: Messy) -> None:
    svg = b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"/>'
    for number in range(9):
        messy.add(f"web/{number}.svg", svg, SKIPPED, ".svg")
    raw = b"II*\0\x08\0\0\0" + bytes(40)
    for name, data in (
        ("web/song.mp3", b"ID3\x03" + bytes(20)),
        ("web/sound.m4a", b"\0\0\0\x1cftypM4A \0\0\0\0" + bytes(20)),
    ):
        messy.add(name, data, FAILED)
        messy.sounds.add(name)
    for name, data, label in (
        ("web/index.html", b"<html></html>", ".html"),
        ("web/data.json", json.dumps({"a": 1}).encode(), ".json"),
        ("web/BMW.txt", b"BMW is a car. " * 40, ".txt"),
        ("web/Go.md", b"Go go go " * 100, ".md"),
        ("web/README", b"read me", "without a suffix"),
        ("camera/DSC1.NEF", raw, ".nef"),
        ("camera/IMG1.CR2", b"II*\0\x10\0\0\0CR\x02\0" + bytes(40), ".cr2"),
        ("camera/IMG2.CR3", b"\0\0\0\x18ftypcrx " + bytes(40), ".cr3"),
        ("web/design.psd", b"8BPS\0\x01" + bytes(20), ".psd"),
        ("web/new.jxl", b"\0\0\0\x0cJXL \r\n\x87\n" + bytes(20), ".jxl"),
        ("web/favicon.ico", b"\0\0\x01\0\x01\0" + bytes(20), ".ico"),
        ("web/empty.txt", b"", ".txt"),
        ("web/part.tar.gz", b"\x1f\x8b\x08\0" + bytes(20), ".gz"),
    ):
        messy.add(name, data, SKIPPED, label)


def _broken(messy: Messy) -> None:
    """Pictures that nothing can read: they fail, each by its name."""
    whole = messy.picture("JPEG")
    for number in range(5):
        messy.add(f"broken/cut{number}.jpg", whole[: 150 + number], FAILED)
    messy.add("broken/empty.jpg", b"", FAILED)
    messy.add("broken/noise.png", bytes(range(256)) * 3, FAILED)
    messy.add("broken/text.png", b"this is no picture", FAILED)
    messy.add("broken/cut.mp4", clip("mp4", "mpeg4")[:60], FAILED)
    huge = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack(">IIBBBBB", 2**30, 2**30, 8, 2, 0, 0, 0)
    messy.add("broken/huge.png", huge + bytes(4), FAILED)


def _junk(messy: Messy) -> None:
    for number in range(12):
        thumb = messy.picture("JPEG")
        path = messy.root / f"holiday/@eaDir/{number}.jpg/SYNOPHOTO_THUMB_XL.jpg"
        path.parent.mkdir(parents=True)
        path.write_bytes(thumb)
    messy.note("holiday/@eaDir/", SKIPPED, "@eaDir")
    for name, label in (
        ("holiday/Thumbs.db", "Thumbs.db"),
        ("scans/Thumbs.db", "Thumbs.db"),
        ("holiday/desktop.ini", "desktop.ini"),
        ("holiday/.DS_Store", ".DS_Store"),
        ("holiday/._1.jpg", "._*"),
        ("holiday/._2.jpg", "._*"),
        ("holiday/.hidden.jpg", "hidden file"),
    ):
        messy.add(name, messy.picture("JPEG"), SKIPPED, label)
    for folder, label in (
        ("__MACOSX", "__MACOSX"),
        (".git", ".git"),
        ("#recycle", "#recycle"),
        ("$RECYCLE.BIN", "$RECYCLE.BIN"),
        (".cache", "hidden folder"),
    ):
        (messy.root / folder).mkdir()
        (messy.root / folder / "inner.jpg").write_bytes(messy.picture("JPEG"))
        messy.note(f"{folder}/", SKIPPED, label)


def _names_and_links(messy: Messy) -> None:
    for name in ("ümläut.png", "a b c.png", "50%.png", "new\nline.png", "[x].png", "-p.png"):
        messy.add(f"names/{name}", messy.picture())
    messy.add(f"names/{os.fsdecode(bytes([0xFF, 0xFE]))}.png", messy.picture())
    os.mkfifo(messy.root / "names/pipe.jpg")
    messy.note("names/pipe.jpg", SKIPPED, "special file")
    (messy.root / "names/null.png").symlink_to("/dev/null")
    messy.note("names/null.png", SKIPPED, "special file")
    (messy.root / "names/nowhere.png").symlink_to("missing.png")
    messy.note("names/nowhere.png", SKIPPED, "broken link")
    (messy.root / "names/loop.png").symlink_to("loop.png")
    messy.note("names/loop.png", SKIPPED, "unreadable")
    (messy.root / "names/up").symlink_to(messy.root)
    messy.note("names/up/", SKIPPED, "linked folder")
    (messy.root / "names/linked.png").symlink_to(messy.root / "scans/0.png")
    messy.note("names/linked.png", READ)
