"""One engine that makes vectors of texts or images, for embed.py: this engine, or
sentence-transformers with torch or OpenVINO, or transformers for images.

A piece of work: {"num": documents, "tokens": of each, "seed"}; answered with its seconds.
"""

import time

BEGUN = time.perf_counter()

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import random  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable, Sequence  # noqa: E402
from typing import Any  # noqa: E402

import serve  # noqa: E402
import workloads  # noqa: E402

Encode = Callable[[Sequence[Any]], Any]
DTYPES = {"bf16": "bfloat16", "float32": "float32"}


def ours(model: str, precision: str, level: str | None = None) -> tuple[str, Encode]:
    """This engine; a precision of few bits is computed on bfloat16 weights. level: see --level."""
    from mmdeploy_llm import LLM

    few = precision if precision.startswith("int") else None
    llm = LLM(
        model,
        dtype=DTYPES.get(precision, "bfloat16"),
        quantization=few,
        max_model_len=1024 if "qwen3" in model else None,
        enable_prefix_caching=False,
        limit_mm_per_prompt={"image": 1},
        cpu_level=level,
    )

    def encode(items: Sequence[Any]) -> Any:
        texts = isinstance(items[0], str)
        prompts = items if texts else [{"multimodal_data": {"image": [item]}} for item in items]
        outputs = llm.embed(prompts, use_tqdm=False)
        assert all(output.is_ok for output in outputs), outputs[0].error_msg
        return outputs

    return f"mmdeploy_llm {precision}", encode


def sentence_transformers(model: str, precision: str) -> tuple[str, Encode]:
    """sentence-transformers with torch."""
    from sentence_transformers import SentenceTransformer

    found = SentenceTransformer(model, device="cpu", model_kwargs={"dtype": DTYPES[precision]})
    return f"sentence-transformers, torch {precision}", _encoding(found)


def openvino(model: str, precision: str) -> tuple[str, Encode]:
    """sentence-transformers with OpenVINO, which exports the model and chooses its precision by
    itself: bfloat16 where the machine has products of it."""
    from sentence_transformers import SentenceTransformer

    is_held = os.environ.get("ONEDNN_MAX_CPU_ISA") == "AVX2"  # which has no products of bf16
    config = {"INFERENCE_PRECISION_HINT": "f32"} if is_held else {}
    kwargs = {"ov_config": config}
    found = SentenceTransformer(model, device="cpu", backend="openvino", model_kwargs=kwargs)
    own = "float32" if is_held else precision
    return f"sentence-transformers, OpenVINO {own}", _encoding(found)


def transformers(model: str, precision: str) -> tuple[str, Encode]:
    """transformers, for images: 16 at once."""
    import torch
    import transformers as library

    dtype = getattr(torch, DTYPES[precision])
    name = library.AutoConfig.from_pretrained(model).architectures[0]
    found = getattr(library, name).from_pretrained(model, dtype=dtype).eval()
    if name == "ColQwen2ForRetrieval":
        words = library.AutoTokenizer.from_pretrained(model)
        pictures = library.AutoImageProcessor.from_pretrained(model)
        processor = library.ColQwen2Processor(image_processor=pictures, tokenizer=words)
        compute = found
    else:
        processor = library.AutoProcessor.from_pretrained(model)
        compute = found.get_image_features

    @torch.inference_mode()
    def encode(items: Sequence[Any]) -> Any:
        vectors = []
        for start in range(0, len(items), 16):
            inputs = processor(images=list(items[start : start + 16]), return_tensors="pt")
            inputs["pixel_values"] = inputs["pixel_values"].to(dtype)
            vectors.append(compute(**inputs))
        return vectors

    return f"transformers {precision}", encode


def _encoding(model: Any) -> Encode:
    return lambda items: model.encode(list(items), batch_size=32, show_progress_bar=False)


ENGINES = {
    "mmdeploy_llm": ours,
    "sentence_transformers": sentence_transformers,
    "openvino": openvino,
    "transformers": transformers,
}


def documents(tokenizer: Any, num: int, tokens: int, seed: int) -> list[str]:
    """Returns texts of at most so many tokens, the special ones included."""
    rng = random.Random(f"{tokens} {seed}")
    special = len(tokenizer("")["input_ids"])
    words = [word for word in tokenizer.get_vocab() if word.isascii() and word.isalpha()]
    words = sorted(word for word in words if len(word) > 3)
    found = []
    for _ in range(num):
        text = " ".join(rng.choices(words, k=tokens))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"][: tokens - special]
        found.append(tokenizer.decode(ids))
    return found


def main() -> None:
    """Answers until stdin ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--engine", choices=sorted(ENGINES), required=True)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--level", help="of the CPU kernels, for mmdeploy_llm")
    args = parser.parse_args()
    own = {"level": args.level} if args.engine == "mmdeploy_llm" else {}
    name, encode = ENGINES[args.engine](args.model, args.precision, **own)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    serve.answer({"engine": name, "load": time.perf_counter() - BEGUN})
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["tokens"]:
            items: Any = documents(tokenizer, asked["num"], asked["tokens"], asked["seed"])
        else:
            items = workloads.images(asked["num"], asked["seed"])
        begin = time.perf_counter()
        encode(items)
        serve.answer({"seconds": time.perf_counter() - begin})


if __name__ == "__main__":
    main()
