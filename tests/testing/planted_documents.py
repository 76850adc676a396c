"""Plugins for media as strangers write them: each is correct, and a subclass has one bug."""

import io
import os
import struct
import tarfile
import tempfile
import threading
import urllib.request
import wave
import xml.sax
import xml.sax.handler
from hashlib import blake2b
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import torch
from PIL import Image, ImageDraw

from mmdeploy_llm.errors import MediaError, MediaLimitError, UnsupportedMediaError
from mmdeploy_llm.hooks import MediaInput, MediaProcessor, MediaSplitter, SplitPart
from mmdeploy_llm.media import Drawing, read_beneath


def digest_of(*values):
    return blake2b(repr(values).encode(), digest_size=20).hexdigest()


def checked(source, options, known, limits):
    """Returns the bytes of an item, whose options are known."""
    if not isinstance(source, bytes):
        raise UnsupportedMediaError(f"bytes are wanted, got {type(source).__name__}")
    if set(options) - known:
        raise MediaError(f"no option of {sorted(options)}; known: {sorted(known)}")
    limits.check_bytes(len(source), "the item")
    return source


def check_pixels(width, height, limits):
    if width * height > limits.max_pixels:
        raise MediaLimitError(f"{width} x {height} pixels, {limits.max_pixels} are allowed")


# Scans: b"SCAN", width and height of 2 bytes, a byte for each pixel; a file of tables gives their
# values, which all items of an engine read.
class Scans(MediaProcessor):
    kind, token, markers = "scan", "<scan>", ("<scan>",)

    def __init__(self, checkpoint, options):
        self.options = dict(options)
        self.tables = (checkpoint.folder / "tables").open("rb")
        self.lock = threading.Lock()

    def decode(self, source, limits):
        blob = checked(source, {}, set(), limits)
        if len(blob) < 8 or not blob.startswith(b"SCAN"):
            raise MediaError("no scan")
        width, height = struct.unpack("<HH", blob[4:8])
        self.check(width, height, limits)
        if not 0 < width * height == len(blob) - 8:
            raise MediaError("the scan is cut off")
        return np.frombuffer(blob, np.uint8, offset=8).reshape(height, width)

    def check(self, width, height, limits):
        check_pixels(width, height, limits)

    def process(self, item, options):
        if set(options) - {"gamma"}:
            raise MediaError("known: gamma")
        gamma = options.get("gamma", 1.0)
        values = (self.table(int(item[0, 0]))[item] / 255) ** gamma
        if self.options.get("invert"):
            values = 1 - values
        return MediaInput(
            kind=self.kind,
            tensors={"pixels": torch.from_numpy(values.astype(np.float32))},
            num_tokens=self.count_tokens(item, options),
            key=self.key(item, gamma),
        )

    def table(self, number):
        with self.lock:
            self.tables.seek(256 * number)
            return np.frombuffer(self.tables.read(256), np.uint8)

    def key(self, item, gamma):
        return digest_of(item.shape, gamma, bool(self.options.get("invert")), item.tobytes())

    def count_tokens(self, item, options):
        return max(1, item.size // 64)

    def close(self):
        self.tables.close()


class ScansOfAnySize(Scans):
    def check(self, width, height, limits):
        pass


class ScansOfAFrameOfItsOwn(Scans):
    """Has a limit of its own, and not that of the engine."""

    def check(self, width, height, limits):
        if width * height > 2**26:
            raise MediaLimitError("too large")


class UnlockedScans(Scans):
    def table(self, number):
        self.tables.seek(256 * number)
        return np.frombuffer(self.tables.read(256), np.uint8)


class LineLockedScans(Scans):
    """Locks each call, not both together."""

    def table(self, number):
        with self.lock:
            self.tables.seek(256 * number)
        with self.lock:
            return np.frombuffer(self.tables.read(256), np.uint8)


class WholeGammas(Scans):
    def key(self, item, gamma):
        return super().key(item, int(gamma))


class InvertForgotten(Scans):
    def key(self, item, gamma):
        return digest_of(item.shape, gamma, item.tobytes())


class GammaForgotten(Scans):
    def key(self, item, gamma):
        return digest_of(item.shape, self.options, item.tobytes())


def scan(height, width, seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width), dtype=np.uint8)
    return b"SCAN" + struct.pack("<HH", width, height) + pixels.tobytes()


