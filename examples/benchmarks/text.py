"""Compares output tokens per second on the text workload with transformers' static batch.

    python examples/benchmarks/text.py MODEL_FOLDER [--rounds 3]

Both run in bf16 with greedy decoding and end-of-sequence ignored, in one process, alternating,
`rounds` times; prints medians and their ratio. Tokens that the static batch generates beyond a
request's length are not counted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import workloads
from models_here import check_folder
from transformers import AutoModelForCausalLM

from mmdeploy_llm import LLM, SamplingParams


def ours(folder: str) -> Callable[[list[workloads.TextRequest]], int]:
    """Returns a function that runs requests on this engine and returns the number of tokens."""
    llm = LLM(model=folder, dtype="bfloat16", enable_prefix_caching=False)

    def run(requests: list[workloads.TextRequest]) -> int:
        params = [
            SamplingParams(temperature=0, max_tokens=request.num_output_tokens, ignore_eos=True)
            for request in requests
        ]
        outputs = llm.generate([request.token_ids for request in requests], params, use_tqdm=False)
        return sum(len(output.outputs.token_ids) for output in outputs)

    return run


def transformers(folder: str) -> Callable[[list[workloads.TextRequest]], int]:
    """Returns the same for transformers' generate with one left-padded static batch."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    pad = model.config.pad_token_id

    def run(requests: list[workloads.TextRequest]) -> int:
        width = max(len(request.token_ids) for request in requests)
        steps = max(request.num_output_tokens for request in requests)
        rows = [[pad] * (width - len(r.token_ids)) + r.token_ids for r in requests]
        mask = [[0] * (width - len(r.token_ids)) + [1] * len(r.token_ids) for r in requests]
        model.generate(
            input_ids=torch.tensor(rows),
            attention_mask=torch.tensor(mask),
            max_new_tokens=steps,
            min_new_tokens=steps,
            do_sample=False,
        )
        return sum(request.num_output_tokens for request in requests)

    return run


def main() -> None:
    """Alternates the engines, so that drift of the machine affects both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    check_folder(parser, Path(args.folder))
    engines = {"mmdeploy_llm": ours(args.folder), "transformers": transformers(args.folder)}
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for run in engines.values():
        run(workloads.text(num_requests=4, seed=1))
    for round_index in range(args.rounds):
        requests = workloads.text()
        for name, run in engines.items():
            begin = time.perf_counter()
            rates[name].append(run(requests) / (time.perf_counter() - begin))
            print(f"round {round_index + 1}  {name:13} {rates[name][-1]:7.1f} tok/s", flush=True)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratio = medians["mmdeploy_llm"] / medians["transformers"]
    pair = f"{medians['mmdeploy_llm']:.1f} against {medians['transformers']:.1f} tok/s"
    print(f"median: {pair}, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
