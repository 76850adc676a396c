"""transformers' generate, one static batch of all requests, for compare.py."""

import time

BEGUN = time.perf_counter()

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
        self._model = auto.from_pretrained(model, dtype=torch.bfloat16)
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        self._processor = None
        if has_images:
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
                Qwen2VLImageProcessorPil,
            )

            self._processor = Qwen2VLImageProcessorPil.from_pretrained(model)

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
        num_tokens = int(pixels["image_grid_thw"][0].prod()) // self._processor.merge_size**2
        pad = "<|image_pad|>"
        prompt = workloads.IMAGE_PROMPT.replace(pad, pad * num_tokens)
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


if __name__ == "__main__":
    args = serve.parse()
    if args.precision != "bf16":
        sys.exit("transformers is compared in bf16 only")
    name = f"transformers {transformers.__version__}, static batch"
    serve.serve(name, BEGUN, StaticBatch(args.model, args.images))
