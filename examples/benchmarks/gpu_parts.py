"""The parts of gpu.py, each run as a process: gpu_parts.py PART --device cuda --size real.

Prints a line "ROW {json}" as soon as a row is measured, so that a later failure loses no row.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_models
import torch
from gpu_shared import REAL, TINY, Measured, Part, busy, copy_rate, rate, seconds

from mmdeploy_llm import SamplingParams
from mmdeploy_llm.cli.bench.photos import smooth_pixels

QUESTION = "Describe this image in detail."


def machine(part: Part) -> None:
    """Measures the rates of copies and matrix products, to which all shares refer."""
    bandwidth = copy_rate(part)
    size = part.sizes.product
    left, right = (
        torch.randn(size, size, device=part.device, dtype=torch.bfloat16) for _ in range(2)
    )
    flops = rate(part, lambda: left @ right, 2 * size**3)
    found = {"flops": flops, "bandwidth": bandwidth}
    (part.folder / "machine.json").write_text(json.dumps(found))
    name = torch.cuda.get_device_name() if part.is_cuda else "CPU"
    import transformers

    part.row(
        "machine",
        measured=f"copy {bandwidth / 1e12:.2f} TB/s, bf16 GEMM {flops / 1e12:.0f} TFLOP/s",
        note=f"{name}, torch {torch.__version__}, transformers {transformers.__version__}",
    )


def qwen(part: Part) -> None:
    """Measures decode, prefill, step overhead and images with Qwen2.5-VL-7B."""
    sizes = part.sizes
    folder = gpu_models.write_qwen(part.folder / "qwen", is_tiny=sizes.is_tiny)
    llm = part.llm(
        folder,
        max_num_seqs=max(sizes.num_images, sizes.batch),
        max_num_batched_tokens=sizes.step_tokens,
        max_model_len=max(2 * sizes.context, sizes.step_tokens) + sizes.decode + 8,
    )
    with llm:
        measured = Measured(part, llm, folder)
        measured.decode("decode, 7B, batch 1", 1, 64, 0.75)
        name = f"decode, 7B, batch {sizes.batch}, context {sizes.context}"
        measured.decode(name, sizes.batch, sizes.context, 0.60)
        prefill(measured)
        overhead(measured)
        images(measured)


def prefill(measured: Measured) -> None:
    """Measures steps with the maximal number of prompt tokens, in prompts of an eighth each."""
    part, each = measured.part, measured.part.sizes.step_tokens // 8
    steps = measured.generate([each] * 40, 1)
    # Prompts arrive one by one: the first steps are smaller.
    num_tokens = max(step.num_scheduled_tokens for step in steps)
    full = [seconds(step) for step in steps if step.num_scheduled_tokens == num_tokens]
    taken = statistics.median(full)
    model: Any = measured.llm.model
    num_heads = model.model.layers[0].self_attn.num_heads
    # Causal scores and weighted values: 2 x 2 x T^2 / 2 per channel of each head.
    attention = num_tokens * 2 * each * model.num_layers * num_heads * model.head_dim
    flops = 2 * num_tokens * measured.cost.dense + attention
    part.row(
        f"prefill, 7B, {num_tokens} tokens per step",
        measured=f"{1000 * taken:.1f} ms, {num_tokens / taken:.0f} tokens/s",
        limit=f"{flops / taken / 1e12:.0f} of {part.machine.flops / 1e12:.0f} TFLOP/s",
        share=flops / taken / part.machine.flops,
        target=0.55,
        note=f"prompts of {each} tokens, median of {len(full)} steps",
    )


def overhead(measured: Measured) -> None:
    """Measures the host's overhead: time of a decode step minus the device's busy time."""
    part, batch = measured.part, measured.part.sizes.overhead_batch
    num_tokens = part.sizes.decode
    wall = measured.decode_seconds(batch, 64, num_tokens)
    times = []
    for count in (num_tokens // 2, num_tokens):
        with busy(part, measured.llm.model) as spent:
            measured.generate([64] * batch, count)
        times.append(spent())
    # Both runs contain the prompts, so the difference is decode steps only.
    device = (times[1] - times[0]) / (num_tokens - num_tokens // 2)
    part.row(
        f"step overhead, batch {batch}",
        measured=f"{1000 * (wall - device):.2f} ms outside the device",
        limit=f"{1000 * wall:.2f} ms per step, {1000 * device:.2f} on the device",
        value=1000 * (wall - device),
        target=0.3,
        note=part.graphs,
    )


def images(measured: Measured) -> None:
    """Measures a batch of images with a question each, against the lower bound of vision tower,
    prompts and decode steps."""
    part, sizes = measured.part, measured.part.sizes
    with measured.counter.counting():
        answer_images(measured, seed=0, count=1)
    flops_each = measured.counter.flops
    answer_images(measured, seed=1, count=sizes.num_images)
    measured.log.steps.clear()
    taken = answer_images(measured, seed=2, count=sizes.num_images)
    steps = list(measured.log.steps)
    least = measured.cost.seconds(steps, flops_each * sizes.num_images, part.machine)
    # Decode steps also read keys and values of the prompt and, on average, half of the output.
    num_prompt = sizes.image**2 // 28**2 + 32
    num_read = sum(step.num_sampled_tokens for step in steps) * (num_prompt + sizes.output / 2)
    least += num_read * measured.kv_token_bytes / part.machine.bandwidth
    part.row(
        f"vl: {sizes.image} x {sizes.image}, {sizes.output} tokens, batch {sizes.num_images}",
        measured=f"{taken:.2f} s, {sizes.num_images / taken:.1f} images/s",
        limit=f"{least:.2f} s",
        share=least / taken,
        target=0.60,
        images=sizes.num_images / taken,
    )


def answer_images(measured: Measured, *, seed: int, count: int) -> float:
    """Answers `count` images; returns the seconds from pixels in memory to text."""
    import numpy as np

    sizes = measured.part.sizes
    prompts = []
    for number in range(count):
        pixels = smooth_pixels(np.random.default_rng((seed, number)), sizes.image, sizes.image)
        parts = [{"type": "image", "image": pixels}, {"type": "text", "text": QUESTION}]
        prompts.append({"messages": [{"role": "user", "content": parts}]})
    params = SamplingParams(temperature=0, max_tokens=sizes.output, ignore_eos=True)
    begin = time.perf_counter()
    measured.check(measured.llm.generate(prompts, params, use_tqdm=False))
    return time.perf_counter() - begin


def transformers_generate(part: Part) -> None:
    """Measures transformers' generate on as many images in one batch, then saves the weights for
    the part "start"."""
    import numpy as np
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    sizes = part.sizes
    folder = gpu_models.write_qwen(part.folder / "qwen", is_tiny=sizes.is_tiny)
    begin = time.perf_counter()
    model = random_model(part, folder)
    part.say(f"transformers' model after {time.perf_counter() - begin:.1f} s")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    pad = "<|image_pad|>"
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def answer(seed: int, num_tokens: int, count: int) -> tuple[float, float]:
        """Returns the total seconds, and how many of them preprocessing took."""
        rng = [np.random.default_rng((seed, number)) for number in range(count)]
        pictures = [smooth_pixels(each, sizes.image, sizes.image) for each in rng]
        part.wait()
        begin = time.perf_counter()
        pixels = processor(pictures, return_tensors="pt")
        num_pads = int(pixels["image_grid_thw"][0].prod()) // processor.merge_size**2
        words = tokenizer([text.replace(pad, pad * num_pads)] * count, return_tensors="pt")
        kinds = (words["input_ids"] == model.config.image_token_id).int()
        inputs = {**pixels, "mm_token_type_ids": kinds, "input_ids": words["input_ids"]}
        inputs |= {"attention_mask": words["attention_mask"]}
        prepared = time.perf_counter() - begin
        with torch.inference_mode():
            model.generate(
                **{name: value.to(part.device) for name, value in inputs.items()},
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
            )
        part.wait()
        return time.perf_counter() - begin, prepared

    answer(0, 2, min(8, sizes.num_images))
    taken, prepared = answer(1, sizes.output, sizes.num_images)
    attention = model.config._attn_implementation
    part.row(
        "transformers generate, the same images",
        measured=f"{taken:.2f} s, {sizes.num_images / taken:.1f} images/s",
        note=f"batch {sizes.num_images}, {attention} attention; {prepared:.2f} s for the pixels",
        images=sizes.num_images / taken,
    )
    begin = time.perf_counter()
    model.save_pretrained(folder, max_shard_size="5GB")
    part.say(f"weights saved in {time.perf_counter() - begin:.1f} s")


def random_model(part: Part, folder: Path) -> Any:
    """Builds transformers' model with small random weights on the device."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(part.device), no_init():
            model = transformers.AutoModelForImageTextToText.from_config(config)
    finally:
        torch.set_default_dtype(default)
    for parameter in model.parameters():
        parameter.data.uniform_(-0.02, 0.02)
    return model.eval()


