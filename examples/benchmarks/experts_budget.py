"""Answers with a mixture of experts of 30 B parameters in 4 bits, of which 3 B compute a token,
where the memory does not hold it.

    experts_budget.py write FOLDER [--layers 48]
    experts_budget.py run FOLDER [--weight-cache FOLDER] [--tokens 64] [--temperature 0] [...]

write makes a random checkpoint with the shapes of Qwen3-30B-A3B, 16 GB, shard by shard: all
matrices of its layers in 4 bits (compressed-tensors, groups of 128, symmetric), embeddings and head
in bfloat16. run answers one text after another, and prints for each how many tokens a second came,
the first 16 and then, and how many bytes were read from the disk. The first run writes the cache of
weights. A limit on the memory is that of a control group:

    in_group.py 8e9 experts_budget.py run FOLDER --weight-cache CACHE
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from memory_budget import status, write_coded
from models_here import check_folder

NUM_FIRST = 16


def config(layers: int, words: Any) -> Any:
    """Returns the config of Qwen3-30B-A3B, with the tokens of our tokenizer."""
    from transformers import Qwen3MoeConfig

    ids = {f"{kind}_token_id": getattr(words, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
    return Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
        **ids,
    )


def write(folder: Path, layers: int) -> None:
    """Writes the checkpoint."""
    import torch
    from checkpoints import tokenizer
    from transformers import Qwen3MoeForCausalLM

    folder.mkdir(parents=True)
    words = tokenizer()
    built = config(layers, words)
    with torch.device("meta"):
        state = Qwen3MoeForCausalLM(built).state_dict()
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in state.items():
        shape = tuple(tensor.shape)
        if len(shape) < 3:
            shapes[name] = shape
            continue
        # As checkpoints have them: a matrix of each expert, gate and up apart.
        place, _, kind = name.rpartition(".")
        parts = {"down_proj": shape[1:]}
        if kind == "gate_up_proj":
            parts = dict.fromkeys(("gate_proj", "up_proj"), (shape[1] // 2, shape[2]))
        for expert in range(shape[0]):
            shapes |= {f"{place}.{expert}.{own}.weight": each for own, each in parts.items()}
    write_coded(folder, built, "Qwen3MoeForCausalLM", shapes)
    words.save_pretrained(folder)


def num_read() -> int:
    """Returns the bytes that this process has had read from a disk."""
    with open("/proc/self/io", encoding="ascii") as file:
        lines = dict(line.split(":") for line in file)
    return int(lines["read_bytes"])


def run(args: argparse.Namespace) -> None:
    """Loads the model and asks one question after another; prints a line about each."""
    begin = time.perf_counter()
    from mmdeploy_llm import LLM, SamplingParams

    llm = LLM(
        str(args.folder),
        dtype="bfloat16",
        quantization=args.quantization,
        kv_cache_memory=args.kv_mb * 10**6,
        max_model_len=args.max_model_len,
        max_num_seqs=1,
        weight_cache=args.weight_cache,
        weight_cache_size=2**36,
        num_threads=args.threads,
    )
    loaded = time.perf_counter() - begin
    print(f"loaded after {loaded:.1f} s, {num_read() / 1e9:.2f} GB were read", flush=True)
    params = SamplingParams(
        temperature=args.temperature, seed=0, max_tokens=args.tokens, ignore_eos=True
    )
    for number in range(args.texts):
        ids = [(7919 * (number + 1) * (place + 1)) % 10000 + 100 for place in range(32)]
        before, began, times = num_read(), time.perf_counter(), [0.0]
        reads = []
        for part in llm.stream(ids, params):
            reads.append(num_read() - before)
            times += [time.perf_counter() - began] * len(part.outputs.token_ids)
        first = NUM_FIRST / times[NUM_FIRST]
        later = (args.tokens - NUM_FIRST) / (times[-1] - times[NUM_FIRST])
        now = status()
        print(
            f"text {number + 1}: {first:.2f} tokens a second and then {later:.2f}; "
            f"{reads[-1] / 1e9:.2f} GB were read; resident {now['VmRSS'] / 1e9:.2f} GB (anonymous "
            f"{now['RssAnon'] / 1e9:.2f})",
            flush=True,
        )
    llm.close()


def main() -> None:
    """Runs what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job", choices=["write", "run"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--texts", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0)
    parser.add_argument("--quantization")
    parser.add_argument("--kv-mb", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--weight-cache", default=True, metavar="FOLDER")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    if args.tokens <= NUM_FIRST:
        parser.error(f"--tokens must be more than {NUM_FIRST}, which are timed apart")
    if args.job == "write":
        write(args.folder, args.layers)
    else:
        check_folder(parser, args.folder, "experts_budget.py write FOLDER writes the model")
        run(args)


if __name__ == "__main__":
    main()
