"""Makes the output of a request that wants no text."""

from __future__ import annotations

from mmdeploy_llm.errors import OK
from mmdeploy_llm.values.outputs.pooled import PooledOutput
from mmdeploy_llm.values.outputs.request_output import CompletionOutput, Completions
from mmdeploy_llm.values.plan import TokenUpdate

from .summary import FAILURES, media_fields, metrics_of


def pooled_output(update: TokenUpdate) -> PooledOutput | None:
    """Returns the output of a request that has ended; None for one that goes on."""
    request, reason = update.request, update.finish_reason
    if reason is None:
        return None
    failure = update.failure or FAILURES.get(reason)
    code = OK if failure is None else failure.code
    message = None if failure is None else failure.message
    completion = CompletionOutput(finish_reason=reason, error_code=code, error_msg=message)
    return PooledOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        item=request.item,
        prompt_token_ids=list(request.prompt_token_ids),
        outputs=Completions([completion]),
        finished=True,
        metrics=metrics_of(request),
        num_cached_tokens=request.num_cached_tokens,
        **media_fields(request),
        error_code=code,
        error_msg=message,
        vector=update.vector,
    )