@contextmanager
def no_init() -> Iterator[None]:
    """Disables transformers' weight initialization, which takes a minute for billions of values."""
    try:
        from transformers.initialization import no_init_weights
    except ImportError:
        from transformers.modeling_utils import no_init_weights
    with no_init_weights():
        yield


START = """
import sys, time
begin = time.perf_counter()
from mmdeploy_llm import LLM, SamplingParams
options = {"device": sys.argv[2], "max_model_len": int(sys.argv[3])}
llm = LLM(model=sys.argv[1], **options)
params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
output = llm.generate([[50, 60, 70]], params, use_tqdm=False)[0]
assert output.is_ok, output.error_msg
print("STARTED", time.perf_counter() - begin, flush=True)
llm.close()
"""


def start(part: Part) -> None:
    """Measures the time from a new Python process to the first token of a checkpoint on local disk,
    minus the time to read its files once."""
    folder = part.folder / "qwen"
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise RuntimeError("the part 'transformers' has not saved weights")
    reading = read_seconds(files)
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", START, str(folder), part.device, str(2 * part.sizes.step_tokens)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    taken = time.perf_counter() - begin
    if done.returncode != 0:
        raise RuntimeError(f"the start failed: {done.stderr.strip()[-600:]}")
    num_bytes = sum(path.stat().st_size for path in files)
    part.row(
        "start to first token, 7B from local disk",
        measured=f"{taken:.1f} s, {taken - reading:.1f} s beyond reading",
        limit=f"{reading:.1f} s to read {num_bytes / 1e9:.1f} GB",
        value=taken - reading,
        target=20,
        note="the files may be in the page cache, and the kernels in Triton's cache from the "
        "previous parts",
    )


