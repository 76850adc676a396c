"""CaptionRecord: what is known of one captioned image, one line of JSON each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mmdeploy_llm.outputs import RequestMetrics, RequestOutput

NUM_DECIMALS = 4  # of seconds: tenths of a millisecond


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemError:
    """Why an image has no caption. code: 4xx the item's fault, 5xx ours."""

    code: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Durations in seconds; None for what was never reached. total: preprocess to last token."""

    preprocess: float | None = None
    queue: float | None = None
    first_token: float | None = None
    generate: float | None = None
    total: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptionRecord:
    """One image and what became of it. path: as given on the command line, "/" normalised.

    reasoning: None without a reasoning parser. error: None when all went well.
    """

    path: str
    text: str = ""
    reasoning: str | None = None
    finish_reason: str | None = None
    num_image_tokens: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    timings: Timings = Timings()
    error: ItemError | None = None

    @property
    def is_ok(self) -> bool:
        """Whether the image has its caption."""
        return self.error is None

    def to_json(self) -> str:
        """One line of JSON, without the line break."""
        values = asdict(self)
        line = json.dumps(values, ensure_ascii=False)
        try:
            line.encode()
        except UnicodeEncodeError:  # a file name that is not UTF-8: escape it
            line = json.dumps(values)
        return line

    @classmethod
    def from_json(cls, line: str | bytes) -> CaptionRecord:
        """The record that `to_json` wrote. Raises ValueError for anything else."""
        values = json.loads(line)
        if not isinstance(values, dict) or not isinstance(values.get("path"), str):
            raise ValueError("it is no object with a path")
        try:
            return cls(**{**values, **_nested(values)})
        except TypeError as error:
            raise ValueError(str(error)) from None


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    error = values.get("error")
    return {
        "timings": Timings(**(values.get("timings") or {})),
        "error": None if error is None else ItemError(**error),
    }


def record_of(path: str, output: RequestOutput) -> CaptionRecord:
    """The record of a finished output."""
    error = None
    if not output.is_ok:
        message = output.error_msg or "no message was given"
        error = ItemError(code=output.error_code, message=message)
    return CaptionRecord(
        path=path,
        text=output.outputs.text.strip(),
        reasoning=_stripped(output.outputs.reasoning_content),
        finish_reason=output.outputs.finish_reason,
        num_image_tokens=output.num_input_image_tokens,
        num_prompt_tokens=len(output.prompt_token_ids),
        num_output_tokens=len(output.outputs.token_ids),
        num_cached_tokens=output.num_cached_tokens,
        timings=_timings(output.metrics),
        error=error,
    )


def _stripped(text: str | None) -> str | None:
    return None if text is None else text.strip()


def _timings(metrics: RequestMetrics) -> Timings:
    return Timings(
        preprocess=_rounded(metrics.preprocess_time),
        queue=_rounded(metrics.time_in_queue),
        first_token=_rounded(metrics.first_token_time),
        generate=_rounded(metrics.model_forward_time),
        total=_rounded(metrics.model_execute_time),
    )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, NUM_DECIMALS)


def seconds(value: float | None) -> str:
    """A duration for people: "340 ms", "2.1 s", "3 min 05 s"; "not reached" for None."""
    if value is None:
        return "not reached"
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest:02d} s"
