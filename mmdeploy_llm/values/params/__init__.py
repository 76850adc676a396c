"""The options of one request: SamplingParams and the params inside it, frozen and validated when
they are constructed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, Unpack

from pydantic import Field, ValidationInfo, field_validator, model_validator

from .frozen import FrozenParams, check_plain
from .inner import (
    EarlyStopParams,
    GuidedDecodingParams,
    NoRepeatNGramParams,
    StructuredOutputsParams,
    read_early_stop,
    read_response_format,
)
from .value_types import Format, Processors, Sequences, TokenId, TokenIds, Words, as_format

if TYPE_CHECKING:
    from .option_dicts import SamplingOptions

__all__ = [
    "MAX_SEED",
    "EarlyStopParams",
    "FrozenParams",
    "GuidedDecodingParams",
    "NoRepeatNGramParams",
    "SamplingParams",
    "StructuredOutputsParams",
    "read_early_stop",
]

MAX_SEED = 922337203685477580
MAX_N = 1024
ALIASES = {"stop_words_ids": "stop_token_sequences", "structured_outputs": "guided_decoding"}


class SamplingParams(FrozenParams):
    """How to generate the text of one request; the fields are listed below with their meaning.
    Raises ConfigError for a value out of range and for an unknown name."""

    n: int = Field(default=1, ge=1, le=MAX_N, description="number of samples for each prompt")
    presence_penalty: float | None = Field(
        default=None,
        ge=-2,
        le=2,
        description="subtracted from the logit of every token that the output already contains; "
        "None: the model's own value, else 0",
    )
    frequency_penalty: float | None = Field(
        default=None,
        ge=-2,
        le=2,
        description="subtracted from the logit of a token once for each time that it occurs in "
        "the output; None: the model's own value, else 0",
    )
    repetition_penalty: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="divides the positive logits, and multiplies the negative ones, of tokens "
        "that occur in the prompt or the output; above 1 discourages repetition; None: the "
        "model's own value, else 1 (off)",
    )
    temperature: float | None = Field(
        default=None,
        ge=0,
        allow_inf_nan=False,
        description="divides the logits before sampling; 0 always takes the most probable token; "
        "None: the model's own value (0 where its generation_config.json has do_sample false), "
        "else 1",
    )
    do_sample: bool | None = Field(
        default=None,
        description="transformers' and DashInfer's switch: False takes the most probable token, as "
        "temperature=0 does; True draws, also where the model's own value is not to; None: as "
        "temperature, top_k and top_p say",
    )
    top_p: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="samples from the smallest set of most probable tokens whose probabilities "
        "add up to top_p; 1 keeps all tokens, 0 keeps only the most probable one; None: the "
        "model's own value, else 0.7",
    )
    top_k: int | None = Field(
        default=None,
        ge=-1,
        description="samples from the top_k most probable tokens; 0 and -1 keep all; None: the "
        "model's own value, else 0",
    )
    min_p: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="drops tokens whose probability is below min_p times that of the most "
        "probable one; None: the model's own value, else 0 (off)",
    )
    seed: int | None = Field(
        default=None,
        ge=0,
        le=MAX_SEED,
        description="the same seed gives the same text, in any batch with the engine's "
        "`deterministic`, and in fact on most CPUs; sample i of n uses seed + i; None: "
        "derived from the engine's `seed` and the prompt's number",
    )
    stop: Words = Field(
        default=(),
        description="texts that end the generation, in the reasoning as well as in the answer; "
        "one text or a list, at most 64 of at most 1,024 characters each",
    )
    stop_token_ids: TokenIds = Field(
        default=(), description="token ids that end the generation, like the end of sequence"
    )
    stop_token_sequences: Sequences = Field(
        default=(),
        description="lists of token ids, each of which, generated as a whole, ends the "
        "generation, like a text of `stop`; at most 64 of at most 1,024 ids each; DashInfer's name "
        "stop_words_ids is accepted too",
    )
    max_tokens: int | None = Field(
        default=None,
        ge=1,
        description="upper bound on generated tokens, reasoning included; None, or more than the "
        "context has left: what is left of `max_model_len` after the prompt",
    )
    max_length: int | None = Field(
        default=None,
        ge=1,
        description="upper bound on the tokens of the prompt and the answer together, as in "
        "transformers and DashInfer; the smaller of it and max_tokens counts; None: no bound",
    )
    reasoning_max_tokens: int | None = Field(
        default=None,
        ge=1,
        description="upper bound on reasoning tokens, after which the reasoning is closed and the "
        "answer begins; needs a reasoning parser; None: no bound",
    )
    min_tokens: int = Field(
        default=1,
        ge=0,
        description="number of tokens before which neither the end of sequence nor a stop text, "
        "stop token, stop sequence or early stop ends the generation; a complete answer of "
        "guided_decoding ends before",
    )
    logprobs: int | None = Field(
        default=None,
        ge=-1,
        description="number of most probable tokens to report with each generated token, besides "
        "the generated one; -1: the whole vocabulary; bounded by the engine's `max_logprobs`; "
        "None: no log-probabilities",
    )
    prompt_logprobs: int | None = Field(
        default=None,
        ge=-1,
        description="the same for the tokens of the prompt; None: no log-probabilities",
    )
    bad_words: Words = Field(
        default=(),
        description="texts that are never generated, at the start of a text or after a space; one "
        "text or a list",
    )
    bad_words_token_ids: TokenIds = Field(
        default=(), description="token ids that are never generated"
    )
    ignore_eos: bool = Field(
        default=False,
        description="go on after the end-of-sequence token until max_tokens; for measurements",
    )
    no_repeat_ngram_size: int = Field(
        default=0,
        ge=0,
        description="never generates a sequence of this many tokens that the prompt or the output "
        "already contains; 0: off",
    )
    no_repeat_ngram: NoRepeatNGramParams | bool | None = Field(
        default=None,
        description="NoRepeatNGramParams, or a dict of their values: the same in a window of the "
        "answer; True: as the family, else the defaults; False: never; None: as the family",
    )
    logit_bias: Mapping[TokenId, Annotated[float, Field(allow_inf_nan=False)]] = Field(
        default_factory=dict,
        description="dict of token id to a number that is added to the token's logit",
    )
    logits_processors: Processors = Field(
        default=(),
        description="names of logits processors from plugins, which change the logits in this "
        "order before every other rule; one name or a list, at most 16",
    )
    logits_processors_args: Mapping[str, Any] = Field(
        default_factory=dict,
        description="dict of arguments of the logits processors, each by the name that its "
        "processor declares; an argument of one that the engine's `logits_processors` lists "
        "switches it on for this request",
    )
    early_stop: EarlyStopParams | bool | None = Field(
        default=None,
        description="EarlyStopParams, or a dict with their values: ends a text that runs away, "
        "with the finish reason repetition; False: never; True: as the engine's "
        "`early_stop_config`, else with its defaults; None: as the engine",
    )
    guided_decoding: GuidedDecodingParams | None = Field(
        default=None,
        description="GuidedDecodingParams with a JSON schema, a regular expression, a list of "
        "choices or a grammar that the answer must follow; the reasoning before it is free; "
        "an answer that is cut off has the error code 422; None: no constraint",
    )
    response_format: Format | None = Field(
        default=None,
        description='the same as in OpenAI\'s and DashInfer\'s calls: {"type": "text"}, '
        '{"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": ...}}, a '
        'pydantic class, or {"type": "structural_tag", ...}; sets guided_decoding; None: no format',
    )
    include_stop_str_in_output: bool = Field(
        default=False,
        description="whether the text ends with the stop text or stop sequence that was found",
    )
    skip_special_tokens: bool = Field(
        default=True,
        description="whether special tokens, such as the end of sequence, are left out of the text",
    )
    output_kind: Literal["cumulative", "delta", "final_only"] = Field(
        default="cumulative",
        description="outputs that AsyncLLM.generate yields: all text so far, only what is new, or "
        "one at the end; other calls say by their name what they return",
    )

    if TYPE_CHECKING:

        def __init__(self, **options: Unpack[SamplingOptions]) -> None: ...

    @field_validator("no_repeat_ngram")
    @classmethod
    def _is_the_only_rule(cls, value: object, info: ValidationInfo) -> object:
        if value and info.data.get("no_repeat_ngram_size"):
            raise ValueError("give no_repeat_ngram_size or no_repeat_ngram, not both")
        return value

    @field_validator("logits_processors_args")
    @classmethod
    def _args_are_plain(cls, value: Mapping[str, Any]) -> Mapping[str, Any]:
        check_plain(value, "logits_processors_args")
        return value

    @model_validator(mode="before")
    @classmethod
    def _read_aliases(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for alias, name in ALIASES.items():
            if values.get(alias) is not None and values.get(name) is not None:
                raise ValueError(f"{alias} is another name of {name}; give one of them")
        return {ALIASES.get(name, name): value for name, value in values.items()}

    @model_validator(mode="before")
    @classmethod
    def _response_format_guides(cls, values: Any) -> Any:
        """Turns response_format into guided_decoding, which must not say anything else."""
        if not isinstance(values, dict) or values.get("response_format") is None:
            return values
        form = as_format(values["response_format"])
        guided = read_response_format(form)
        given = values.get("guided_decoding")
        if given is not None and GuidedDecodingParams.model_validate(given) != guided:
            raise ValueError("give response_format or guided_decoding, not both")
        return {**values, "response_format": form, "guided_decoding": guided}

    @model_validator(mode="after")
    def _choices_agree(self) -> Self:
        given = (self.temperature, self.top_k, self.top_p)
        if self.do_sample is None or given == (None, None, None):
            return self
        if self.do_sample == self.is_greedy:
            raise ValueError(
                f"do_sample={self.do_sample} and the other options contradict each other: "
                "temperature=0, top_k=1 or top_p=0 take the most probable token, and other values "
                "of these three draw one; leave them or do_sample out"
            )
        return self

    @model_validator(mode="after")
    def _limits_agree(self) -> Self:
        if self.max_length is not None and self.min_tokens > self.max_length:
            raise ValueError(
                f"min_tokens must be in [0, max_length = {self.max_length}], got {self.min_tokens}"
            )
        if self.max_tokens is None:
            return self
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be in [0, max_tokens = {self.max_tokens}], got {self.min_tokens}"
            )
        if self.reasoning_max_tokens is not None and self.reasoning_max_tokens > self.max_tokens:
            raise ValueError(
                f"reasoning_max_tokens must be in [1, max_tokens = {self.max_tokens}], "
                f"got {self.reasoning_max_tokens}"
            )
        return self

    @property
    def is_greedy(self) -> bool:
        """Whether every step takes the most probable token."""
        return self.temperature == 0 or self.top_k == 1 or self.top_p == 0