def read_seconds(files: Sequence[Path]) -> float:
    """Returns the seconds of a second pass over the files, since the engine reads cached files."""
    buffer = memoryview(bytearray(2**25))
    taken = 0.0
    for _ in range(2):
        begin = time.perf_counter()
        for path in files:
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
        taken = time.perf_counter() - begin
    return taken


def ernie(part: Part) -> None:
    """Loads ERNIE-4.5-VL-28B-A3B, answers images and text, and measures decode."""
    sizes = part.sizes
    folder = gpu_models.write_ernie(part.folder / "ernie", is_tiny=sizes.is_tiny)
    begin = time.perf_counter()
    llm = part.llm(
        folder,
        max_num_seqs=32,
        max_num_batched_tokens=max(sizes.step_tokens, 32),
        max_model_len=max(2 * sizes.context, sizes.step_tokens) + sizes.decode,
    )
    with llm:
        started = time.perf_counter() - begin
        measured = Measured(part, llm, folder)
        small = replace(sizes, num_images=min(8, sizes.num_images))
        part.sizes = small
        taken = answer_images(measured, seed=3, count=small.num_images)
        measured.generate([sizes.context] * 4, 8)
        total = measured.cost.total / 1e9
        part.row(
            "ERNIE-4.5-VL-28B-A3B, images and text",
            measured=f"started in {started:.1f} s, {small.num_images} images in {taken:.2f} s",
            note=f"{total:.1f} B parameters; {part.graphs}",
            done=True,
        )
        measured.decode("decode, ERNIE 28B-A3B, batch 1", 1, 64, 0.50)


PARTS: dict[str, Callable[[Part], None]] = {
    "machine": machine,
    "qwen": qwen,
    "transformers": transformers_generate,
    "start": start,
    "ernie": ernie,
}


def main() -> None:
    """Runs one part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=("real", "tiny"), default="real")
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(1)
    sizes = TINY if args.size == "tiny" else REAL
    PARTS[args.part](Part(args.device, sizes, args.folder))


if __name__ == "__main__":
    main()