# Collages: a text of colours, and of names of pictures, which are left out.
class Collages(MediaProcessor):
    kind, token, markers = "collage", "<collage>", ("<collage>",)

    def __init__(self, checkpoint, options):
        pass

    def decode(self, source, limits):
        blob = checked(source, {}, set(), limits)
        head, *words = blob.decode("latin-1").split(" ")
        if head != "COLLAGE" or not words:
            raise MediaError("no collage")
        return [self.tile(word, limits) for word in words], digest_of(blob)

    def tile(self, word, limits):
        """Returns a few pixels."""
        if "." in word:
            word = self.colour(word, limits)
        try:
            return np.asarray(Image.new("RGB", (4, 4), word))
        except ValueError as error:
            raise MediaError(str(error)) from None

    def colour(self, name, limits):
        return "white"

    def process(self, item, options):
        if options:
            raise MediaError("a collage has no options")
        values = torch.from_numpy(np.stack(item[0]).astype(np.float32))
        return MediaInput(kind=self.kind, tensors={"tiles": values}, num_tokens=1, key=item[1])

    def count_tokens(self, item, options):
        return 1


class CollagesWithFiles(Collages):
    def colour(self, name, limits):
        try:
            with Image.open(unquote(name.removeprefix("file://"))) as image:
                return image.convert("RGB").getpixel((0, 0))
        except (OSError, ValueError):
            return "white"


class CollagesBesideTheRoot(CollagesWithFiles):
    """Compares the beginnings of texts."""

    def colour(self, name, limits):
        is_inside = os.path.abspath(name).startswith(str(limits.allowed_root or "/"))
        return super().colour(name, limits) if is_inside else "white"


# Drawings in SVG: each <g> of the file is a page. Rectangles, texts, and pictures in data: URLs.
class Vectors(MediaSplitter):
    kind, markers, known = "svg", ("<svg>",), {"grey"}

    def __init__(self, checkpoint, options):
        self.options = dict(options)

    def split(self, source, options, limits):
        blob = checked(source, options, self.known, limits)
        reader = Reader()
        parser = xml.sax.make_parser()
        self.set(parser)
        parser.setContentHandler(reader)
        try:
            parser.parse(io.BytesIO(blob))
        except (xml.sax.SAXException, OSError, ValueError) as error:
            raise MediaError(f"no SVG: {error}") from None
        if not reader.pages:
            raise MediaError("no pages")
        options = {**self.options, **options}
        pages = [
            Page(page, self.picture, options, self.digest(blob, number, options))
            for number, page in enumerate(reader.pages)
        ]
        return [SplitPart(source=page, label=f"page {n}") for n, page in enumerate(pages, 1)]

    def set(self, parser):
        parser.setFeature(xml.sax.handler.feature_external_ges, False)

    def digest(self, blob, number, options):
        return digest_of(blob, number, sorted(options.items()))

    def picture(self, href, limits):
        """Returns the bytes of a picture in a drawing; None for one that is elsewhere."""
        if not href.startswith("data:"):
            return None
        with urllib.request.urlopen(href) as answer:
            return answer.read(limits.max_bytes)


class Reader(xml.sax.handler.ContentHandler):
    """Collects what is drawn on each page."""

    def __init__(self):
        super().__init__()
        self.pages, self.size = [], (64, 48)

    def startElement(self, name, attrs):
        own = dict(attrs.items())
        if name == "svg":
            self.size = int(own.get("width", 64)), int(own.get("height", 48))
            if not 0 < min(self.size) <= max(self.size) < 10_000:
                raise ValueError("a size that cannot be")
        if name == "g" or not self.pages:
            self.pages.append((self.size, []))
        self.pages[-1][1].append([name, own, ""])

    def characters(self, content):
        if self.pages:
            self.pages[-1][1][-1][2] += content


class Page(Drawing):
    def __init__(self, page, picture, options, digest):
        self.size, self.shapes = page
        self.picture, self.options, self.digest = picture, options, digest

    def draw(self, size, limits):
        image = Image.new("RGB", size, "white")
        pen = ImageDraw.Draw(image)
        for number, (name, own, text) in enumerate(self.shapes):
            href = own.get("href") or own.get("xlink:href")
            if name == "image" and href and (blob := self.picture(href, limits)):
                with Image.open(io.BytesIO(blob)) as picture:
                    image.paste(picture.convert("RGB").resize(size))
            elif name == "rect":
                place = 4 * number
                pen.rectangle((place, place, place + 9, place + 9), fill=own.get("fill", "red"))
            elif name == "text":
                pen.text((1, 1), text[:9], fill="black")
        if self.options.get("grey"):
            image = image.convert("L").convert("RGB")
        return np.asarray(image)


