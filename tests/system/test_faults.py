"""One fault in a batch at a time: whatever is wrong with one item, all others get their right
answer, the faulty one gets its own error, and the engine answers the next prompt."""

import io
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from mmdeploy_llm import EngineError, SamplingParams
from mmdeploy_llm.hooks import hookimpl
from mmdeploy_llm.system.guarding import calls as guard

GREEDY = SamplingParams(temperature=0, max_tokens=4)
FAMILY = "ernie4_5_vl_moe"


def encoded(image, name="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, name, **options)
    return buffer.getvalue()


def png_bomb(width, height):
    """Returns a PNG of a few kilobytes that claims, and holds, far more pixels than that."""

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = zlib.compress(b"\0" * (height * (1 + width // 8)), 9)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        (chunk(b"IHDR", header), chunk(b"IDAT", rows), chunk(b"IEND", b""))
    )


def gif_bomb():
    """Returns a GIF that claims a canvas of 65,535 x 65,535."""
    blob = bytearray(encoded(Image.new("P", (8, 8)), "GIF"))
    blob[6:10] = struct.pack("<HH", 65535, 65535)
    return bytes(blob)


def webp_bomb():
    """Returns a WebP whose header claims 16,384 x 16,384."""
    chunk = b"VP8X" + struct.pack("<I", 10) + bytes(4) + b"\xff\x3f\x00" + b"\xff\x3f\x00"
    return b"RIFF" + struct.pack("<I", 4 + len(chunk)) + b"WEBP" + chunk


def large_jpeg():
    """Returns a JPEG whose header claims 60,000 x 60,000."""
    blob = bytearray(encoded(Image.new("RGB", (16, 16)), "JPEG"))
    place = blob.index(b"\xff\xc0") + 5
    blob[place : place + 4] = struct.pack(">HH", 60000, 60000)
    return bytes(blob)


def long_video(files):
    """Returns a Matroska file whose header claims ten hours."""
    blob = bytearray(files.video(8, 10, name="matroska"))
    place = blob.index(b"\x44\x89\x88") + 3
    blob[place : place + 8] = struct.pack(">d", 36_000_000.0)
    return bytes(blob)


def damaged_video(files):
    blob = bytearray(files.video(90, 10, gop=300, bf=0, sc_threshold=0))
    start, end = blob.index(b"mdat") + 1500, blob.index(b"moov") - 4
    blob[start:end] = b"\xff" * (end - start)
    return bytes(blob)


BAD_IMAGES = {
    "truncated": (lambda image: encoded(image, "JPEG")[:300], 400, "truncated|corrupt"),
    "zero bytes": (lambda image: b"", 400, "empty"),
    "text": (lambda image: b"this is no image at all", 415, "no image format"),
    "PNG bomb": (lambda image: png_bomb(60000, 60000), 413, "60000 x 60000"),
    "GIF bomb": (lambda image: gif_bomb(), 413, "65535 x 65535"),
    "WebP bomb": (lambda image: webp_bomb(), 413, "larger than Pillow allows"),
    "JPEG that claims 60000 x 60000": (lambda image: large_jpeg(), 413, "60000 x 60000"),
}
GOOD_IMAGES = {
    "1 x 1": lambda image: encoded(image.resize((1, 1))),
    "1 x 100000": lambda image: encoded(image.resize((1, 100_000))),
    "16 bits": lambda image: encoded(Image.fromarray(np.full((60, 60), 40_000, np.uint16))),
    "CMYK": lambda image: encoded(image.convert("CMYK"), "JPEG"),
    "animated": lambda image: encoded(
        image, "GIF", save_all=True, append_images=[image.rotate(90)], duration=100
    ),
}
BAD_VIDEOS = {
    "ten hours": (long_video, 413, "36000 seconds long"),
    "corrupt in the middle": (damaged_video, 400, "cannot be decoded"),
    "sound only": (lambda files: files.sound(), 415, "no video in it"),
    "truncated": (lambda files: files.video(8)[:400], 400, "corrupt or truncated"),
    "zero bytes": (lambda files: b"", 400, "empty"),
}


@pytest.fixture(scope="module")
def files(load_file):
    return load_file("media/video_files.py")


@pytest.fixture
def llm(make_llm, tiny_folder):
    found, _ = make_llm(tiny_folder(FAMILY), num_intake_threads=2)
    return found


@pytest.fixture
def image_prompt(reference_of):
    text = f"User: {reference_of(FAMILY).image_text()} what is it? Assistant:"
    return lambda source: {"prompt": text, "multimodal_data": {"image": [source]}}


@pytest.fixture
def video_prompt(reference_of):
    text = f"User: {reference_of(FAMILY).video_text()} what moves? Assistant:"
    return lambda source: {"prompt": text, "multimodal_data": {"video": [source]}}


def tokens(output):
    assert output.error_msg is None
    return list(output.outputs.token_ids)


def check_batch(llm, bad, good, code, message):
    """Checks a batch with `bad` among good items: its error, their answers, and an answer
    afterwards."""
    want = [tokens(output) for output in llm.generate(good, GREEDY, use_tqdm=False)]
    outputs = llm.generate([*good[:1], bad, *good[1:]], GREEDY, use_tqdm=False)
    failed = outputs.pop(1)
    assert (failed.error_code, failed.outputs.finish_reason) == (code, "error"), failed.error_msg

    assert re.search(message, failed.error_msg)
    assert [tokens(output) for output in outputs] == want
    assert [tokens(output) for output in llm.generate(good, GREEDY, use_tqdm=False)] == want


@pytest.mark.full
@pytest.mark.parametrize("name", BAD_IMAGES)
def test_bad_images(llm, image_prompt, make_picture, name):
    make, code, message = BAD_IMAGES[name]
    good = [image_prompt(make_picture(seed, 80, 60)) for seed in range(3)]
    check_batch(llm, image_prompt(make(make_picture(9, 90, 90))), good, code, message)


@pytest.mark.full
@pytest.mark.parametrize("name", GOOD_IMAGES)
def test_odd_but_good_images(llm, image_prompt, make_picture, name):
    source = GOOD_IMAGES[name](make_picture(9, 90, 90))
    [output] = llm.generate([image_prompt(source)], GREEDY, use_tqdm=False)
    assert tokens(output)


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.full] * (name != "truncated")) for name in BAD_VIDEOS],
)
def test_bad_videos(llm, files, image_prompt, video_prompt, make_picture, name):
    make, code, message = BAD_VIDEOS[name]
    good = [image_prompt(make_picture(0, 80, 60)), video_prompt(files.video(8, 10))]
    check_batch(llm, video_prompt(make(files)), good, code, message)


