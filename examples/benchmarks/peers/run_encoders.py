"""One engine that answers about sounds or images with an encoder and a decoder, for encoders.py:
this engine, transformers, or whisper.cpp.

A piece of work: {"num": items, "seed"}; answered with its seconds, by the clock or, with --threads,
of the processor.
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
Inputs = Callable[[Sequence[Any]], dict[str, Any]]
DTYPES = {"bf16": "bfloat16", "float32": "float32"}
RATE, SECONDS, SIDE, NUM_TOKENS, AT_ONCE = 16_000, 30, 768, 64, 16
# What each model is asked. Pix2Struct and GIT begin with nothing.
ASKED = {
    "whisper": "<|en|><|transcribe|>",
    "florence": "<CAPTION>",
    "pix2struct": " ",
    "git": " ",
    "kosmos": "<image><ocr>",
}


def ours(folder: Path, precision: str, kind: str, threads: int | None) -> tuple[str, Answer]:
    """This engine; a precision of few bits is computed on bfloat16 weights."""
    from mmdeploy_llm import LLM, SamplingParams

    few = precision if precision.startswith("int") else None
    llm = LLM(
        str(folder),
        dtype=DTYPES.get(precision, "bfloat16"),
        quantization=few,
        max_num_seqs=AT_ONCE,
        num_threads=threads,
        max_model_len=256 if family(folder) == "pix2struct" else None,  # its config has none
        enable_prefix_caching=False,
    )
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    text = ASKED[family(folder)]

    def answer(items: Sequence[Any]) -> int:
        if kind == "audio":
            items = [{"array": item, "sampling_rate": RATE} for item in items]
        prompts = [{"prompt": text, "multimodal_data": {kind: item}} for item in items]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert all(output.is_ok for output in outputs), outputs[0].error_msg
        return sum(len(output.outputs.token_ids) for output in outputs)

    return f"mmdeploy_llm {precision}", answer


def transformers(
    folder: Path, precision: str, kind: str, threads: int | None
) -> tuple[str, Answer]:
    """transformers, 16 items at once."""
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    dtype = getattr(torch, DTYPES[precision])
    model, inputs = CALLS[family(folder)](folder, dtype)
    model.eval()
    limits = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "do_sample": False}

    @torch.inference_mode()
    def answer(items: Sequence[Any]) -> int:
        count = 0
        for start in range(0, len(items), AT_ONCE):
            own = items[start : start + AT_ONCE]
            model.generate(**inputs(own), **limits)
            count += len(own) * NUM_TOKENS
        return count

    return f"transformers {precision}", answer


def whisper(folder: Path, dtype: Any) -> tuple[Any, Inputs]:
    """Whisper, of sounds."""
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

    extractor = WhisperFeatureExtractor.from_pretrained(folder)

    def inputs(items: Sequence[Any]) -> dict[str, Any]:
        made = extractor(list(items), sampling_rate=RATE, return_tensors="pt")
        asked = {"language": "en", "task": "transcribe", "force_unique_generate_call": True}
        return {"input_features": made["input_features"].to(dtype), **asked}

    return WhisperForConditionalGeneration.from_pretrained(folder, dtype=dtype), inputs


def florence(folder: Path, dtype: Any) -> tuple[Any, Inputs]:
    """Florence-2, which describes pictures."""
    from transformers import AutoTokenizer, Florence2ForConditionalGeneration

    model = Florence2ForConditionalGeneration.from_pretrained(folder, dtype=dtype)
    question = AutoTokenizer.from_pretrained(folder)("What does the image describe?")["input_ids"]
    return model, pixels_of(folder, [model.config.image_token_id] * 577 + question, dtype)


def git(folder: Path, dtype: Any) -> tuple[Any, Inputs]:
    """GIT, which describes pictures."""
    from transformers import GitForCausalLM

    model = GitForCausalLM.from_pretrained(folder, dtype=dtype)
    return model, pixels_of(folder, [model.config.bos_token_id], dtype)


def pixels_of(folder: Path, ids: list[int], dtype: Any) -> Inputs:
    """Returns what makes pixels, beside the tokens of a prompt."""
    import torch
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    images = CLIPImageProcessorPil.from_pretrained(folder)

    def inputs(items: Sequence[Any]) -> dict[str, Any]:
        pixels = images(list(items), return_tensors="pt")["pixel_values"].to(dtype)
        return {"pixel_values": pixels, "input_ids": torch.tensor([ids] * len(items))}

    return inputs


def pix2struct(folder: Path, dtype: Any) -> tuple[Any, Inputs]:
    """Pix2Struct, which describes pictures."""
    from transformers import Pix2StructForConditionalGeneration, Pix2StructImageProcessorPil

    images = Pix2StructImageProcessorPil.from_pretrained(folder)

    def inputs(items: Sequence[Any]) -> dict[str, Any]:
        made = images(list(items), return_tensors="pt")
        patches = made["flattened_patches"].to(dtype)
        return {"flattened_patches": patches, "attention_mask": made["attention_mask"]}

    return Pix2StructForConditionalGeneration.from_pretrained(folder, dtype=dtype), inputs


def kosmos(folder: Path, dtype: Any) -> tuple[Any, Inputs]:
    """Kosmos-2.5, which reads pages."""
    from transformers import (
        AutoTokenizer,
        Kosmos2_5ForConditionalGeneration,
        Kosmos2_5ImageProcessorPil,
        Kosmos2_5Processor,
    )

    model = Kosmos2_5ForConditionalGeneration.from_pretrained(folder, dtype=dtype)
    images = Kosmos2_5ImageProcessorPil.from_pretrained(folder)
    words, count = AutoTokenizer.from_pretrained(folder), model.config.latent_query_num
    processor = Kosmos2_5Processor(images, words, num_image_tokens=count)

    def inputs(items: Sequence[Any]) -> dict[str, Any]:
        texts, most = ["<ocr>"] * len(items), images.max_patches
        made = dict(processor(text=texts, images=list(items), max_patches=most))
        made["flattened_patches"] = made["flattened_patches"].to(dtype)
        return {name: made[name] for name in made if name not in ("width", "height")}

    return model, inputs


def whispercpp(folder: Path, precision: str, kind: str, threads: int | None) -> tuple[str, Answer]:
    """whisper.cpp, one sound after another."""
    from pywhispercpp.model import Model

    model = Model(
        str(folder / f"ggml-{precision}.bin"),
        n_threads=threads or len(os.sched_getaffinity(0)),
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
CALLS: dict[str, Callable[[Path, Any], tuple[Any, Inputs]]] = {
    "whisper": whisper,
    "florence": florence,
    "pix2struct": pix2struct,
    "git": git,
    "kosmos": kosmos,
}


def family(folder: Path) -> str:
    """Returns the family of a checkpoint, with which the name of its folder begins."""
    return folder.name.partition("-")[0]


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
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    kind = "audio" if family(args.model) == "whisper" else "image"
    name, answer = ENGINES[args.engine](args.model, args.precision, kind, args.threads)
    clock = time.perf_counter if args.threads is None else time.process_time
    serve.answer({"engine": name, "load": time.perf_counter() - BEGUN})
    for line in sys.stdin:
        asked = json.loads(line)
        items = make(kind, asked["num"], asked["seed"])
        begin = clock()
        count = answer(items)
        serve.answer({"seconds": clock() - begin, "num_tokens": count})


if __name__ == "__main__":
    main()
