"""The results that a caller gets: one RequestOutput per prompt, or n of them with `n` > 1."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from .errors import OK

FinishReason = Literal["stop", "tool_calls", "length", "repetition", "error", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """Log-probability of one candidate token.

    `rank` counts from 1 (the most probable token). `decoded_token` is None when it was not decoded.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


# One mapping per generated token: token id -> Logprob; the sampled token comes first.
TokenLogprobs = Mapping[int, Logprob]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Timings in seconds. `arrival_time` and `inference_start_time` are epoch times, the others
    durations."""

    arrival_time: float
    inference_start_time: float | None = None
    first_token_time: float | None = None  # inference start -> first token
    time_in_queue: float | None = None  # end of preprocessing -> inference start
    model_forward_time: float | None = None  # inference start -> last token
    model_execute_time: float | None = None  # arrival -> last token, preprocessing included
    preprocess_time: float | None = None  # template, media and tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCall:
    """The function that a tool call names. arguments: a JSON object as text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A complete tool call of the model.

    name: the tool.
    arguments: a JSON object as text, as the model wrote it.
    index: 0, 1, ... among the calls of one output.
    id: unique among all calls; the engine fills in "".
    """

    id: str = ""
    name: str
    arguments: str
    index: int = 0

    @property
    def type(self) -> str:
        """Always "function": the only type in OpenAI's API."""
        return "function"

    @property
    def function(self) -> FunctionCall:
        """Name and arguments in the shape of OpenAI's API."""
        return FunctionCall(name=self.name, arguments=self.arguments)

    def to_dict(self) -> dict[str, Any]:
        """Returns the call as a dict in the shape of an assistant message's `tool_calls`."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": self.type, "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """Generated tokens and text.

    index: 0..n-1 among the samples of one prompt.
    send_idx: ordinal of the delta when streaming, 0 for a complete result.
    token_ids: generated ids, the final end-of-sequence id included.
    text: content without reasoning and tool calls.
    reasoning_content: None when no reasoning parser is in use.
    finish_reason: "tool_calls" where the model stopped and the output has tool calls.
    tool_calls: None when no tool parser is in use.
    """

    index: int = 0
    send_idx: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    reasoning_content: str | None = None
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    tool_calls: tuple[ToolCall, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The result of one request, or (when streaming) what is new since the previous output.

    prompt: exactly what the caller passed in.
    error_code: 200 means success; otherwise `error_msg` says what went wrong, `finished` is True
        and `outputs.finish_reason` is "error" or "abort".
    """

    request_id: str
    prompt: Any
    prompt_token_ids: tuple[int, ...] = ()
    outputs: CompletionOutput = field(default_factory=CompletionOutput)
    finished: bool = False
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    num_input_image_tokens: int = 0
    num_input_video_tokens: int = 0
    error_code: int = OK
    error_msg: str | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    @property
    def is_ok(self) -> bool:
        """Whether the request has no error, finished or not."""
        return self.error_code == OK

    def to_dict(self) -> dict[str, Any]:
        """Returns nested plain dicts and tuples; `prompt` stays the caller's object."""
        values = {name: getattr(self, name) for name in self.__slots__}
        values["outputs"] = asdict(self.outputs)
        if self.outputs.tool_calls is not None:
            calls = tuple(call.to_dict() for call in self.outputs.tool_calls)
            values["outputs"]["tool_calls"] = calls
        values["metrics"] = asdict(self.metrics)
        return values
