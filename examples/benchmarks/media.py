"""Measures media processing: media.py [seek] [isolation] [caption] [memory]

seek        reading 16 frames of a ten-minute clip by seeking to key frames, against decoding all
isolation   decoding a video in a separate process, against a thread
caption     images per second of captioning 500 JPEG files, one intake thread against two
memory      peak memory of captioning 10,000 files, against 100

Each figure is a ratio or difference within one run. caption and memory use the bundled model.
"""

from __future__ import annotations

import argparse
import io
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import av
import numpy as np
from mmdeploy_llm_plugins.ernie.video import ErnieVideoProcessor
from PIL import Image

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.hooks import Checkpoint, MediaLimits
from mmdeploy_llm.media.video.files import open_file

LIMITS = MediaLimits()
PROMPT = "User: Picture 1:<|IMAGE_START|><|image@placeholder|><|IMAGE_END|>Describe the image.\n"


def clip(seconds: int, width: int, height: int, rate: int = 25) -> bytes:
    """Returns an H.264 file of moving noise with x264's default key frames, one per ten seconds."""
    rng = np.random.default_rng(0)
    tile = rng.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    large = np.asarray(Image.fromarray(tile).resize((width, height), Image.Resampling.BICUBIC))
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.options = {"preset": "ultrafast", "crf": "28"}
        for index in range(seconds * rate):
            frame = av.VideoFrame.from_ndarray(np.roll(large, 2 * index, axis=1), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


def seconds_of(call: Callable[[], object]) -> float:
    """Returns the wall time of one call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def seek() -> None:
    """Measures reading sparse frames of a long clip."""
    blob = clip(600, 640, 360)
    video = open_file(blob, LIMITS)
    wanted = np.linspace(0, video.timeline.num_frames - 1, 16).astype(int).tolist()
    survey = seconds_of(lambda: open_file(blob, LIMITS))
    jumping = seconds_of(lambda: list(video.read(wanted)))
    reading = seconds_of(lambda: list(video._read(wanted, keys=())))
    print(
        f"seek: {len(blob) / 2**20:.0f} MiB, {video.timeline.num_frames} frames of 640 x 360, 16 "
        f"wanted: opening {survey:.2f} s, jumping {jumping:.2f} s, decoding all {reading:.2f} s, "
        f"ratio {jumping / reading:.3f}"
    )


def isolation() -> None:
    """Measures decoding a video in a separate process and in this one."""
    vision = SimpleNamespace(patch_size=14, spatial_merge_size=2)
    checkpoint = Checkpoint(folder=Path("."), config=SimpleNamespace(vision_config=vision))
    processor = ErnieVideoProcessor(checkpoint, {})
    clips = {"4 s of 320 x 180": clip(4, 320, 180), "20 s of 1280 x 720": clip(20, 1280, 720)}

    def process(blob: bytes, mode: str) -> object:
        item = processor.decode(blob, replace(LIMITS, isolation=mode))
        return processor.process(item, {})

    for name, blob in clips.items():
        times: dict[str, list[float]] = {"process": [], "thread": []}
        for _ in range(9):
            for mode, found in times.items():
                found.append(seconds_of(partial(process, blob, mode)))
        apart, here = (statistics.median(times[mode][2:]) for mode in ("process", "thread"))
        print(
            f"isolation: {name}: {1000 * here:.0f} ms in a thread, {1000 * apart:.0f} ms in a "
            f"process, {1000 * (apart - here):+.0f} ms, ratio {apart / here:.2f}"
        )
    processor.close()


def write_images(folder: Path, count: int) -> list[str]:
    """Writes JPEG files of mixed sizes, 0.3 to 3 megapixels; returns their paths."""
    rng = np.random.default_rng(0)
    paths = []
    for index in range(count):
        width, height = (int(side) for side in rng.integers(480, 1800, 2))
        tile = rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)
        image = Image.fromarray(tile).resize((width, height), Image.Resampling.BICUBIC)
        path = folder / f"{index:05d}.jpg"
        image.save(path, quality=90)
        paths.append(str(path))
    return paths


def caption_all(paths: list[str], num_threads: int) -> float:
    """Captions the files; returns images per second."""
    llm = LLM(model="shapes-vl", num_intake_threads=num_threads)
    params = SamplingParams(temperature=0, max_tokens=16)
    prompts = ({"prompt": PROMPT, "multimodal_data": {"image": path}} for path in paths)
    begin = time.perf_counter()
    count = sum(1 for _ in llm.generate_iter(prompts, params))
    elapsed = time.perf_counter() - begin
    llm.close()
    assert count == len(paths)
    return count / elapsed


def caption() -> None:
    """Measures captioning with one and two intake threads, alternating."""
    with tempfile.TemporaryDirectory() as folder:
        paths = write_images(Path(folder), 500)
        found: dict[int, list[float]] = {1: [], 2: []}
        for num_threads in (1, 2, 1, 2, 1, 2):
            found[num_threads].append(caption_all(paths, num_threads))
    one, two = (statistics.median(found[number]) for number in (1, 2))
    print(f"caption: {one:.1f} images/s with one thread, {two:.1f} with two, ratio {two / one:.2f}")


def memory() -> None:
    """Measures peak resident memory with few and many files, each in a separate process."""
    with tempfile.TemporaryDirectory() as folder:
        paths = write_images(Path(folder), 100)
        peaks = []
        for count in (100, 10_000):
            command = [sys.executable, __file__, "--peak", folder, str(count)]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            peaks.append(int(output.split()[-1]))
        assert len(paths) == 100
    few, many = peaks
    print(f"memory: {few} MiB at 100 paths, {many} MiB at 10,000, {many - few:+d} MiB")


def peak(folder: str, count: int) -> None:
    """Captions `count` different files made from those of a folder; prints the peak in MiB."""
    files = sorted(Path(folder).glob("*.jpg"))
    with tempfile.TemporaryDirectory() as links:
        paths = []
        for index in range(count):
            path = Path(links) / f"{index:05d}.jpg"
            # Trailing bytes make every file different, so that no cache helps.
            path.write_bytes(files[index % len(files)].read_bytes() + index.to_bytes(4, "big"))
            paths.append(str(path))
        caption_all(paths, 2)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)


def main() -> None:
    """Runs the named measurements, by default all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    jobs = {"seek": seek, "isolation": isolation, "caption": caption, "memory": memory}
    parser.add_argument("jobs", nargs="*", choices=[[], *jobs], help="default: all")
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        peak(options.peak[0], int(options.peak[1]))
        return
    for name in options.jobs or jobs:
        jobs[name]()


if __name__ == "__main__":
    main()
