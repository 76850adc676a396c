"""Compares this machine's computation with transformers' own model, on tiny models with random
weights: it finds a compiler or a processor whose kernels compute something else."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from mmdeploy_llm.client.llm import LLM
from mmdeploy_llm.errors import MMDeployLLMError
from mmdeploy_llm.testing.models.reference import Reference
from mmdeploy_llm.testing.tiny import families, write_tiny
from mmdeploy_llm.values.params import SamplingParams

from .findings import Finding, State

# Wide enough that every kernel runs its blocked loops and their remainders.
SIZES: Mapping[str, Any] = {
    "hidden_size": 288,
    "intermediate_size": 416,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 48,
}
LENGTHS = (1, 9, 40, 130)  # tokens of the prompts, which run together
NUM_TOKENS = 12  # generated for each
VOCAB = 100  # the prompts' ids are below


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way to compute. tolerance: how far below the most probable token's logit a token may be
    that is taken instead, as a share of the logits' standard deviation; 0: the same tokens."""

    name: str
    dtype: Literal["float32", "bfloat16"]
    quantization: str | None = None
    tolerance: float = 0.0


CASES = (
    Case(name="float32", dtype="float32"),
    Case(name="bfloat16", dtype="bfloat16", tolerance=0.1),
    Case(name="int8", dtype="bfloat16", quantization="int8", tolerance=0.5),
)


def self_test(*, has_kernels: bool) -> Iterator[Finding]:
    """Yields a finding for each way to compute on the CPU; takes some seconds. has_kernels: whether
    there are C++ kernels, without which int8 is left out."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny(_family(), Path(folder), **SIZES)
        reference = Reference(model)
        for case in CASES:
            if has_kernels or case.quantization is None:
                yield _run(case, model, reference)


def _family() -> str:
    """Returns the first installed family of text models whose operations are all the package's."""
    found = [name for name, spec in families().items() if spec.deterministic and not spec.media]
    assert found, "built-in plugins are always installed"
    return min(found)


def _run(case: Case, model: Path, reference: Reference) -> Finding:
    begin = time.perf_counter()
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]
    topic = f"self-test {case.name}"
    try:
        tokens = _generate(case, model, prompts)
    except MMDeployLLMError as error:
        return Finding(topic=topic, state=State.BAD, text=str(error), advice=_report(case))
    gap = max(_gap(reference, *pair) for pair in zip(prompts, tokens, strict=True))
    seconds = time.perf_counter() - begin
    if gap > case.tolerance:
        text = f"tokens are {gap:.2f} standard deviations from transformers' best"
        return Finding(topic=topic, state=State.BAD, text=text, advice=_report(case))
    count = sum(len(each) for each in tokens)
    same = "the tokens of" if gap == 0 else f"within {gap:.2f} standard deviations of"
    text = f"{count} tokens: {same} transformers, in {seconds:.1f} s"
    return Finding(topic=topic, state=State.GOOD, text=text)


def _generate(case: Case, model: Path, prompts: Sequence[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(
        model,
        device="cpu",
        quiet=True,
        dtype=case.dtype,
        quantization=case.quantization,
        max_num_batched_tokens=64,
    ) as llm:
        outputs = llm.generate(list(prompts), params, use_tqdm=False, on_error="raise")
    return [list(output.outputs.token_ids) for output in outputs]


def _gap(reference: Reference, prompt: list[int], tokens: list[int]) -> float:
    """Returns how far the worst token is below the reference's best, in standard deviations of the
    logits at its place."""
    logits = reference.logits([*prompt, *tokens])[len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return float(((logits.max(dim=1).values - chosen) / logits.std(dim=1)).max())


def _report(case: Case) -> str:
    return (
        f"do not use {case.name} on this machine; try native_kernels=False, and report it with the "
        "lines above"
    )
