"""Measures speculative="mtp" for one request: the bundled model with its draft layer.

    python examples/benchmarks/draft_head.py
    python examples/benchmarks/draft_head.py --threads 1 --rounds 7
    python examples/benchmarks/draft_head.py --shape glm4_moe --folder /tmp/drafts
    python examples/benchmarks/draft_head.py --shape glm4_moe --dtype float32 --rounds 1

Two engines, with drafts and without, describe the same pictures in turn, one after the other, and
say what they see before they answer. Prints for each round the tokens per second of both after the
first token, the ratio, and how many drafts were right; then the median of the ratios. Both must
give the same answers.

--shape: a checkpoint with the layers of glm4_moe (GLM-4.5), glm4_moe_lite (GLM-4.7-Flash) or
deepseek_v3, 12 of them with 1,024 channels and 16 experts, and random weights. Its layers change
little and its draft layer reads the embedding as the first one does, so that most guesses are
right. Prompts are of 64 tokens; answers may differ by ties of bf16, which are counted. In
float32 none may differ.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from checkpoints import tokenizer
from models_here import check_model
from safetensors.torch import load_file, save_file

from mmdeploy_llm import LLM, SamplingParams

PICTURES = sorted((Path(__file__).parent.parent / "images").glob("picture-*"))
PARAMS = SamplingParams(temperature=0, max_tokens=128)
NUM_LAYERS, SIZE, VOCAB_SIZE = 12, 1024, 16_000
SHARED = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": SIZE,
    "intermediate_size": 2816,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
}
LATENT = {"q_lora_rank": 384, "kv_lora_rank": 256, "qk_rope_head_dim": 32, "v_head_dim": 64}
LATENT |= {"qk_nope_head_dim": 64, "first_k_dense_replace": 1}
SHAPES = {
    "glm4_moe": {"head_dim": 64, "num_key_value_heads": 4, "use_qk_norm": True},
    "glm4_moe_lite": LATENT,
    "deepseek_v3": LATENT,
}
OUTPUTS = re.compile(r"(o_proj|down_proj)(\.weight)?$")


def write_shape(kind: str, folder: Path) -> Path:
    """Writes a checkpoint whose draft layer, one more after the last one, guesses right."""
    config = transformers.AutoConfig.for_model(kind, **{**SHARED, **SHAPES[kind]})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="100GB")
    tokenizer().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    last, new = f"model.layers.{NUM_LAYERS - 1}.", f"model.layers.{NUM_LAYERS}."
    tensors |= {
        key.replace(last, new): value.clone() for key, value in tensors.items() if last in key
    }
    for key in [key for key in tensors if OUTPUTS.search(key)]:
        tensors[key] = tensors[key] * 0.003
    ones = torch.ones(SIZE, dtype=torch.bfloat16)
    proj = torch.cat([torch.diag(ones), torch.zeros_like(torch.diag(ones))], 1)
    tensors |= {f"{new}{name}.weight": ones.clone() for name in ("enorm", "hnorm")}
    tensors |= {f"{new}shared_head.norm.weight": ones, f"{new}eh_proj.weight": proj}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def chat_about(picture: Path) -> list[dict[str, Any]]:
    """Returns the question about a picture."""
    text = {"type": "text", "text": "Describe the image."}
    return [{"role": "user", "content": [{"type": "image", "image": str(picture)}, text]}]


def outputs_of(llm: LLM, *, has_pictures: bool) -> Iterator[Any]:
    """Yields an output for each picture, or for each prompt of tokens."""
    if has_pictures:
        for picture in PICTURES:
            yield from llm.chat(chat_about(picture), PARAMS, use_tqdm=False)
        return
    params = SamplingParams(temperature=0, max_tokens=128, ignore_eos=True)
    for number in range(5):
        ids = [(number * 7919 + 31 * at) % (VOCAB_SIZE - 1000) + 500 for at in range(64)]
        yield from llm.generate([ids], params, use_tqdm=False)


def answers(llm: LLM, *, has_pictures: bool) -> tuple[float, list[Any]]:
    """Returns the tokens per second after the first token of all answers, and their tokens."""
    seconds, count, found = 0.0, 0, []
    for output in outputs_of(llm, has_pictures=has_pictures):
        if output.error_msg:
            raise SystemExit(output.error_msg)
        metrics = output.metrics
        seconds += metrics.model_forward_time - metrics.first_token_time
        count += len(output.outputs.token_ids) - 1
        found.append(output.outputs.token_ids)
    return count / seconds, found


def main() -> None:
    """Prints one line for each round."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="shapes-vl", help="name or folder (shapes-vl)")
    parser.add_argument("--shape", choices=SHAPES, help="of a random checkpoint in --folder")
    parser.add_argument("--folder", type=Path, default=Path("drafts"), help="for --shape (drafts)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quantization", help="as in LLM, for example int8 (none)")
    parser.add_argument("--dtype", default="auto", help="as in LLM, for example float32 (auto)")
    parser.add_argument("--threads", type=int, help="cores to compute on (all)")
    args = parser.parse_args()
    options: dict[str, Any] = {"quantization": args.quantization, "num_threads": args.threads}
    options |= {"quiet": True, "max_num_seqs": 1, "dtype": args.dtype}
    model = args.model if args.shape is None else str(args.folder / args.shape)
    if args.shape is not None and not Path(model).exists():
        write_shape(args.shape, Path(model))
    check_model(parser, model)
    plain, drafted = (LLM(model, speculative=kind, **options) for kind in (None, "mtp"))
    ratios = []
    for number in range(args.rounds + 1):
        before = drafted.stats()
        (slow, wanted), (fast, found) = (
            answers(llm, has_pictures=args.shape is None) for llm in (plain, drafted)
        )
        after = drafted.stats()
        num_others = sum(one != other for one, other in zip(found, wanted, strict=True))
        if num_others and (args.shape is None or args.dtype == "float32"):
            raise SystemExit("the answers differ")
        if not number:  # both record their steps, and time them
            continue
        ratios.append(fast / slow)
        num_right = after.num_accepted_drafts - before.num_accepted_drafts
        print(
            f"{slow:.0f} tok/s without, {fast:.0f} with: ratio {fast / slow:.2f}, {num_right} of "
            f"{after.num_drafts - before.num_drafts} drafts right, {num_others} other answers",
            flush=True,
        )
    print(f"median of the ratios: {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