@pytest.mark.full
def test_a_video_of_one_frame(llm, files, video_prompt):
    [output] = llm.generate([video_prompt(files.video(1, 10))], GREEDY, use_tqdm=False)
    assert tokens(output)
    assert output.num_input_video_tokens > 0


def test_a_wrong_extension(llm, image_prompt, make_picture, tmp_path):
    """The format is read from the content, not from the name."""
    path = tmp_path / "picture.jpg"
    path.write_bytes(encoded(make_picture(1, 80, 60), "PNG"))
    direct, named = llm.generate(
        [image_prompt(make_picture(1, 80, 60)), image_prompt(str(path))], GREEDY, use_tqdm=False
    )
    assert tokens(direct) == tokens(named)


@pytest.mark.full
def test_a_source_that_hangs(make_llm, tiny_folder, image_prompt, make_picture):
    """A server that accepts and never answers delays its item up to the deadline, and no other
    item."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        llm, _ = make_llm(
            tiny_folder(FAMILY),
            num_intake_threads=2,
            allowed_media_domains="127.0.0.1",
            allow_private_media_addresses=True,
            media_fetch_timeout=0.5,
        )
        good = [image_prompt(make_picture(seed, 80, 60)) for seed in range(3)]
        bad = image_prompt(f"http://127.0.0.1:{port}/a.png")
        begin = time.monotonic()
        check_batch(llm, bad, good, 408, "0.5 seconds|longer|time")
        assert time.monotonic() - begin < 60


@pytest.mark.full
def test_a_killed_decoder(llm, files, video_prompt, monkeypatch):
    """The process that decodes gets SIGKILL before a batch, and again and again while it runs."""
    from mmdeploy_llm.system.portable import children

    started = []
    start = children.subprocess.Popen

    def watched(*args, **kwargs):
        started.append(start(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(children.subprocess, "Popen", watched)
    prompts = [video_prompt(files.video(8 + number, 10)) for number in range(6)]
    want = [tokens(output) for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
    llm._desk.intake.media._processed.clear()
    is_over = threading.Event()

    def kill():
        for process in list(started):
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)

    def kill_again():
        while not is_over.wait(0.05):
            kill()

    kill()
    killer = threading.Thread(target=kill_again)
    killer.start()
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    is_over.set()
    killer.join()
    assert any(output.error_code == 400 and "died" in output.error_msg for output in outputs)
    for output, tokens_wanted in zip(outputs, want, strict=True):
        assert output.error_code == 400 or tokens(output) == tokens_wanted
    assert [tokens(o) for o in llm.generate(prompts, GREEDY, use_tqdm=False)] == want


def test_a_processor_that_raises(llm, image_prompt, make_picture, monkeypatch):
    processor = llm._desk.intake.media._processors["image"]
    process = type(processor).process

    def faulty(self, item, options):
        if item.size == (77, 66):
            raise ZeroDivisionError("inside the plugin")
        return process(self, item, options)

    monkeypatch.setattr(type(processor), "process", faulty)
    good = [image_prompt(make_picture(seed, 80, 60)) for seed in range(3)]
    message = "ErnieImageProcessor .* failed on the image: .*ZeroDivisionError"
    check_batch(llm, image_prompt(make_picture(5, 77, 66)), good, 400, message)


@pytest.fixture
def awake(monkeypatch):
    """Returns an event that plugins wait for; it is set at the end."""
    monkeypatch.setattr(guard, "GRACE", 0.0)
    event = threading.Event()
    yield event
    event.set()


class Ends:
    """Counts the requests that have ended."""

    num = 0

    @hookimpl
    def on_request_finished(self, record):
        self.num += 1


@pytest.fixture
def outlasts(awake, clock):
    """outlasts(llm) -> a function that hangs until `awake`. All good requests of `check_batch` end
    meanwhile; then time goes by, since no machine should be too slow for them."""

    def of(llm):
        ends = Ends()
        llm.plugins.register(ends, name="ends")

        def hang():
            while ends.num < 6:
                time.sleep(0.01)
            clock.pass_by(600)
            awake.wait(120)

        return hang

    return of


class HangingStore:
    """Another package's fetcher: store://hang never returns, any other name is the same image."""

    def __init__(self, blob, hang):
        self.blob, self.hang, self.is_asked = blob, hang, threading.Event()

    @hookimpl
    def fetch_media(self, ref):
        if not ref.uri.startswith("store://"):
            return None
        if ref.uri.startswith("store://hang"):
            self.is_asked.set()
            self.hang()
        return self.blob


