"""This project's engine, for compare.py."""

import time

BEGUN = time.perf_counter()

import json  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import serve  # noqa: E402
import workloads  # noqa: E402

from mmdeploy_llm import LLM, SamplingParams, __version__  # noqa: E402

QUANTIZATIONS: dict[str, Any] = {"bf16": None, "int8": "int8", "int4": "int4"}


class Ours:
    """See serve.Engine."""

    def __init__(self, model: str, precision: str, level: str | None) -> None:
        config = json.loads((Path(model) / "config.json").read_text())
        self._image_prompt = workloads.image_prompt(config["model_type"])
        self._llm = LLM(
            model,
            dtype="bfloat16",
            cpu_level=level,
            quantization=QUANTIZATIONS[precision],
            max_num_seqs=serve.MAX_NUM_SEQS,
            enable_prefix_caching=False,
        )

    def texts(self, requests: list[workloads.TextRequest]) -> int:
        """See serve.Engine."""
        params = [_params(request.num_output_tokens) for request in requests]
        return self._generate([request.token_ids for request in requests], params)

    def images(self, images: list[Any], num_output_tokens: int) -> int:
        """See serve.Engine."""
        prompts = [
            {"prompt": self._image_prompt, "multimodal_data": {"image": [image]}}
            for image in images
        ]
        return self._generate(prompts, _params(num_output_tokens))

    def _generate(self, prompts: list[Any], params: Any) -> int:
        outputs = self._llm.generate(prompts, params, use_tqdm=False, on_error="raise")
        return sum(len(output.outputs.token_ids) for output in outputs)


def _params(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


if __name__ == "__main__":
    args = serve.parse()
    serve.serve(f"mmdeploy_llm {__version__}", BEGUN, Ours(args.model, args.precision, args.level))
