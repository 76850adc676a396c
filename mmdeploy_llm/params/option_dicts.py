"""Names and types of options, for editors and type checkers. Written from the fields of the
classes that check them, by tests/test_option_dicts.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pydantic import BaseModel

    from . import EarlyStopParams, GuidedDecodingParams, NoRepeatNGramParams


class EarlyStopOptions(TypedDict, total=False):
    """Options of EarlyStopParams."""

    enable_early_stop: bool | None
    threshold: float | None
    window_size: int | None


class GuidedDecodingOptions(TypedDict, total=False):
    """Options of GuidedDecodingParams."""

    choice: Sequence[str] | None
    disable_any_whitespace: bool | None
    grammar: str | None
    json: Mapping[str, Any] | str | type[BaseModel] | None
    json_object: bool | None
    regex: str | None
    structural_tag: Mapping[str, Any] | str | None


class NoRepeatNGramOptions(TypedDict, total=False):
    """Options of NoRepeatNGramParams."""

    may_repeat: str | Sequence[str] | None
    may_repeat_token_ids: int | Sequence[int] | None
    size: int | None
    window: int | None


class SamplingOptions(TypedDict, total=False):
    """Options of SamplingParams."""

    bad_words: str | Sequence[str] | None
    bad_words_token_ids: int | Sequence[int] | None
    early_stop: EarlyStopParams | Mapping[str, Any] | bool | None
    frequency_penalty: float | None
    guided_decoding: GuidedDecodingParams | Mapping[str, Any] | None
    ignore_eos: bool | None
    include_stop_str_in_output: bool | None
    logit_bias: Mapping[int, float] | None
    logits_processors: str | Sequence[str] | None
    logits_processors_args: Mapping[str, Any] | None
    logprobs: int | None
    max_tokens: int | None
    min_p: float | None
    min_tokens: int | None
    n: int | None
    no_repeat_ngram: NoRepeatNGramParams | Mapping[str, Any] | bool | None
    no_repeat_ngram_size: int | None
    output_kind: Literal["cumulative", "delta", "final_only"] | None
    presence_penalty: float | None
    prompt_logprobs: int | None
    reasoning_max_tokens: int | None
    repetition_penalty: float | None
    response_format: Mapping[str, Any] | type[BaseModel] | None
    seed: int | None
    skip_special_tokens: bool | None
    stop: str | Sequence[str] | None
    stop_token_ids: int | Sequence[int] | None
    stop_token_sequences: int | Sequence[int] | Sequence[Sequence[int]] | None
    stop_words_ids: int | Sequence[int] | Sequence[Sequence[int]] | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
