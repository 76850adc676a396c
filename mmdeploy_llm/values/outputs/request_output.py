"""The results that a caller gets: one RequestOutput per prompt, which holds `n` completions."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, overload

from mmdeploy_llm.errors import OK
from mmdeploy_llm.values.text.signatures import brief
from mmdeploy_llm.values.text.spelling import naming_elsewhere

from .forms import cut, html_of, html_of_answer, lines_of, name_of, plain

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

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
StopReason = str | int | tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Timings in seconds. `arrival_time` and `inference_start_time` are epoch times, the others
    durations. With `n` > 1 they cover all completions: from the start of the first one to the last
    token of the slowest."""

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


# Attributes that callers look for -> where they are.
_OF_A_COMPLETION = {"reasoning": "reasoning_content"}
_OF_A_REQUEST = {
    "content": "outputs.text",
    "error": "is_ok, error_code or error_msg",
    "finish_reason": "outputs.finish_reason",
    "generated_text": "outputs.text",
    "logprobs": "outputs.logprobs",
    "num_output_tokens": "len(outputs.token_ids)",
    "num_tokens": "len(outputs.token_ids)",
    "reasoning": "outputs.reasoning_content",
    "reasoning_content": "outputs.reasoning_content",
    "text": "outputs.text",
    "token_ids": "outputs.token_ids",
    "tool_calls": "outputs.tool_calls",
}


@naming_elsewhere(_OF_A_COMPLETION)
@brief
@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """Generated tokens and text.

    index: 0..n-1 among the completions of one prompt.
    send_idx: ordinal of the delta when streaming, 0 for a complete result.
    token_ids: generated ids, the final end-of-sequence id included.
    text: content without reasoning and tool calls.
    reasoning_content: None when no reasoning parser is in use.
    finish_reason: "tool_calls" where the model stopped and the output has tool calls.
    stop_reason: the stop text, the stop token id or the stop sequence that ended it, as vLLM names
        it; None for the end of sequence and every other end.
    logprobs: one mapping for each token; None unless the sampling parameters request them.
    cumulative_logprob: sum of the log-probabilities of all tokens generated so far, also in a
        stream; None without logprobs.
    tool_calls: None when no tool parser is in use.
    is_valid: whether the finished text follows the request's guided_decoding; False where it was
        cut off, by max_tokens or a stop text, in the answer or in the thinking before it. None
        without a constraint, and before the end.
    attention: where the family's prompt asks for it, the weights with which each token was
        chosen, float32 [tokens, heads, tokens of the encoder's items]; None for all others. It is
        no part of `to_dict`.
    error_code, error_msg: as in RequestOutput, for this completion alone.
    """

    index: int = 0
    send_idx: int = 0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    reasoning_content: str | None = None
    finish_reason: FinishReason | None = None
    stop_reason: StopReason = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    cumulative_logprob: float | None = None
    tool_calls: tuple[ToolCall, ...] | None = None
    is_valid: bool | None = None
    attention: "NDArray[np.float32] | None" = field(default=None, compare=False)
    error_code: int = OK
    error_msg: str | None = None

    @property
    def is_ok(self) -> bool:
        """Whether the completion has no error, finished or not."""
        return self.error_code == OK

    @property
    def resoning_content(self) -> str | None:
        """The same as `reasoning_content`, in the spelling of FastDeploy's guide of 2025."""
        return self.reasoning_content

    def to_dict(self) -> dict[str, Any]:
        """Returns nested plain dicts, lists and tuples."""
        values = asdict(replace(self, attention=None))
        del values["attention"]
        if self.tool_calls is not None:
            values["tool_calls"] = tuple(call.to_dict() for call in self.tool_calls)
        return values

    def _line(self) -> str:
        """Returns how it ended, and the beginning of its text."""
        if not self.is_ok:
            return f"error {self.error_code}: {cut(self.error_msg or '')}"
        num = len(self.tool_calls or ())
        calls = f", {num} tool call{'s' * (num > 1)}" if num else ""
        return f"{self.finish_reason or 'unfinished'}: {cut(self.text)!r}{calls}"

    def _html(self) -> str:
        return html_of_answer(
            self.text,
            error=None if self.is_ok else f"error {self.error_code}: {self.error_msg or ''}",
            reasoning=self.reasoning_content,
            calls=[f"{call.name}({call.arguments})" for call in self.tool_calls or ()],
        )


@naming_elsewhere(_OF_A_COMPLETION)
@dataclass(frozen=True, slots=True, init=False)
class Completions:
    """The completions of one prompt, ordered by index; at least one.

    It is read like a list (`outputs[0].text`, as in vLLM), or like its first completion
    (`outputs.text`, as in FastDeploy). In a stream it holds the one completion that has grown.
    """

    items: tuple[CompletionOutput, ...]

    def __init__(self, items: Iterable[CompletionOutput]) -> None:
        object.__setattr__(self, "items", tuple(items))
        assert self.items, "an output has at least one completion"

    @overload
    def __getitem__(self, index: int) -> CompletionOutput: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[CompletionOutput, ...]: ...
    def __getitem__(self, index: int | slice) -> CompletionOutput | tuple[CompletionOutput, ...]:
        return self.items[index]

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[CompletionOutput]:
        return iter(self.items)

    @property
    def index(self) -> int:
        """Index of the first completion held: 0 unless this is a delta of a stream."""
        return self.items[0].index

    @property
    def send_idx(self) -> int:
        """Ordinal of the delta when streaming."""
        return self.items[0].send_idx

    @property
    def token_ids(self) -> list[int]:
        """Generated ids of the first completion."""
        return self.items[0].token_ids

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.items[0].text

    @property
    def reasoning_content(self) -> str | None:
        """Reasoning of the first completion."""
        return self.items[0].reasoning_content

    @property
    def resoning_content(self) -> str | None:
        """The same as `reasoning_content`, in the spelling of FastDeploy's guide of 2025."""
        return self.items[0].reasoning_content

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the first completion ended."""
        return self.items[0].finish_reason

    @property
    def stop_reason(self) -> StopReason:
        """Which stop ended the first completion."""
        return self.items[0].stop_reason

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """Log-probabilities of the first completion's tokens."""
        return self.items[0].logprobs

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the log-probabilities of the first completion's tokens."""
        return self.items[0].cumulative_logprob

    @property
    def tool_calls(self) -> tuple[ToolCall, ...] | None:
        """Tool calls of the first completion."""
        return self.items[0].tool_calls

    @property
    def is_valid(self) -> bool | None:
        """Whether the text of the first completion follows its constraint."""
        return self.items[0].is_valid


