"""OpenVINO GenAI, for photos.py: a script as one would write it, which keeps --parallel pictures in
the pipeline and reads the next ones in threads. --model: an exported folder, whose
preprocessor_config.json bounds the tokens of a picture."""

import time

BEGUN = time.perf_counter()

from collections import deque  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from concurrent.futures import ThreadPoolExecutor  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import openvino  # noqa: E402
import openvino_genai as genai  # noqa: E402
import photo_job  # noqa: E402
from PIL import Image, ImageOps  # noqa: E402

CACHE_GIBIBYTES = 4
PARALLEL = 16
READERS, READ_AHEAD = 2, 8


def picture(path: Path) -> Any:
    """Returns the upright pixels of a file, [1, H, W, 3]."""
    with Image.open(path) as image:
        upright = ImageOps.exif_transpose(image).convert("RGB")
    return openvino.Tensor(np.asarray(upright)[None])


def read_ahead(photos: list[Path], pool: ThreadPoolExecutor) -> Iterator[tuple[Path, Any]]:
    """Yields the files with the futures of their pixels, some of which are read already."""
    reads = deque((path, pool.submit(picture, path)) for path in photos[:READ_AHEAD])
    for path in photos[READ_AHEAD:]:
        yield reads.popleft()
        reads.append((path, pool.submit(picture, path)))
    yield from reads


def main() -> None:
    """Captions the folder."""
    args = photo_job.parse()
    parallel = args.parallel or PARALLEL
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs = CACHE_GIBIBYTES, parallel
    scheduler.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = 1024
    options = {"INFERENCE_PRECISION_HINT": "bf16"}
    pipe = genai.ContinuousBatchingPipeline(args.model, scheduler, "CPU", options, {})
    tokenizer, lines = pipe.get_tokenizer(), photo_job.Lines(args.output)
    config = genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = args.tokens
    config.ignore_eos, config.do_sample = True, False
    ready = time.perf_counter() - BEGUN
    photos, running, num_tokens = sorted(args.photos.iterdir()), {}, 0
    with ThreadPoolExecutor(READERS) as pool:
        waiting = enumerate(read_ahead(photos, pool))
        is_left = True
        while is_left or running:
            while is_left and len(running) < parallel:
                number, (path, read) = next(waiting, (None, (None, None)))
                is_left = path is not None
                if path is not None:
                    images = [read.result()]
                    running[path] = pipe.add_request(number, photo_job.QUESTION, images, config)
            pipe.step()
            for path, handle in list(running.items()):
                if handle.get_status() == genai.GenerationStatus.FINISHED:
                    (found,) = handle.read_all()
                    num_tokens += len(found.generated_ids)
                    lines.add(path, tokenizer.decode(found.generated_ids))
                    del running[path]
    version = genai.__version__.split("-")[0]
    photo_job.answer(engine=f"OpenVINO GenAI {version}", ready=ready, num_tokens=num_tokens)


if __name__ == "__main__":
    main()
