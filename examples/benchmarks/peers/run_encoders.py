"""One engine that answers about sounds or images with an encoder and a decoder, for encoders.py:
this engine, transformers, or whisper.cpp.

A piece of work: {"num": items, "seed"}; answered with its seconds.
"""

import time

BEGUN = time.perf_counter()

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable, Sequence  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import serve  # noqa: E402

Answer = Callable[[Sequence[Any]], int]
DTYPES = {"bf16": "bfloat16", "float32": "float32"}
RATE, SECONDS, SIDE, NUM_TOKENS, AT_ONCE = 16_000, 30, 768, 64, 16
ASKED = "<|en|><|transcribe|>"


def ours(folder: Path, precision: str, kind: str) -> tuple[str, Answer]:
    """This engine; a precision of few bits is computed on bfloat16 weights."""
    from mmdeploy_llm import LLM, SamplingParams

    few = precision if precision.startswith("int") else None
    llm = LLM(
        str(folder),
        dtype=DTYPES.get(precision, "bfloat16"),
        quantization=few,
        max_num_seqs=AT_ONCE,
        enable_prefix_caching=False,
    )
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    text = ASKED if kind == "audio" else "<CAPTION>"

    def answer(items: Sequence[Any]) -> int:
        if kind == "audio":
            items = [{"array": item, "sampling_rate": RATE} for item in items]
        prompts = [{"prompt": text, "multimodal_data": {kind: item}} for item in items]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert all(output.is_ok for output in outputs), outputs[0].error_msg
        return sum(len(output.outputs.token_ids) for output in outputs)

    return f"mmdeploy_llm {precision}", answer


def transformers(folder: Path, precision: str, kind: str) -> tuple[str, Answer]:
    """transformers, 16 items at once."""
    import torch
    from transformers import (
        AutoTokenizer,
        Florence2ForConditionalGeneration,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
    )
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    dtype, tokenizer = getattr(torch, DTYPES[precision]), AutoTokenizer.from_pretrained(folder)
    is_sound = kind == "audio"
    model_class = WhisperForConditionalGeneration if is_sound else Florence2ForConditionalGeneration
    model = model_class.from_pretrained(folder, dtype=dtype).eval()
    limits = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "do_sample": False}
    if is_sound:
        extractor = WhisperFeatureExtractor.from_pretrained(folder)
    else:
        images = CLIPImageProcessorPil.from_pretrained(folder)
        question = tokenizer("What does the image describe?")["input_ids"]
        ids = [model.config.image_token_id] * 577 + question

    def inputs(items: Sequence[Any]) -> dict[str, Any]:
        if is_sound:
            made = extractor(list(items), sampling_rate=RATE, return_tensors="pt")
            asked = {"language": "en", "task": "transcribe", "force_unique_generate_call": True}
            return {"input_features": made["input_features"].to(dtype), **asked}
        pixels = images(list(items), return_tensors="pt")["pixel_values"].to(dtype)
        return {"pixel_values": pixels, "input_ids": torch.tensor([ids] * len(items))}

    @torch.inference_mode()
    def answer(items: Sequence[Any]) -> int:
        count = 0
        for start in range(0, len(items), AT_ONCE):
            own = items[start : start + AT_ONCE]
            model.generate(**inputs(own), **limits)
            count += len(own) * NUM_TOKENS
        return count

    return f"transformers {precision}", answer


def whispercpp(folder: Path, precision: str, kind: str) -> tuple[str, Answer]:
    """whisper.cpp, one sound after another."""
    from pywhispercpp.model import Model

    model = Model(
        str(folder / f"ggml-{precision}.bin"),
        n_threads=len(os.sched_getaffinity(0)),
        language="en",
        max_tokens=NUM_TOKENS,
        single_segment=True,
        no_context=True,
        temperature_inc=0.0,
        print_progress=False,
    )

    def answer(items: Sequence[Any]) -> int:
        for item in items:
            model.transcribe(item)
        return len(items) * NUM_TOKENS

    return f"whisper.cpp {precision}", answer


ENGINES = {"mmdeploy_llm": ours, "transformers": transformers, "whispercpp": whispercpp}


def make(kind: str, num: int, seed: int) -> list[Any]:
    """Returns sounds [samples], or images."""
    rng = np.random.default_rng(seed)
    if kind == "audio":
        return [(0.1 * rng.standard_normal(RATE * SECONDS)).astype(np.float32) for _ in range(num)]
    from PIL import Image

    return [
        Image.fromarray(rng.integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)) for _ in range(num)
    ]


def main() -> None:
    """Answers until stdin ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--engine", choices=sorted(ENGINES), required=True)
    parser.add_argument("--precision", default="bf16")
    args = parser.parse_args()
    kind = "audio" if "whisper" in args.model.name else "image"
    name, answer = ENGINES[args.engine](args.model, args.precision, kind)
    serve.answer({"engine": name, "load": time.perf_counter() - BEGUN})
    for line in sys.stdin:
        asked = json.loads(line)
        items = make(kind, asked["num"], asked["seed"])
        begin = time.perf_counter()
        count = answer(items)
        serve.answer({"seconds": time.perf_counter() - begin, "num_tokens": count})


if __name__ == "__main__":
    main()
