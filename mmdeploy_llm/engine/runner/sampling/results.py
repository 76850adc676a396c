"""The results of a sampler: tokens, or the promise of tokens, and why a row has none."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mmdeploy_llm.values.outputs.request_output import TokenLogprobs

NOT_FINITE = (
    "the model returned logits that are not finite (NaN or infinity) for this request; its inputs "
    "or the weights are out of range: check them, or try dtype='float32'"
)
NOTHING_ALLOWED = (
    "no token is allowed next: guided_decoding, bad_words, min_tokens, no_repeat_ngram_size, "
    "logit_bias and logits_processors together ban the whole vocabulary; loosen one of them (an "
    "answer of guided_decoding never contains a tag of the reasoning parser)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    """The tokens of N rows.

    token_ids: [N], 0 where the row failed.
    logprobs: [N], None where none were requested or the row failed.
    errors: row -> why it has no token. unmet: of these, the rows whose own rules allow none.
    certain: rows whose token is more probable than the threshold of their early stop.
    """

    token_ids: list[int]
    logprobs: tuple[TokenLogprobs | None, ...]
    errors: Mapping[int, str] = field(default_factory=dict)
    unmet: Collection[int] = ()
    certain: Collection[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingSample:
    """Tokens whose computation was launched.

    finish: waits for the tokens and returns them; called once, in the order of the launches.
    token_ids: [N] int64 on the device, 0 where the row failed; None from samplers that compute on
        the host.
    """

    finish: Callable[[], SampleResult]
    token_ids: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Certainty:
    """Whether the tokens of some rows are nearly certain: both [R]."""

    rows: NDArray[np.int64]
    is_certain: Tensor

    def rows_in(self, errors: Mapping[int, str]) -> tuple[int, ...]:
        """Returns the rows with a nearly certain token, without those that failed."""
        found = self.rows[self.is_certain.cpu().numpy()].tolist()
        return tuple(row for row in found if row not in errors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The tokens of rows, on the device: [N] each.

    is_finite: whether the logits are. is_allowed: whether the rules allow any token.
    failures: row -> why its logits processor failed.
    """

    token_ids: Tensor
    is_finite: Tensor
    is_allowed: Tensor
    failures: Mapping[int, str]