@pytest.mark.full
def test_a_fetcher_that_hangs(make_llm, tiny_folder, image_prompt, make_picture, outlasts):
    llm, _ = make_llm(tiny_folder(FAMILY), num_intake_threads=2, media_fetch_timeout=600)
    store = HangingStore(encoded(make_picture(1, 80, 60)), outlasts(llm))
    llm.plugins.register(store, name="acme")
    good = [image_prompt(f"store://{name}") for name in range(3)]
    message = r"plugin 'acme' .* has not fetched 'store://hang' within 600 s"
    check_batch(llm, image_prompt("store://hang"), good, 408, message)
    assert llm.plugins.guard.num_hung == 1


@pytest.mark.full
@pytest.mark.parametrize("method", ["decode", "process"])
def test_a_processor_that_hangs(
    make_llm, tiny_folder, image_prompt, make_picture, monkeypatch, outlasts, method
):
    llm, _ = make_llm(tiny_folder(FAMILY), num_intake_threads=2, media_timeout=600)
    hang = outlasts(llm)
    processor = type(llm._desk.intake.media._processors["image"])
    call = getattr(processor, method)

    def hanging(self, item, *rest):
        if item.size == (77, 66):
            hang()
        return call(self, item, *rest)

    monkeypatch.setattr(processor, method, hanging)
    good = [image_prompt(make_picture(seed, 80, 60)) for seed in range(3)]
    message = "ErnieImageProcessor .* has not finished with the image within 600 s"
    check_batch(llm, image_prompt(make_picture(5, 77, 66)), good, 408, message)


