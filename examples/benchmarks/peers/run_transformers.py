"""transformers' generate, one static batch of all requests, for compare.py.

It runs in bfloat16, or in float32 where the machine, or what it is held to, has no products of
bfloat16.
"""

import time

BEGUN = time.perf_counter()

import os  # noqa: E402
import sys  # noqa: E402
from typing import Any  # noqa: E402

import serve  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
import workloads  # noqa: E402


class StaticBatch:
    """See serve.Engine. What the batch generates beyond a request's tokens is not counted."""

    def __init__(self, model: str, has_images: bool) -> None:
        auto = transformers.AutoModelForCausalLM
        if has_images:
            auto = transformers.AutoModelForImageTextToText
        self._model = auto.from_pretrained(model, dtype=_dtype())
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        self._processor = None
        if has_images:
            self._processor = _image_processor(self._model.config.model_type, model)

    def texts(self, requests: list[workloads.TextRequest]) -> int:
        """See serve.Engine."""
        width = max(len(request.token_ids) for request in requests)
        pads = [width - len(request.token_ids) for request in requests]
        pad = self._tokenizer.pad_token_id
        rows = [[pad] * n + r.token_ids for n, r in zip(pads, requests, strict=True)]
        mask = [[0] * n + [1] * (width - n) for n in pads]
        steps = max(request.num_output_tokens for request in requests)
        self._generate(steps, input_ids=torch.tensor(rows), attention_mask=torch.tensor(mask))
        return sum(request.num_output_tokens for request in requests)

    def images(self, images: list[Any], num_output_tokens: int) -> int:
        """See serve.Engine."""
        assert self._processor is not None
        pixels = self._processor(images, return_tensors="pt")
        prompt = workloads.image_prompt(self._model.config.model_type)
        if "num_soft_tokens_per_image" in pixels:
            pad, num_tokens = "<|image|>", int(pixels.pop("num_soft_tokens_per_image")[0])
            prompt = prompt.replace(pad, f"<|image>{pad * num_tokens}<image|>")
        else:
            pad = "<|image_pad|>"
            num_tokens = int(pixels["image_grid_thw"][0].prod()) // self._processor.merge_size**2
            prompt = prompt.replace(pad, pad * num_tokens)
        words = self._tokenizer([prompt] * len(images), return_tensors="pt")
        ids = words["input_ids"]
        kinds = (ids == self._model.config.image_token_id).int()
        mask = words["attention_mask"]
        self._generate(
            num_output_tokens,
            input_ids=ids,
            attention_mask=mask,
            mm_token_type_ids=kinds,
            **pixels,
        )
        return len(images) * num_output_tokens

    def _generate(self, num_tokens: int, **inputs: Any) -> None:
        self._model.generate(
            **inputs, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False
        )


def _dtype() -> torch.dtype:
    is_held = os.environ.get("ONEDNN_MAX_CPU_ISA") == "AVX2"
    has_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported() and not is_held
    return torch.bfloat16 if has_bf16 else torch.float32


def _image_processor(model_type: str, model: str) -> Any:
    if model_type == "gemma4":
        from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

        return Gemma4ImageProcessorPil.from_pretrained(model)
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil.from_pretrained(model)


if __name__ == "__main__":
    args = serve.parse()
    if args.precision != "bf16":
        sys.exit("transformers is compared with bf16 only")
    kind = str(_dtype()).removeprefix("torch.")
    name = f"transformers {transformers.__version__}, static batch, {kind}"
    serve.serve(name, BEGUN, StaticBatch(args.model, args.images))
