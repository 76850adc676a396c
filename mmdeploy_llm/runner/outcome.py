"""StepOutcome: the results of a step while its passes are computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mmdeploy_llm.errors import MMDeployLLMError
from mmdeploy_llm.hooks.names import error_text
from mmdeploy_llm.outputs import TokenLogprobs
from mmdeploy_llm.plan import RequestFailure, SampledToken, StepPlan, StepResult


@dataclass(slots=True)
class StepOutcome:
    """Collects the values of a StepResult, by request id. Only the runner and its Retry write
    it."""

    sampled: dict[str, int] = field(default_factory=dict)
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[str, tuple[TokenLogprobs | None, ...]] = field(default_factory=dict)
    errors: dict[str, RequestFailure] = field(default_factory=dict)
    certain: set[str] = field(default_factory=set)
    accepted: dict[str, tuple[SampledToken, ...]] = field(default_factory=dict)

    def merge(self, later: StepOutcome) -> None:
        """Adds the results of a later pass; its prompt log-probabilities follow the earlier
        ones."""
        self.sampled.update(later.sampled)
        self.logprobs.update(later.logprobs)
        self.errors.update(later.errors)
        self.certain.update(later.certain)
        self.accepted.update(later.accepted)
        for request_id, entries in later.prompt_logprobs.items():
            earlier = self.prompt_logprobs.get(request_id, ())
            self.prompt_logprobs[request_id] = earlier + entries

    def replace(self, request_id: str, tokens: Sequence[SampledToken]) -> None:
        """Replaces the token of a request by this one and those after its drafts."""
        *accepted, last = tokens
        self.sampled[request_id] = last.token_id
        self.accepted[request_id] = tuple(accepted)
        if last.logprobs is not None:
            self.logprobs[request_id] = last.logprobs
        if last.is_certain:
            self.certain.add(request_id)
        else:
            self.certain.discard(request_id)

    def result(self, plan: StepPlan) -> StepResult:
        """Returns the result of the whole step."""
        return StepResult(
            step_id=plan.step_id,
            sampled=self.sampled,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            errors=self.errors,
            certain=frozenset(self.certain),
            accepted=self.accepted,
        )


def failure_of(event: str, error: BaseException) -> RequestFailure:
    """Returns the failure of a request. event: what happened, the beginning of the message."""
    code = error.code if isinstance(error, MMDeployLLMError) else 500
    return RequestFailure(code=code, message=f"{event}: {error_text(error)}")