class VectorsWithFiles(Vectors):
    """Opens what a picture names."""

    def picture(self, href, limits):
        try:
            return super().picture(href, limits) or Path(href).read_bytes()
        except OSError as error:
            raise MediaError(str(error)) from error


class VectorsWithURLs(Vectors):
    """Leaves it to urllib what a name is."""

    def picture(self, href, limits):
        try:
            with urllib.request.urlopen(href, timeout=2) as answer:
                return answer.read(limits.max_bytes)
        except (OSError, ValueError):
            return None


class VectorsWithEntities(Vectors):
    def set(self, parser):
        parser.setFeature(xml.sax.handler.feature_external_ges, True)


class NoPageInTheDigest(Vectors):
    def digest(self, blob, number, options):
        return digest_of(blob, sorted(options.items()))


class OptionsOfTheEngineForgotten(Vectors):
    def digest(self, blob, number, options):
        own = {name: value for name, value in options.items() if name not in self.options}
        return digest_of(blob, number, sorted(own.items()))


class GreyForgotten(Vectors):
    def digest(self, blob, number, options):
        return digest_of(blob, number)


class HeadInTheDigest(Vectors):
    def digest(self, blob, number, options):
        return digest_of(blob[:40], number, sorted(options.items()))


class GreyIgnored(Vectors):
    def split(self, source, options, limits):
        checked(source, options, self.known, limits)
        return super().split(source, {}, limits)


def svg(*colours):
    pages = "".join(f'<g><rect fill="{own}"/><text>{own}</text></g>' for own in colours)
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="64" height="48">{pages}</svg>'.encode()


# Frames of a GIF: loaded pictures, each made of the one file when it is wanted.
class Frames(MediaSplitter):
    kind, markers = "flip", ("<flip>",)

    def __init__(self, checkpoint, options):
        pass

    def split(self, source, options, limits):
        blob = checked(source, options, {"turn"}, limits)
        try:
            image = Image.open(io.BytesIO(blob), formats=["GIF"])
            self.check(image, limits)
            return Shown(image, image.n_frames, self, options.get("turn", 0))
        except (OSError, EOFError, IndexError, ValueError, SyntaxError, struct.error) as error:
            raise MediaError(f"no GIF: {error}") from None

    def check(self, image, limits):
        check_pixels(*image.size, limits)

    def lock(self):
        return threading.Lock()


class Shown(list):
    def __init__(self, image, count, owner, turn):
        super().__init__(range(count))
        self.image, self.lock, self.turn = image, owner.lock(), turn

    def __getitem__(self, index):
        number = super().__getitem__(index)
        try:
            with self.lock:
                self.image.seek(number)
                found = self.image.convert("RGB")
        except (OSError, EOFError, IndexError, ValueError, SyntaxError, struct.error) as error:
            raise MediaError(f"a frame: {error}") from None
        return SplitPart(source=found.rotate(self.turn), label=f"frame {number + 1}")


class FramesOfAnySize(Frames):
    def check(self, image, limits):
        pass


class FramesUpToTheLimit(Frames):
    def check(self, image, limits):
        if image.width * image.height >= limits.max_pixels:
            raise MediaLimitError("too large")


class WideFrames(Frames):
    """Compares the longer side with the number of pixels."""

    def check(self, image, limits):
        if max(image.size) > limits.max_pixels:
            raise MediaLimitError("too large")


class FramesDecodedFirst(Frames):
    def check(self, image, limits):
        image.load()
        super().check(image, limits)


class UnlockedFrames(Frames):
    def lock(self):
        return Free()


class FreeLockedFrames(Frames):
    """Takes the lock for nothing: each sequence of parts has one, and they share the file."""

    def split(self, source, options, limits):
        found = super().split(source, options, limits)
        self.files = getattr(self, "files", {})
        found.image = self.files.setdefault(source, found.image)
        return found


class Free:
    def __enter__(self):
        pass

    def __exit__(self, *_):
        pass


