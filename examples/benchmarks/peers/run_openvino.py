"""OpenVINO GenAI, for compare.py. --model: an exported folder; its weights say whether they are
int8, activations are bf16 either way, float32 where the machine is held to AVX2."""

import os
import time

BEGUN = time.perf_counter()

from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import openvino  # noqa: E402
import openvino_genai as genai  # noqa: E402
import serve  # noqa: E402
import workloads  # noqa: E402

CACHE_GIBIBYTES = 4


class OpenVINO:
    """See serve.Engine."""

    def __init__(self, model: str, has_images: bool) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GIBIBYTES
        scheduler.max_num_seqs = serve.MAX_NUM_SEQS
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = 1024 if has_images else 512
        is_held = os.environ.get("ONEDNN_MAX_CPU_ISA") == "AVX2"  # which has no products of bf16
        options = {"INFERENCE_PRECISION_HINT": "f32" if is_held else "bf16"}
        self._pipe = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", options, {})

    def texts(self, requests: list[workloads.TextRequest]) -> int:
        """See serve.Engine."""
        ids = [openvino.Tensor(np.array([r.token_ids], dtype=np.int64)) for r in requests]
        results = self._pipe.generate(ids, [_config(r.num_output_tokens) for r in requests])
        return sum(len(result.m_generation_ids[0]) for result in results)

    def images(self, images: list[Any], num_output_tokens: int) -> int:
        """See serve.Engine. The pipeline puts the question into the model's chat template."""
        self._pipe.generate(
            [workloads.QUESTION] * len(images),
            images=[[openvino.Tensor(np.asarray(image)[None])] for image in images],
            generation_config=[_config(num_output_tokens)] * len(images),
        )
        return len(images) * num_output_tokens


def _config(num_tokens: int) -> Any:
    config = genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = num_tokens
    config.ignore_eos, config.do_sample = True, False
    return config


if __name__ == "__main__":
    args = serve.parse()
    version = genai.__version__.split("-")[0]
    serve.serve(f"OpenVINO GenAI {version}", BEGUN, OpenVINO(args.model, args.images))
