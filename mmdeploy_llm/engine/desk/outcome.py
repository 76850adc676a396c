"""Answer and refusals: what came of a prompt, also of one that never became a request."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmdeploy_llm.errors import (
    ABORTED,
    EngineError,
    InvalidAnswerError,
    MMDeployLLMError,
    RequestError,
)
from mmdeploy_llm.hooks.names import error_text
from mmdeploy_llm.values.outputs.request_output import (
    CompletionOutput,
    Completions,
    RequestMetrics,
    RequestOutput,
)

from .merge import merged

if TYPE_CHECKING:
    from .ask import Ask

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An output and what was asked. error: the exception with which the desk ended the prompt, None
    otherwise."""

    ask: Ask
    output: RequestOutput
    error: Exception | None = None

    @property
    def exception(self) -> Exception:
        """The error of the output as an exception: the desk's, or one that fits the error code."""
        if self.error is not None:
            return self.error
        code = self.output.error_code
        if code == InvalidAnswerError.code:
            return InvalidAnswerError(self.output.error_msg)
        return (RequestError if code < 500 else EngineError)(self.output.error_msg)


def text_of(prompt: Any) -> str | None:
    """Returns the text of a prompt that was not rendered; None for token ids and messages."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def refused(ask: Ask, error: Exception) -> RequestOutput:
    """Returns the output of a prompt that was never handed in."""
    return merged([refusal(ask, "refused", index, error) for index in range(ask.params.n)])


def refusal(ask: Ask, request_id: str, index: int, error: Exception) -> RequestOutput:
    """Returns the error output of a completion that never became a request."""
    from mmdeploy_llm.media.kept import kept  # which reads pictures: not at import

    code, message = 500, error_text(error)
    if isinstance(error, MMDeployLLMError):
        code, message = error.code, str(error)
    else:
        logger.error("a prompt could not be prepared", exc_info=error)
    completion = CompletionOutput(
        index=index,
        finish_reason="abort" if code == ABORTED else "error",
        error_code=code,
        error_msg=message,
    )
    return RequestOutput(
        request_id=request_id,
        prompt=text_of(ask.shown),
        item=kept(ask.shown),
        outputs=Completions([completion]),
        finished=True,
        metrics=RequestMetrics(arrival_time=time.time()),
        error_code=code,
        error_msg=message,
    )