def gif(height, width, *seeds):
    frames = [
        Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width), np.uint8))
        for seed in seeds
    ]
    held = io.BytesIO()
    frames[0].save(held, "GIF", save_all=True, append_images=frames[1:])
    return held.getvalue()


# Pictures in a tar file, read from one file object by their offsets.
class Tapes(MediaSplitter):
    kind, markers = "tape", ("<tape>",)

    def __init__(self, checkpoint, options):
        pass

    def split(self, source, options, limits):
        blob = checked(source, options, set(), limits)
        try:
            return self.members(blob, limits)
        except (tarfile.TarError, OSError, EOFError, ValueError, KeyError) as error:
            raise MediaError(f"no tar: {error}") from None

    def members(self, blob, limits):
        with tarfile.open(fileobj=io.BytesIO(blob), mode="r:") as archive:
            places = [(it.name, it.offset_data, it.size) for it in archive if it.isreg()]
        if not places or max(at + size for _, at, size in places) > len(blob):
            raise MediaError("no pictures, or cut off")
        return Members(places, io.BytesIO(blob), self, limits)

    def read(self, file, at, size, lock):
        with lock:
            file.seek(at)
            return file.read(size)


class Members(list):
    def __init__(self, places, file, owner, limits):
        super().__init__(places)
        self.file, self.owner, self.limits, self.lock = file, owner, limits, threading.Lock()

    def __getitem__(self, index):
        name, at, size = super().__getitem__(index)
        self.limits.check_bytes(size, name)
        blob = self.owner.read(self.file, at, size, self.lock)
        return SplitPart(source=blob, label=name)


class UnlockedTapes(Tapes):
    def read(self, file, at, size, lock):
        file.seek(at)
        return file.read(size)


class OneLineTapes(Tapes):
    def read(self, file, at, size, lock):
        return (file.seek(at), file.read(size))[1]


class UnpackedTapes(Tapes):
    """Unpacks the archive into a folder, with its links."""

    def members(self, blob, limits):
        with tempfile.TemporaryDirectory() as folder:
            with tarfile.open(fileobj=io.BytesIO(blob), mode="r:") as archive:
                archive.extractall(folder, filter="fully_trusted")
                names = archive.getnames()
            if not names:
                raise MediaError("no pictures")
            return [SplitPart(source=Path(folder, name).read_bytes(), label=name) for name in names]


class LinkedTapes(Tapes):
    """Reads the target of a link itself."""

    def members(self, blob, limits):
        with tarfile.open(fileobj=io.BytesIO(blob), mode="r:") as archive:
            if not archive.getmembers():
                raise MediaError("no pictures")
            return [
                SplitPart(
                    source=Path(it.linkname).read_bytes()
                    if it.issym()
                    else archive.extractfile(it).read(),
                    label=it.name,
                )
                for it in archive
            ]


def tape(*sizes):
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as archive:
        for number, size in enumerate(sizes):
            info = tarfile.TarInfo(f"{number}.png")
            info.size = size
            archive.addfile(info, io.BytesIO(bytes([65 + number]) * size))
    return held.getvalue()


# A folder with a list of its pictures.
class Albums(MediaSplitter):
    kind, markers, wants_path = "album", ("<album>",), True

    def __init__(self, checkpoint, options):
        pass

    def split(self, source, options, limits):
        if set(options):
            raise MediaError("an album has no options")
        if not isinstance(source, Path):
            raise UnsupportedMediaError("an album is a folder")
        names = self.read(source / "list.txt", limits).decode("utf-8", "replace").split()
        return [SplitPart(source=self.read(source / name, limits), label=name) for name in names]

    def read(self, path, limits):
        return read_beneath(path, limits)


class AlbumsOfAnything(Albums):
    def read(self, path, limits):
        try:
            blob = path.read_bytes()
        except OSError as error:
            raise MediaError(str(error)) from error
        limits.check_bytes(len(blob), path.name)
        return blob


class AlbumsByName(AlbumsOfAnything):
    """Compares the beginnings of texts."""

    def read(self, path, limits):
        if not os.path.normpath(path).startswith(str(limits.allowed_root or "/")):
            raise MediaError("outside")
        return super().read(path, limits)


