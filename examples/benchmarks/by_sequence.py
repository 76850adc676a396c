"""Compares models whose attention transformers computes, one sequence after the other, with a
plugin for the family, or with a Llama of the same sizes where there is none.

    python examples/benchmarks/by_sequence.py [NAME ...] [--rounds 2]

Ten classes with random weights in bf16: 8 layers of 896 channels, 32,000 tokens in the vocabulary.
Eight texts at once, 32 tokens out, greedily with end-of-sequence ignored, on one thread. Prints
seconds of CPU time, which other load affects least, and their ratio. "alone" is transformers_any
with a pass for each sequence, as it is where sequences cannot share one.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers_any import requests

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.testing.checkpoint import write_checkpoint
from mmdeploy_llm.testing.tiny import make_tokenizer

NUM_REQUESTS, NUM_TOKENS = 8, 32
SIZES = {
    "vocab_size": 32000,
    "hidden_size": 896,
    "intermediate_size": 2432,
    "num_hidden_layers": 8,
    "num_attention_heads": 14,
    "max_position_embeddings": 2048,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
MAMBA = {"mamba_n_heads": 28, "mamba_d_head": 64}
# Class -> (the config's class, its fields, the plugin of the family or None).
CASES: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "BambaForCausalLM": (
        "BambaConfig",
        {**GROUPED, **MAMBA, "attn_layer_indices": [3, 7]},
        "granite",
    ),
    "GraniteMoeHybridForCausalLM": (
        "GraniteMoeHybridConfig",
        {
            **GROUPED,
            **MAMBA,
            "num_local_experts": 0,
            "shared_intermediate_size": 2432,
            "layer_types": [*["mamba"] * 3, "attention"] * 2,
        },
        "granite",
    ),
    "Lfm2MoeForCausalLM": (
        "Lfm2MoeConfig",
        {**GROUPED, **EXPERTS, "layer_types": [*["conv"] * 3, "full_attention"] * 2},
        "lfm",
    ),
    "Qwen3NextForCausalLM": (
        "Qwen3NextConfig",
        {**GROUPED, **EXPERTS, "head_dim": 64, "shared_expert_intermediate_size": 512},
        "qwen",
    ),
    "BloomForCausalLM": ("BloomConfig", {**SIZES, "n_layer": 8, "n_head": 14}, "decoders"),
    "MptForCausalLM": (
        "MptConfig",
        {"vocab_size": 32000, "d_model": 896, "n_layers": 8, "n_heads": 14, "max_seq_len": 2048},
        "decoders",
    ),
    "FalconForCausalLM": ("FalconConfig", {**SIZES, "alibi": True, "bias": True}, "decoders"),
    "GPTNeoForCausalLM": (
        "GPTNeoConfig",
        {**SIZES, "num_layers": 8, "num_heads": 14, "attention_types": [[["global", "local"], 4]]},
        "decoders",
    ),
    "DiffLlamaForCausalLM": ("DiffLlamaConfig", GROUPED, None),
    "FalconH1ForCausalLM": ("FalconH1Config", {**GROUPED, **MAMBA, "mamba_d_ssm": 1792}, None),
}


def write(kind: str, architecture: str, fields: dict[str, Any], folder: Path) -> Path:
    """Writes a checkpoint with random weights."""
    tokenizer = make_tokenizer("qwen2")
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = getattr(transformers, kind)(**{**fields, **ends, "pad_token_id": 0})
    config.architectures = [architecture]
    write_checkpoint(config, folder, tokenizer=tokenizer, dtype=torch.bfloat16)
    return folder


def started(folder: Path, blocked: str | None) -> LLM:
    """Returns an engine on one thread."""
    return LLM(
        model=str(folder),
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=NUM_REQUESTS,
        num_threads=1,
        blocked_plugins=() if blocked is None else (blocked,),
        enable_prefix_caching=False,
        kv_cache_memory=2**29,
    )


def seconds(llm: LLM, seed: int) -> float:
    """Returns seconds of CPU time for all requests, prompts included."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    begin = time.process_time()
    outputs = llm.generate(requests(NUM_REQUESTS, None, seed), params, use_tqdm=False)
    assert all(output.is_ok for output in outputs), outputs[0].error_msg
    return time.process_time() - begin


def compare(name: str, rounds: int, folder: Path) -> None:
    """Prints the medians of a class and their ratios; the engines take turns."""
    kind, fields, plugin = CASES[name]
    own = write(kind, name, fields, folder / "own")
    other = own
    if plugin is None:
        other = write("LlamaConfig", "LlamaForCausalLM", GROUPED, folder / "llama")
    native, shared, alone = started(other, None), started(own, plugin), started(own, plugin)
    assert shared.model.attends_itself, f"{name} is not served by sequence"
    alone.model._way._alone = "to compare"
    engines = {"native": native, "transformers_any": shared, "alone": alone}
    found: dict[str, list[float]] = {engine: [] for engine in engines}
    for seed in range(-1, rounds):
        for engine, llm in engines.items():
            taken = seconds(llm, seed)
            if seed >= 0:  # the first round only warms up
                found[engine].append(taken)
    least, own_time, alone_time = (statistics.median(times) for times in found.values())
    print(
        f"{name:32} {'its plugin' if plugin else 'Llama':10} {least:6.2f} s, "
        f"transformers_any {own_time:6.2f} s ({own_time / least:.2f}), "
        f"alone {alone_time:6.2f} s ({alone_time / least:.2f})",
        flush=True,
    )
    for llm in engines.values():
        llm.close()


def main() -> None:
    """Compares the classes that the command line names, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(CASES))
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    for name in args.names:
        with tempfile.TemporaryDirectory() as folder:
            compare(name, args.rounds, Path(folder))
        gc.collect()


if __name__ == "__main__":
    main()