@naming_elsewhere(_OF_A_REQUEST)
@brief
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RequestOutput:
    """The result of one prompt, or (when streaming) what is new since the previous output.

    request_id: the same for all completions of a prompt.
    prompt: the prompt's text; of a conversation, the text that the chat template rendered. None for
        a prompt given as token ids, and for a conversation that was refused before rendering.
    item: the object that the caller passed in, or that the caller's iterable yielded. Where it
        held media in memory, such as PIL images, a copy of its dicts and lists with their size and
        a thumbnail in their place: an output keeps no pixels.
    prompt_token_ids: the ids that the model read, media placeholders included.
    outputs: the completions.
    finished: whether all completions have ended; in a stream, whether this one has.
    num_cached_tokens: prompt tokens that the first completion found in the prefix cache.
    num_input_tokens_by_kind: tokens of the prompt's media, kind by kind, and of the kind "text"
        those of a text that an encoder reads.
    num_input_video_frames, input_video_seconds: frames used of the prompt's videos, and the seconds
        from the first to the end of the last of each.
    media_notes: what of the prompt's media the model did not get as it is, or what was a guess, in
        sentences.
    error_code: 200 means success. Otherwise the code of the first completion that failed: the
        request is finished, `error_msg` says what went wrong, and the completion's finish_reason is
        "error" or "abort"; with code 422, a text that breaks its constraint, it says what ended the
        text. Completions that succeeded keep their text.
    prompt_logprobs: of each prompt token, where asked; None for the first one, and for those that
        the model embeds and cannot generate, such as places of pictures beyond its head.
    """

    request_id: str
    prompt: str | None
    item: Any = None
    prompt_token_ids: list[int] = field(default_factory=list)
    outputs: Completions = field(default_factory=lambda: Completions([CompletionOutput()]))
    finished: bool = False
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    num_input_image_tokens: int = 0
    num_input_video_tokens: int = 0
    num_input_tokens_by_kind: Mapping[str, int] = field(default_factory=dict)
    num_input_video_frames: int = 0
    input_video_seconds: float = 0.0
    media_notes: tuple[str, ...] = ()
    error_code: int = OK
    error_msg: str | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    @property
    def is_ok(self) -> bool:
        """Whether no completion has an error, finished or not."""
        return self.error_code == OK

    def to_dict(self) -> dict[str, Any]:
        """Returns nested dicts and lists of what JSON has; `outputs` is a list with one dict for
        each completion. Objects in `item` become short texts, numbers that are not finite None."""
        values = {name: getattr(self, name) for name in self.__slots__}
        values["outputs"] = [completion.to_dict() for completion in self.outputs]
        values["metrics"] = asdict(self.metrics)
        values["prompt_logprobs"] = self.prompt_logprobs and [
            entry and {token_id: asdict(own) for token_id, own in entry.items()}
            for entry in self.prompt_logprobs
        ]
        return {name: plain(value) for name, value in values.items()}

    def to_json(self, indent: int | None = None) -> str:
        """Returns `to_dict` as a JSON text."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def to_row(self) -> dict[str, Any]:
        """Returns the texts and numbers of the first completion, for a table:
        `pandas.DataFrame(output.to_row() for output in outputs)`."""
        first = self.outputs[0]
        return {
            "item": name_of(self.item),
            "text": first.text,
            "reasoning": first.reasoning_content,
            "finish_reason": first.finish_reason,
            "error_code": self.error_code,
            "error_msg": self.error_msg,
            "num_completions": len(self.outputs),
            "num_output_tokens": len(first.token_ids),
            "num_input_tokens": len(self.prompt_token_ids),
            "num_input_image_tokens": self.num_input_image_tokens,
            "num_input_video_tokens": self.num_input_video_tokens,
            "num_cached_tokens": self.num_cached_tokens,
            "seconds": self.metrics.model_execute_time,
            "request_id": self.request_id,
        }

    def __repr__(self) -> str:
        head = f"RequestOutput({self.request_id!r}, {name_of(self.item)!r})"
        return lines_of(head, [own._line() for own in self.outputs], self._counts())

    def _repr_html_(self) -> str:
        """Shows the output in a notebook."""
        return html_of(self.item, [own._html() for own in self.outputs], self._counts())

    def _counts(self) -> str:
        """Returns what it took, in words."""
        kinds = dict(self.num_input_tokens_by_kind) or {
            "image": self.num_input_image_tokens,
            "video": self.num_input_video_tokens,
        }
        kinds["cached"] = self.num_cached_tokens
        of_which = ", ".join(f"{num:,} {kind}" for kind, num in kinds.items() if num)
        num = sum(len(own.token_ids) for own in self.outputs)
        seconds = self.metrics.model_execute_time
        return (
            f"{len(self.prompt_token_ids):,} prompt tokens{f' ({of_which})' if of_which else ''}, "
            f"{num:,} generated{f', {seconds:.2f} s' if seconds is not None else ''}"
        )