class AlbumsWithLinks(AlbumsOfAnything):
    """Compares paths well, and follows links."""

    def read(self, path, limits):
        if not Path(os.path.normpath(path)).is_relative_to(limits.allowed_root or "/"):
            raise MediaError("outside")
        return super().read(path, limits)


# Sounds: energies of bands of frames of 25 ms, each 10 ms.
class Sounds(MediaProcessor):
    kind, token, markers, rate = "audio", "<sound>", ("<sound>",), 16_000

    def __init__(self, checkpoint, options):
        pass

    def decode(self, source, limits):
        blob = checked(source, {}, set(), limits)
        try:
            with wave.open(io.BytesIO(blob)) as file:
                if file.getsampwidth() != 2 or not file.getframerate():
                    raise MediaError("a sound of 16 bits is wanted")
                if file.getnframes() > limits.max_duration * file.getframerate():
                    raise MediaLimitError("too long")
                found = np.frombuffer(file.readframes(file.getnframes()), "<i2")
                rate, channels = file.getframerate(), file.getnchannels()
        except MediaError:
            raise
        except (wave.Error, EOFError, struct.error, RuntimeError, ValueError) as error:
            raise MediaError(f"no WAV: {error}") from None
        if len(found) < 800 * channels or len(found) % channels:
            raise MediaError("too short, or cut off")
        samples = found.reshape(-1, channels).mean(1) / 32768
        return self.resampled(samples, rate).astype(np.float32), digest_of(blob)

    def resampled(self, samples, rate):
        """Resamples a sound as a whole, in the frequencies that it has."""
        count = round(len(samples) * self.rate / rate)
        spectrum = np.zeros(count // 2 + 1, np.complex128)
        own = np.fft.rfft(samples)[: len(spectrum)]
        spectrum[: len(own)] = own
        return np.fft.irfft(spectrum, count) * (count / len(samples))

    def process(self, item, options):
        if options:
            raise MediaError("a sound has no options")
        features = self.features(item[0])
        return MediaInput(
            kind=self.kind,
            tensors={"features": torch.from_numpy(features.astype(np.float32))},
            num_tokens=self.count_tokens(item, options),
            key=item[1],
        )

    def features(self, samples):
        frames = np.lib.stride_tricks.sliding_window_view(samples, 400)[::160]
        power = np.abs(np.fft.rfft(frames * np.hanning(400), 512)) ** 2
        return np.log10(power[:, :256].reshape(len(frames), 32, 8).sum(-1) + 1e-6)

    def count_tokens(self, item, options):
        return max(1, len(item[0]) // 640)


class TakenAsItIs(Sounds):
    def resampled(self, samples, rate):
        return samples


class EverySecondSample(Sounds):
    """Leaves out samples, without a filter."""

    def resampled(self, samples, rate):
        return (
            samples[:: rate // self.rate] if rate > self.rate else super().resampled(samples, rate)
        )


class Interpolated(Sounds):
    def resampled(self, samples, rate):
        times = np.arange(0, len(samples), rate / self.rate)
        return np.interp(times, np.arange(len(samples)), samples)


class OnlyLowRates(Sounds):
    """Resamples what has a lower rate only."""

    def resampled(self, samples, rate):
        return super().resampled(samples, rate) if rate < self.rate else samples


class ResampledInBlocks(Sounds):
    def resampled(self, samples, rate):
        pieces = np.split(samples, range(8192, len(samples), 8192))
        return np.concatenate([super(ResampledInBlocks, self).resampled(it, rate) for it in pieces])


class Chunks(Sounds):
    """Computes the features of each second, filled at its end."""

    seconds = 1.0

    def features(self, samples):
        step = int(self.seconds * self.rate)
        pieces = (samples[at : at + step] for at in range(0, len(samples), step))
        filled = (np.pad(it, (0, -len(it) % 160 + 240)) for it in pieces)
        return np.concatenate([super(Chunks, self).features(it) for it in filled])


class LongChunks(Chunks):
    seconds = 30.0


class NormalisedInChunks(Sounds):
    """Subtracts the mean of each ten seconds."""

    def features(self, samples):
        found = super().features(samples)
        return np.concatenate(
            [it - it.mean() for it in np.split(found, range(1000, len(found), 1000))]
        )


class SecondsForgotten(Sounds):
    """Drops what is left after the last whole second."""

    def features(self, samples):
        return super().features(samples[: max(800, len(samples) // 16_000 * 16_000)])
