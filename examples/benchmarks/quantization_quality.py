"""Compares the logits of quantised weights and of bf16 for every prompt token of the text workload.

    python examples/benchmarks/quantization_quality.py MODEL_FOLDER [--other NAME=PATH]...

Runs all prompts of a text model in one step over a paged cache: in bf16, with each quantization of
the weights, and with a KV cache in int8 and in int4. Prints for each run, compared with bf16: the
mean Kullback-Leibler divergence of a token in nats, the mean cosine of the logits, the share of
tokens with the same most probable next token, and that share among tokens where bf16's top two
logits clearly differ (random weights produce many ties).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import workloads
from models_here import check_folder
from torch import Tensor

from mmdeploy_llm.forward import ForwardInputs
from mmdeploy_llm.hooks import BatchLayout, PluginManager
from mmdeploy_llm.kernels import cpu as native
from mmdeploy_llm.layers.attention.cache_memory import KVCacheShape, allocate
from mmdeploy_llm.layers.attention.native import NativeAttention
from mmdeploy_llm.layers.install import install_kernels
from mmdeploy_llm.values.options.weight_formats import FORMATS
from mmdeploy_llm.weights.folder import read_checkpoint
from mmdeploy_llm.weights.load import build_model

BLOCK_SIZE = 64
CLEAR_MARGIN = 0.1  # of the top two logits, in standard deviations of the logits


def load(folder: Path, kernels: native.CpuKernels, quantization: Any) -> Any:
    """Loads the model and packs its linear layers for the kernels."""
    plugins, checkpoint = PluginManager.load(), read_checkpoint(folder)
    spec = plugins.model_for(checkpoint.config.architectures, checkpoint.config)
    device = torch.device("cpu")
    model = build_model(plugins.resolve(spec), checkpoint, torch.bfloat16, device)
    install_kernels(model, kernels, quantization)
    return model


@torch.inference_mode()
def logits(
    model: Any, kernels: native.CpuKernels, prompts: list[list[int]], dtype: torch.dtype
) -> Tensor:
    """Returns the logits [tokens, vocab] of all prompts, computed with a KV cache of `dtype`."""
    lengths = tuple(len(prompt) for prompt in prompts)
    blocks_each = -(-max(lengths) // BLOCK_SIZE)
    shape = KVCacheShape.uniform(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=BLOCK_SIZE,
        dtype=dtype,
    )
    tables = torch.arange(len(prompts) * blocks_each, dtype=torch.int32).view(-1, blocks_each)
    positions = [torch.arange(length) for length in lengths]
    slots = [own + i * blocks_each * BLOCK_SIZE for i, own in enumerate(positions)]
    layout = BatchLayout(
        num_decode=0,
        query_lens=lengths,
        context_lens=lengths,
        block_tables=tables,
        slots=torch.cat(slots),
    )
    cache = allocate(shape, tables.numel(), torch.device("cpu"))
    inputs = ForwardInputs(
        token_ids=torch.tensor([token for prompt in prompts for token in prompt]),
        positions=torch.cat(positions),
        in_prompt=torch.ones(sum(lengths), dtype=torch.bool),
        attn=NativeAttention(kernels).begin(layout, cache),
    )
    hidden = model.forward(inputs)
    result: Tensor = model.logits(hidden)
    return result


def compare(name: str, found: Tensor, expected: Tensor) -> None:
    """Prints one line of statistics."""
    cosines = torch.cosine_similarity(found.float(), expected.float(), -1)
    ours, theirs = (x.float().log_softmax(-1) for x in (found, expected))
    divergence = (theirs.exp() * (theirs - ours)).sum(-1)
    is_same = found.argmax(-1) == expected.argmax(-1)
    first, second = expected.float().topk(2).values.unbind(-1)
    is_clear = first - second > CLEAR_MARGIN * expected.float().std()
    print(
        f"{name}: KL {divergence.mean():.5f}, cosine {cosines.mean():.5f} (lowest "
        f"{cosines.min():.5f}), same top token {is_same.float().mean():.2%}; where the "
        f"choice is clear ({is_clear.float().mean():.0%} of tokens) "
        f"{is_same[is_clear].float().mean():.2%}"
    )


def main() -> None:
    """Compares on 16 prompts, so that the logits fit into memory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--other",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="the same model rounded by another engine: a GGUF file, or a folder that "
        "peers/openvino_weights.py wrote; its weights are compared in bf16 products",
    )
    args = parser.parse_args()
    check_folder(parser, args.folder)
    folder = args.folder
    kernels = native.load()
    prompts = [list(request.token_ids) for request in workloads.text()][:16]
    expected = logits(load(folder, kernels, None), kernels, prompts, torch.bfloat16)
    for quantization in FORMATS:
        quantized = load(folder, kernels, quantization)
        compare(quantization, logits(quantized, kernels, prompts, torch.bfloat16), expected)
        del quantized
    for name, _, path in (other.partition("=") for other in args.other):
        rounded = load(Path(path), kernels, None)
        compare(name, logits(rounded, kernels, prompts, torch.bfloat16), expected)
        del rounded
    plain = load(folder, kernels, None)
    for dtype in (torch.int8, torch.int4):
        name = str(dtype).removeprefix("torch.")
        compare(f"bf16, KV in {name}", logits(plain, kernels, prompts, dtype), expected)


if __name__ == "__main__":
    main()
