"""vLLM on the CPU, compiled, for compare.py."""

import os
import time

BEGUN = time.perf_counter()

import json  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import serve  # noqa: E402
import workloads  # noqa: E402

NUM_CPUS = os.cpu_count() or 1
os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "4",
    "VLLM_CPU_OMP_THREADS_BIND": f"0-{NUM_CPUS - 1}",  # else one core is kept free
    "OMP_NUM_THREADS": str(NUM_CPUS),
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class VLLM:
    """See serve.Engine."""

    def __init__(self, model: str, has_images: bool) -> None:
        from vllm import LLM

        config = json.loads((Path(model) / "config.json").read_text())
        self._image_prompt = workloads.image_prompt(config["model_type"])
        media: dict[str, Any] = {}
        if has_images:
            media = {"limit_mm_per_prompt": {"image": 1, "video": 0}, "mm_processor_cache_gb": 0}
        self._llm = LLM(
            model,
            dtype="bfloat16",
            max_model_len=2048,
            max_num_seqs=serve.MAX_NUM_SEQS,
            enable_prefix_caching=False,
            disable_log_stats=True,
            **media,
        )

    def texts(self, requests: list[workloads.TextRequest]) -> int:
        """See serve.Engine."""
        prompts = [{"prompt_token_ids": request.token_ids} for request in requests]
        return self._generate(prompts, [_params(r.num_output_tokens) for r in requests])

    def images(self, images: list[Any], num_output_tokens: int) -> int:
        """See serve.Engine."""
        prompts = [
            {"prompt": self._image_prompt, "multi_modal_data": {"image": image}} for image in images
        ]
        return self._generate(prompts, _params(num_output_tokens))

    def _generate(self, prompts: list[Any], params: Any) -> int:
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)


def _params(num_tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


if __name__ == "__main__":
    args = serve.parse()
    if args.precision != "bf16":
        sys.exit("vLLM is compared in bf16 only")
    from importlib.metadata import version

    name = f"vLLM {version('vllm-cpu')}"
    serve.serve(name, BEGUN, VLLM(args.model, args.images))
