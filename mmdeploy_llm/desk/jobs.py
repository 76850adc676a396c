"""Job and JobOutput: a prompt on its way to an engine, and what comes back for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mmdeploy_llm.errors import EngineError, MMDeployLLMError, RequestError
from mmdeploy_llm.hooks.names import error_text
from mmdeploy_llm.outputs import CompletionOutput, RequestMetrics, RequestOutput
from mmdeploy_llm.request import Request

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One prompt to run. accept: prepares its requests; called in an intake thread. num_outputs:
    the prompt's `n`."""

    index: int
    prompt: Any
    num_outputs: int
    accept: Callable[..., tuple[Request, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutput:
    """An output and the job it belongs to. error: the exception with which intake refused the
    prompt, None otherwise."""

    job: Job
    output: RequestOutput
    error: Exception | None = None


def refused(job: Job, error: Exception) -> Iterator[JobOutput]:
    """Yields the error outputs of a job whose prompt never became requests."""
    code, message = 500, error_text(error)
    if isinstance(error, MMDeployLLMError):
        code, message = error.code, str(error)
    else:
        logger.error("a prompt could not be prepared", exc_info=error)
    for index in range(job.num_outputs):
        output = RequestOutput(
            request_id=f"refused-{job.index}-{index}",
            prompt=job.prompt,
            outputs=CompletionOutput(index=index, finish_reason="error"),
            finished=True,
            metrics=RequestMetrics(arrival_time=time.time()),
            error_code=code,
            error_msg=message,
        )
        yield JobOutput(job=job, output=output, error=error)


def exception_of(item: JobOutput) -> Exception:
    """Returns the error of an output as an exception: the one that intake raised, or one that fits
    the error code."""
    if item.error is not None:
        return item.error
    kind = RequestError if item.output.error_code < 500 else EngineError
    return kind(item.output.error_msg)
