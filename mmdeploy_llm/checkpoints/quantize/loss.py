"""Measures what rounding lost: perplexity of answers, and divergence from the unrounded model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmdeploy_llm.engine.desk.answerer import GeneratingModel
from mmdeploy_llm.errors import EngineError
from mmdeploy_llm.values.params import SamplingParams

from .samples import Sample

ROWS = 256  # rows of logits at a time
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The loss on the held-out items: perplexities of the unrounded model's answers, the mean
    Kullback-Leibler divergence of a token in nats, the share of tokens with the same most probable
    token. num_items, num_tokens: how many were compared. num_used: items of the calibration."""

    num_items: int
    num_tokens: int
    num_used: int
    perplexity_before: float
    perplexity_after: float
    divergence: float
    same_top: float

    def values(self) -> dict[str, Any]:
        """Returns the fields for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The tokens of an answer [A], and the hidden states that predict them [A, hidden]."""

    hidden: Tensor
    token_ids: Tensor


def pass_through(llm: GeneratingModel, sample: Sample) -> Sequence[int]:
    """Computes all tokens of a sample, and returns them. Raises EngineError when that fails."""
    (output,) = llm.generate([sample.prompt], ONE_TOKEN, use_tqdm=False)
    if not output.is_ok:
        raise EngineError(f"a calibration prompt failed: {output.error_msg}")
    return output.prompt_token_ids


def answers_of(llm: GeneratingModel, samples: Sequence[Sample]) -> Sequence[Answer]:
    """Returns what the model computes for the answers of the samples."""
    model: Any = llm.model
    found, forward = [], model.forward
    hidden: list[Tensor] = []

    def kept(inputs: Any) -> Tensor:
        out: Tensor = forward(inputs)
        hidden.append(out.clone())
        return out

    model.forward = kept
    try:
        for sample in samples:
            hidden.clear()
            ids = torch.tensor(pass_through(llm, sample))
            states = torch.cat(hidden)[sample.start - 1 : len(ids) - 1]
            found.append(Answer(hidden=states, token_ids=ids[sample.start :]))
    finally:
        del model.forward
    return found


def save_answers(answers: Sequence[Answer], path: Path) -> None:
    """Writes answers to a safetensors file that is never seen half written."""
    new = path.with_name(f"{path.name}.new")
    parts: dict[str, Tensor] = {}
    for index, answer in enumerate(answers):
        parts |= {f"{index}.hidden": answer.hidden, f"{index}.ids": answer.token_ids}
    save_file(parts, new)
    new.replace(path)


def load_answers(path: Path) -> Sequence[Answer]:
    """Reads what `save_answers` wrote."""
    parts = load_file(path)
    return [
        Answer(hidden=parts[f"{index}.hidden"], token_ids=parts[f"{index}.ids"])
        for index in range(len(parts) // 2)
    ]


@torch.inference_mode()
def compare(
    llm: GeneratingModel, before: Sequence[Answer], after: Sequence[Answer], num_used: int
) -> Loss:
    """Compares the hidden states of two models with the same output head, the one of `llm`."""
    totals = torch.zeros(4, dtype=torch.float64)
    num_tokens = 0
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old.token_ids, new.token_ids)
        num_tokens += len(old.token_ids)
        for start in range(0, len(old.token_ids), ROWS):
            rows = slice(start, start + ROWS)
            totals += _totals(llm.model, old.hidden[rows], new.hidden[rows], old.token_ids[rows])
    surprise_before, surprise_after, divergence, same = (totals / num_tokens).tolist()
    return Loss(
        num_items=len(before),
        num_tokens=num_tokens,
        num_used=num_used,
        perplexity_before=math.exp(surprise_before),
        perplexity_after=math.exp(surprise_after),
        divergence=divergence,
        same_top=same,
    )


def _totals(model: Any, old: Tensor, new: Tensor, token_ids: Tensor) -> Tensor:
    """Returns sums over rows: surprise before and after, divergence, and equal top tokens."""
    before, after = (model.logits(hidden).double().log_softmax(-1) for hidden in (old, new))
    picked = token_ids[:, None]
    return torch.stack(
        [
            -before.gather(-1, picked).sum(),
            -after.gather(-1, picked).sum(),
            (before.exp() * (before - after)).sum(),
            (before.argmax(-1) == after.argmax(-1)).sum(),
        ]
    )