@pytest.mark.full
def test_a_fetcher_that_always_hangs_is_given_up(
    make_llm, tiny_folder, image_prompt, make_picture, awake
):
    num_threads, num_bad = 2, guard.MAX_HUNG + 6
    llm, _ = make_llm(tiny_folder(FAMILY), num_intake_threads=num_threads, media_fetch_timeout=0.2)
    llm.plugins.register(HangingStore(b"", lambda: awake.wait(120)), name="acme")
    bad = [image_prompt(f"store://hang/{number}") for number in range(num_bad)]
    *failed, good = llm.generate(
        [*bad, image_prompt(make_picture(2, 80, 60))], GREEDY, use_tqdm=False
    )
    assert tokens(good)
    late = [output for output in failed if output.error_code == 408]
    refused = [output for output in failed if output.error_code == 400]
    assert len(late) + len(refused) == num_bad
    # Calls that had started before the fetcher was given up are late as well.
    assert guard.MAX_HUNG <= len(late) < guard.MAX_HUNG + num_threads
    assert all("plugin 'acme'" in output.error_msg for output in failed)
    assert all("earlier calls of it hang" in output.error_msg for output in refused)


@pytest.mark.full
def test_closing_does_not_wait_for_a_plugin_that_hangs(
    make_llm, tiny_folder, image_prompt, make_picture, awake
):
    llm, _ = make_llm(tiny_folder(FAMILY), media_fetch_timeout=60)
    store = HangingStore(b"", lambda: awake.wait(120))
    llm.plugins.register(store, name="acme")
    outputs = llm.generate_iter([image_prompt("store://hang")], GREEDY)
    ended = []

    def take():
        with pytest.raises(EngineError, match="closed while this call was running"):
            list(outputs)
        ended.append(True)

    taking = threading.Thread(target=take)
    taking.start()
    assert store.is_asked.wait(60)
    start = time.monotonic()
    llm.close()
    taking.join(timeout=60)
    assert time.monotonic() - start < 60
    assert ended


@pytest.mark.full
def test_a_placeholder_feature_mismatch(llm, image_prompt, make_picture, monkeypatch):
    """A processor counts one token too many, so the encoder's output does not fit."""
    processor = llm._desk.intake.media._processors["image"]
    process = type(processor).process

    def faulty(self, item, options):
        made = process(self, item, options)
        is_bad = item.size == (77, 66)
        return replace(made, num_tokens=made.num_tokens + 1) if is_bad else made

    monkeypatch.setattr(type(processor), "process", faulty)
    good = [image_prompt(make_picture(seed, 80, 60)) for seed in range(3)]
    check_batch(llm, image_prompt(make_picture(5, 77, 66)), good, 500, "could not be encoded")


def test_out_of_memory_in_the_encoder(llm, image_prompt, make_picture, monkeypatch):
    encode = llm.model.encode_media
    large = 8 * 10  # patches of the bad image: 112 x 140 pixels

    def limited(items):
        if any(item.grid_thw == (1, 8, 10) for item in items):
            raise torch.OutOfMemoryError("out of memory: tried to allocate 20 GiB")
        return encode(items)

    monkeypatch.setattr(llm.model, "encode_media", limited)
    good = [image_prompt(make_picture(seed, 56, 56)) for seed in range(3)]
    bad = image_prompt(make_picture(5, 140, 112))
    assert llm.count_tokens(bad).num_input_image_tokens == large // 4
    check_batch(llm, bad, good, 500, "could not be encoded")


PROGRAM = """
import sys, threading, time
from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.hooks import hookimpl

class Hanging:
    @hookimpl
    def fetch_media(self, ref):
        threading.Event().wait()

folder, text, ends = sys.argv[1:]
llm = LLM(model=folder, use_warmup=False, media_fetch_timeout=600)
llm.plugins.register(Hanging(), name="acme")
bad = {"prompt": text, "multimodal_data": {"image": ["store://x"]}}
outputs = llm.generate_iter([bad, "hello"], SamplingParams(temperature=0, max_tokens=2))
print(next(outputs).error_msg, flush=True)  # of "hello", while the other one hangs
if ends == "after":
    now = time.monotonic
    time.monotonic = lambda: now() + 1000
    print(next(outputs).error_msg, flush=True)
"""


@pytest.mark.full
@pytest.mark.parametrize("ends", [pytest.param("during", marks=pytest.mark.long), "after"])
def test_a_program_ends_though_a_plugin_hangs(tiny_folder, reference_of, ends):
    """The program closes nothing and reaches its end."""
    text = reference_of(FAMILY).image_text()
    command = [sys.executable, "-c", PROGRAM, str(tiny_folder(FAMILY)), text, ends]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            lines = [process.stdout.readline() for _ in range(1 + (ends == "after"))]
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()
    assert lines[0] == "None\n"
    assert ends == "during" or "has not fetched" in lines[1]
