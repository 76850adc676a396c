"""StepOutcome: the results of a step while its passes are computed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mmdeploy_llm.errors import MMDeployLLMError
from mmdeploy_llm.hooks.names import error_text
from mmdeploy_llm.values.outputs.request_output import TokenLogprobs
from mmdeploy_llm.values.plan import RequestFailure, StepPlan, StepResult


@dataclass(slots=True)
class StepOutcome:
    """Collects the values of a StepResult, in fields of the same names. Only the runner and its
    Retry write it."""

    sampled: dict[str, int] = field(default_factory=dict)
    later: dict[str, tuple[int, ...]] = field(default_factory=dict)
    logprobs: dict[str, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    prompt_logprobs: dict[str, tuple[TokenLogprobs | None, ...]] = field(default_factory=dict)
    errors: dict[str, RequestFailure] = field(default_factory=dict)
    vectors: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    attention: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    certain: set[tuple[str, int]] = field(default_factory=set)

    def merge(self, later: StepOutcome) -> None:
        """Adds the results of a later pass; its prompt log-probabilities follow the earlier
        ones."""
        for name in ("sampled", "later", "logprobs", "vectors", "attention", "errors", "certain"):
            getattr(self, name).update(getattr(later, name))
        for request_id, entries in later.prompt_logprobs.items():
            earlier = self.prompt_logprobs.get(request_id, ())
            self.prompt_logprobs[request_id] = earlier + entries

    def result(self, plan: StepPlan) -> StepResult:
        """Returns the result of the whole step."""
        return StepResult(
            step_id=plan.step_id, **{name: getattr(self, name) for name in self.__slots__}
        )


def failure_of(event: str, error: BaseException) -> RequestFailure:
    """Returns the failure of a request. event: what happened, the beginning of the message."""
    code = error.code if isinstance(error, MMDeployLLMError) else 500
    return RequestFailure(code=code, message=f"{event}: {error_text(error)}")
