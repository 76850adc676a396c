"""What adapters cost: the text workload without any, with one and with eight mixed.

    python examples/benchmarks/checkpoints.py FOLDER qwen05
    python examples/benchmarks/adapters.py FOLDER/qwen05 [--quantization int8] [--requests 32]

FOLDER/qwen3moe has experts, which the adapters change too.

Writes adapters of rank 16 on all projections beside the model. The three runs take turns in one
process, and the best time of each counts; on a machine that is not idle, compare the seconds of the
processor. --peft does the same with transformers and PEFT: one static batch, one adapter merged or
not. --vllm does it with vLLM, in whose environment (peers/README.md) the script runs then.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from models_here import check_folder
from safetensors.torch import save_file
from workloads import text

RANK, NUM_ADAPTERS = 16, 8
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def shapes_of(config: Mapping[str, Any]) -> Mapping[str, tuple[int, int]]:
    """Returns the projections of a layer, by their path in it: columns and rows."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    keys = size * config["num_key_value_heads"]
    found = {"k_proj": (hidden, keys), "v_proj": (hidden, keys)}
    found |= {"q_proj": (hidden, size * heads), "o_proj": (size * heads, hidden)}
    found = {f"self_attn.{name}": shape for name, shape in found.items()}
    experts = range(config.get("num_experts") or config.get("num_local_experts") or 0)
    inner = config["moe_intermediate_size" if experts else "intermediate_size"]
    for part in [f"mlp.experts.{expert}" for expert in experts] or ["mlp"]:
        found |= {f"{part}.{name}_proj": (hidden, inner) for name in ("gate", "up")}
        found[f"{part}.down_proj"] = (inner, hidden)
    return found


def write_adapter(model: Path, folder: Path, seed: int) -> Path:
    """Writes a random adapter of all projections of a Qwen2 or Qwen3 MoE, those of experts too."""
    config = json.loads((model / "config.json").read_text())
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (columns, rows) in shapes_of(config).items():
            path = f"base_model.model.model.layers.{layer}.{name}"
            for half, shape in (("A", (RANK, columns)), ("B", (rows, RANK))):
                tensors[f"{path}.lora_{half}.weight"] = 0.01 * torch.randn(
                    shape, generator=generator
                ).to(torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    values = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": [*PROJECTIONS]}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def seconds(run: Callable[[], object]) -> tuple[float, float]:
    """Returns how long a run takes: on the clock, and of the processor."""
    wall, own = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - own


def compare(runs: Mapping[str, Callable[[], object]], rounds: int) -> None:
    """Prints the best times of runs that take turns, each relative to the first."""
    best: dict[str, tuple[float, float]] = {}
    for name, run in [*runs.items()] * (rounds + 1):
        found = seconds(run)
        is_first = name not in best  # the first of each is a warm-up
        best[name] = (1e9, 1e9) if is_first else tuple(map(min, best[name], found))  # type: ignore
    first = next(iter(best.values()))
    for name, (wall, own) in best.items():
        print(
            f"{name:24} {wall:8.2f} s ({wall / first[0]:.3f})   "
            f"processor {own:8.2f} s ({own / first[1]:.3f})",
            flush=True,
        )


def ours(model: Path, folders: list[Path], options: argparse.Namespace) -> None:
    """Measures this engine."""
    from mmdeploy_llm import LLM, SamplingParams

    requests = text(options.requests)
    adapters = {f"a{index}": folder for index, folder in enumerate(folders)}
    given: dict[str, Any] = {"enable_prefix_caching": False, "quiet": True}
    given |= {"quantization": options.quantization, "num_threads": options.threads}
    with LLM(str(model), adapters=adapters, max_model_len=1024, **given) as llm:
        params = [
            SamplingParams(temperature=0, max_tokens=own.num_output_tokens, ignore_eos=True)
            for own in requests
        ]

        def run(num: int) -> Callable[[], object]:
            names = [f"a{index % num}" if num else None for index in range(len(requests))]
            ids = [own.token_ids for own in requests]
            return lambda: llm.generate(ids, params, use_tqdm=False, adapter=names)

        compare(
            {"no adapter": run(0), "one": run(1), f"{NUM_ADAPTERS} mixed": run(NUM_ADAPTERS)},
            options.rounds,
        )


def pefts(model: Path, folder: Path, options: argparse.Namespace) -> None:
    """Measures transformers with PEFT, in one padded batch of as many tokens."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    plain: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    own = PeftModel.from_pretrained(plain, folder)
    requests = text(options.requests)
    length = max(len(request.token_ids) for request in requests)
    count = max(request.num_output_tokens for request in requests)
    rows = [[0] * (length - len(x.token_ids)) + x.token_ids for x in requests]
    ids = torch.tensor(rows)
    given = {"attention_mask": (ids != 0).long(), "min_new_tokens": count, "max_new_tokens": count}

    def alone() -> object:
        with own.disable_adapter(), torch.inference_mode():
            return own.generate(input_ids=ids, do_sample=False, **given)

    def adapted() -> object:
        with torch.inference_mode():
            return own.generate(input_ids=ids, do_sample=False, **given)

    compare({"PEFT: no adapter": alone, "PEFT: one": adapted}, options.rounds)


def vllms(model: Path, folders: list[Path], options: argparse.Namespace) -> None:
    """Measures vLLM, in this process."""
    threads = options.threads or len(os.sched_getaffinity(0))
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
    model, folders = model.resolve(), [own.resolve() for own in folders]
    sys.path.pop(0)  # transformers would take kernels.py here for the package of that name, and so
    os.chdir(model)  # would vLLM's processes, which look in the current folder
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    requests = text(options.requests)
    prompts: Any = [{"prompt_token_ids": own.token_ids} for own in requests]
    params = [
        SamplingParams(temperature=0, max_tokens=own.num_output_tokens, ignore_eos=True)
        for own in requests
    ]
    llm = LLM(
        str(model),
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=64,
        enable_prefix_caching=False,
        enable_lora=True,
        max_loras=NUM_ADAPTERS,
        max_lora_rank=RANK,
    )
    adapters = [
        LoRARequest(f"a{index}", index + 1, str(folder)) for index, folder in enumerate(folders)
    ]

    def run(num: int) -> Callable[[], object]:
        own = [adapters[index % num] for index in range(len(requests))] if num else None
        return lambda: llm.generate(prompts, params, use_tqdm=False, lora_request=own)

    compare(
        {"vLLM: no adapter": run(0), "one": run(1), f"{NUM_ADAPTERS} mixed": run(NUM_ADAPTERS)},
        options.rounds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--quantization")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--peft", action="store_true")
    parser.add_argument("--vllm", action="store_true")
    options = parser.parse_args()
    check_folder(parser, options.model)
    folders = [
        write_adapter(options.model, options.model.parent / f"adapter-{index}", index)
        for index in range(NUM_ADAPTERS)
    ]
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.vllm:
        vllms(options.model, folders, options)
    elif options.peft:
        pefts(options.model, folders[0], options)
    else:
        ours(options.model, folders, options)


if __name__ == "__main__":
    main()
