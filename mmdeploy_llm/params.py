"""What the caller may ask of one generation: SamplingParams and GuidedDecodingParams, frozen and
checked when made."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from .errors import ConfigError

MAX_SEED = 922337203685477580
MAX_N = 1024
MAX_WORDS = 1024  # stop texts, bad words: each is looked for at every token


def _as_tuple(value: Any) -> Any:
    """A single string or number as a tuple of one; lists as tuples."""
    if isinstance(value, (str, int)):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def _as_words(value: Any) -> Any:
    words = _as_tuple(value)
    if isinstance(words, tuple) and any(word == "" for word in words):
        raise ValueError("an empty string matches everywhere; remove it")
    return words


Words = Annotated[tuple[str, ...], BeforeValidator(_as_words), Field(max_length=MAX_WORDS)]
TokenIds = Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(_as_tuple)]


class FrozenParams(BaseModel):
    """Base of what callers hand in: frozen, unknown names refused with a suggestion,
    ConfigError on bad values."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(describe(type(self), error)) from None


def describe(model: type[BaseModel], error: ValidationError) -> str:
    """One line a problem: which field, what is allowed, what was found."""
    return "\n".join(_describe_one(model, problem) for problem in error.errors())


def _describe_one(model: type[BaseModel], problem: ErrorDetails) -> str:
    name = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, model.model_fields, n=1)
        known = ", ".join(sorted(model.model_fields))
        hint = f"did you mean {near[0]!r}?" if near else f"known: {known}"
        return f"{model.__name__} has no option {name!r}; {hint}"
    message = problem["msg"].removeprefix("Value error, ")
    if not name:
        return f"{model.__name__}: {message}"
    return f"{model.__name__}.{name}: {message}, got {problem['input']!r}"


class GuidedDecodingParams(FrozenParams):
    """A constraint on the generated text; exactly one of the fields is given.

    json: a JSON schema as a dict or its text. regex: a regular expression. choice: the allowed
    texts.
    grammar: an EBNF grammar. json_object: any valid JSON object.
    """

    json_schema: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = [name for name in type(self).model_fields if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(
                "give exactly one of json, regex, choice, grammar, json_object; "
                f"got {given or 'none'}"
            )
        return self


class SamplingParams(FrozenParams):
    """How to generate. A field left at None takes the model's generation_config, else the
    default in brackets.

    n: samples per prompt. temperature [1.0]: 0 is greedy. top_p [0.7], top_k [0]: 0 and -1 are off,
    min_p. repetition_penalty [1.0] over prompt and output; presence_penalty and
    frequency_penalty [0]
    over the output. seed: same seed, same text, whatever else is in the batch; None draws one.
    stop: texts that end generation; stop_token_ids: ids that do. max_tokens: at most this many,
    default what
    the context has left; min_tokens: end of sequence and stops are held back until then.
    reasoning_max_tokens: cap on thinking tokens. bad_words, bad_words_token_ids: never generated.
    no_repeat_ngram_size: n-grams of this size occur once. logit_bias: token id -> added to its
    logit.
    logprobs, prompt_logprobs: how many candidates to report, -1 for the whole vocabulary.
    Raises ConfigError for a value out of range and for an unknown name.
    """

    n: int = Field(default=1, ge=1, le=MAX_N)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    temperature: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = Field(default=None, ge=0, le=MAX_SEED)
    stop: Words = ()
    stop_token_ids: TokenIds = ()
    max_tokens: int | None = Field(default=None, ge=1)
    reasoning_max_tokens: int | None = Field(default=None, ge=1)
    min_tokens: int = Field(default=1, ge=0)
    logprobs: int | None = Field(default=None, ge=-1)
    prompt_logprobs: int | None = Field(default=None, ge=-1)
    bad_words: Words = ()
    bad_words_token_ids: TokenIds = ()
    ignore_eos: bool = False
    no_repeat_ngram_size: int = Field(default=0, ge=0)
    logit_bias: Mapping[int, Annotated[float, Field(allow_inf_nan=False)]] = Field(
        default_factory=dict
    )
    guided_decoding: GuidedDecodingParams | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    @model_validator(mode="before")
    @classmethod
    def _none_is_empty(cls, values: Any) -> Any:
        """FastDeploy's examples pass None for lists; it means none of them."""
        if not isinstance(values, dict):
            return values
        optional = {name for name, field in cls.model_fields.items() if field.default is None}
        return {
            name: value for name, value in values.items() if value is not None or name in optional
        }

    @model_validator(mode="after")
    def _limits_agree(self) -> Self:
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
        """Whether the most probable token is always taken."""
        return self.temperature == 0 or self.top_k == 1 or self.top_p == 0
