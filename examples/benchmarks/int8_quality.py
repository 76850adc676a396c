"""How near int8 stays to bf16: logits of every prompt token of the text workload.

    python examples/benchmarks/int8_quality.py MODEL_FOLDER

Three runs of one text model, all prompts in one step over a paged cache: in bf16; with linear
layers in int8; with linear layers and the KV cache in int8. Printed for the last two against the
first: the mean cosine of the logits, the share of tokens whose most probable next token is the
same, and that share where bf16's first two choices lie apart (random weights give many ties).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import workloads
from torch import Tensor

from mmdeploy_llm import native
from mmdeploy_llm.attention.base import BatchLayout
from mmdeploy_llm.attention.native import NativeAttention
from mmdeploy_llm.forward import ForwardInputs
from mmdeploy_llm.hooks import PluginManager
from mmdeploy_llm.intake.checkpoint import read_checkpoint
from mmdeploy_llm.layers.install import install_kernels
from mmdeploy_llm.runner.kv_cache import KVCacheShape, allocate
from mmdeploy_llm.weights.load import build_model

BLOCK_SIZE = 64
APART = 0.1  # of the logits' standard deviation


def load(folder: Path, kernels: native.CpuKernels, quantization: Any) -> Any:
    """The model, its linear layers packed."""
    plugins, checkpoint = PluginManager.load(), read_checkpoint(folder)
    spec = plugins.model_for(checkpoint.config.architectures)
    device = torch.device("cpu")
    model = build_model(plugins.resolve(spec), checkpoint, torch.bfloat16, device)
    install_kernels(model, kernels, quantization)
    return model


@torch.inference_mode()
def logits(
    model: Any, kernels: native.CpuKernels, prompts: list[list[int]], dtype: torch.dtype
) -> Tensor:
    """[tokens, vocab] of all prompts, with a KV cache of `dtype`."""
    lengths = tuple(len(prompt) for prompt in prompts)
    blocks_each = -(-max(lengths) // BLOCK_SIZE)
    shape = KVCacheShape(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=BLOCK_SIZE,
        dtype=dtype,
    )
    tables = torch.arange(len(prompts) * blocks_each, dtype=torch.int32).view(-1, blocks_each)
    places = [torch.arange(length) for length in lengths]
    slots = [place + i * blocks_each * BLOCK_SIZE for i, place in enumerate(places)]
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
        positions=torch.cat(places),
        in_prompt=torch.ones(sum(lengths), dtype=torch.bool),
        attn=NativeAttention(kernels).begin(layout, cache),
    )
    hidden = model.forward(inputs)
    result: Tensor = model.logits(hidden)
    return result


def compare(name: str, found: Tensor, expected: Tensor) -> None:
    """Prints one line."""
    cosines = torch.cosine_similarity(found.float(), expected.float(), -1)
    is_same = found.argmax(-1) == expected.argmax(-1)
    first, second = expected.float().topk(2).values.unbind(-1)
    is_apart = first - second > APART * expected.float().std()
    print(
        f"{name}: cosine {cosines.mean():.5f} (lowest {cosines.min():.5f}), same first choice "
        f"{is_same.float().mean():.2%}, where it is clear {is_same[is_apart].float().mean():.2%} "
        f"of {is_apart.float().mean():.0%}"
    )


def main() -> None:
    """One batch of prompts at a time, so that the logits fit into memory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    kernels = native.load()
    prompts = [list(request.token_ids) for request in workloads.text()][:16]
    expected = logits(load(folder, kernels, None), kernels, prompts, torch.bfloat16)
    quantized = load(folder, kernels, "int8")
    compare("int8", logits(quantized, kernels, prompts, torch.bfloat16), expected)
    compare("int8, KV too", logits(quantized, kernels, prompts, torch.int8), expected)
    plain = load(folder, kernels, None)
    compare("bf16, KV in int8", logits(plain, kernels, prompts, torch.int8), expected)


if __name__ == "__main__":
    main()
