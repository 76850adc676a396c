"""Compares preprocessing of a photo-like JPEG, from bytes to patches, with transformers' PIL image
processors: preprocess.py [--rounds 9] [--families ernie qwen] [--threads].

Both sides take turns in one process with one torch thread, and each round yields one ratio, so that
other load on the machine affects both. Prints median ratios of wall time and of the thread's CPU
time, and checks that the exact path's pixels are equal. --threads also compares the images per
second of two intake threads with one.
"""

from __future__ import annotations

import argparse
import io
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from mmdeploy_llm_plugins.ernie.image import ErnieImageProcessor
from mmdeploy_llm_plugins.qwen.image import QwenImageProcessor
from mmdeploy_llm_processors.image.processor import ImageProcessor
from PIL import Image
from transformers.models.ernie4_5_vl_moe.image_processing_pil_ernie4_5_vl_moe import (
    Ernie4_5_VLMoeImageProcessorPil,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mmdeploy_llm.hooks import Checkpoint, MediaLimits

OURS = {"ernie": ErnieImageProcessor, "qwen": QwenImageProcessor}
THEIRS = {"ernie": Ernie4_5_VLMoeImageProcessorPil, "qwen": Qwen2VLImageProcessorPil}
TARGETS = {"exact": 0.65, "fast": 0.35}
Work = Callable[[], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Duration of one run: wall time, and CPU time of this thread."""

    wall: float
    cpu: float


def photo(width: int, height: int, seed: int = 0) -> bytes:
    """Returns a photo-like JPEG of quality 90: gradients, shapes at every scale, grain."""
    rng = np.random.default_rng(seed)
    pixels = np.zeros((height, width, 3), dtype=np.float32)
    for cell, weight in ((512, 60), (128, 30), (32, 14), (8, 7), (2, 3)):
        shape = (height // cell + 2, width // cell + 2, 3)
        coarse = rng.integers(0, 256, shape, dtype=np.uint8)
        layer = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        pixels += (np.asarray(layer, dtype=np.float32) / 127.5 - 1) * weight
    pixels += rng.normal(128, 6, (height, width, 1)).astype(np.float32)
    image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def our_processor(family: str, options: Mapping[str, Any]) -> ImageProcessor:
    """Returns this package's processor of the family."""
    config = SimpleNamespace(vision_config=None)
    checkpoint = Checkpoint(folder=Path("."), config=config, preprocessor={})
    return OURS[family](checkpoint, options)


def ours(processor: ImageProcessor, blob: bytes) -> torch.Tensor:
    """Returns the patches of the JPEG by this package."""
    item = processor.decode(blob, MediaLimits())
    return processor.process(item, {}).tensors["pixels"]


def theirs(processor: Any, blob: bytes) -> torch.Tensor:
    """Returns the patches of the JPEG by transformers."""
    image = Image.open(io.BytesIO(blob))
    pixels: torch.Tensor = processor(image, return_tensors="pt")["pixel_values"]
    return pixels


def timed(work: Work) -> Seconds:
    """Runs `work` once; returns its duration."""
    wall, cpu = time.perf_counter(), time.thread_time()
    work()
    return Seconds(wall=time.perf_counter() - wall, cpu=time.thread_time() - cpu)


def interleaved(works: Mapping[str, Work], rounds: int) -> dict[str, list[Seconds]]:
    """Runs each work once per round, alternating; a first round is not counted."""
    runs: dict[str, list[Seconds]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            seconds = timed(work)
            if number:
                runs[name].append(seconds)
    return runs


def ratio(of: Sequence[Seconds], to: Sequence[Seconds], clock: str) -> float:
    """Returns the median of the rounds' ratios."""
    pairs = zip(of, to, strict=True)
    return statistics.median(getattr(one, clock) / getattr(other, clock) for one, other in pairs)


def compare(family: str, blob: bytes, rounds: int) -> None:
    """Prints the ratios of one family."""
    exact, fast = (our_processor(family, {"fast_decode": flag}) for flag in (False, True))
    reference = THEIRS[family]()
    wanted = theirs(reference, blob)
    is_equal = torch.equal(ours(exact, blob), wanted)
    difference = (ours(fast, blob) - wanted).abs().mean().item()
    works = {
        "exact": lambda: ours(exact, blob),
        "fast": lambda: ours(fast, blob),
        "theirs": lambda: theirs(reference, blob),
    }
    runs = interleaved(works, rounds)
    print(f"{family}: {tuple(wanted.shape)} patches; exact pixels equal transformers': {is_equal}")
    print(f"  fast pixels differ from transformers' by {difference:.4f} on average")
    for name, target in TARGETS.items():
        cpu, wall = (ratio(runs[name], runs["theirs"], clock) for clock in ("cpu", "wall"))
        print(f"  {name}: {cpu:.3f} of their CPU time, {wall:.3f} of wall time (target {target})")
    for name, times in runs.items():
        milliseconds = 1000 * statistics.median(each.cpu for each in times)
        print(f"  {name}: {milliseconds:.0f} ms of CPU time (median)")


def compare_threads(family: str, blob: bytes, rounds: int, num_images: int = 12) -> None:
    """Prints the speed-up of two threads over one, for each decoding mode."""
    for name, flag in (("exact", False), ("fast", True)):
        processor = our_processor(family, {"fast_decode": flag})

        def work(num_threads: int, processor: ImageProcessor = processor) -> None:
            with ThreadPoolExecutor(num_threads) as pool:
                # Keeps only the shape: the engine frees patches after use too.
                list(pool.map(lambda _: ours(processor, blob).shape, range(num_images)))

        works = {"one": lambda: work(1), "two": lambda: work(2)}
        runs = interleaved(works, rounds)
        gain = ratio(runs["one"], runs["two"], "wall")
        print(f"{family}, {name}: two threads {gain:.2f} times one (target 1.8)")


def main() -> None:
    """Compares each family."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=4000)
    parser.add_argument("--height", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--families", nargs="+", choices=list(OURS), default=list(OURS))
    parser.add_argument("--threads", action="store_true", help="also compare two threads with one")
    args = parser.parse_args()
    torch.set_num_threads(1)
    blob = photo(args.width, args.height)
    print(f"JPEG of {args.width} x {args.height} pixels, {len(blob)} bytes")
    for family in args.families:
        compare(family, blob, args.rounds)
        if args.threads:
            compare_threads(family, blob, max(1, args.rounds // 3))


if __name__ == "__main__":
    main()
