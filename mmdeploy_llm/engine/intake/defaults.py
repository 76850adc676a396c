"""ParamsResolver: fills open sampling params from generation_config, then FastDeploy's defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Protocol

from mmdeploy_llm.errors import CheckpointError, ConfigError, PromptTooLongError, RequestError
from mmdeploy_llm.values.options.runtime_config import RuntimeConfig
from mmdeploy_llm.values.params import (
    MAX_SEED,
    EarlyStopParams,
    GuidedDecodingParams,
    NoRepeatNGramParams,
    SamplingParams,
)

from .unicode_text import check_unicode

# The values that FastDeploy's data processor fills in.
DEFAULTS: Mapping[str, float] = {
    "temperature": 1.0,
    "top_p": 0.7,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
SAMPLING_CHOICES = ("temperature", "top_p", "top_k")
TEXTS = ("stop", "bad_words")
MAX_STOPS = 64
MAX_STOP_SIZE = 1024  # characters or ids

NO_REPEAT = "no_repeat_ngram"
Encode = Callable[[str], Sequence[int]]
CheckProcessors = Callable[[SamplingParams], None]


class Grammars(Protocol):
    """Checks constraints; may use a process of its own."""

    def validate(self, params: GuidedDecodingParams) -> None:
        """Raises RequestError for a constraint that cannot become a grammar."""

    def interrupt(self) -> None:
        """Ends a check that is under way; may be called from any thread."""

    def close(self) -> None:
        """Ends the process."""


class ParamsResolver:
    """Fills and checks the params of requests to one model.

    vocab_size: number of ids that the model knows.
    grammars: checks constraints, and ends with this object; None when guided decoding is off.
    encode: returns the ids of a text; without it no text has any.
    check_processors: raises RequestError for logits processors or arguments of them that are not
        valid; None when there are none.

    Raises CheckpointError for values of generation_config.json that are out of range.
    """

    def __init__(
        self,
        *,
        config: RuntimeConfig,
        vocab_size: int,
        grammars: Grammars | None,
        check_processors: CheckProcessors | None = None,
        encode: Encode = lambda _: (),
    ) -> None:
        self._encode = encode
        self._config = config
        self._vocab_size = vocab_size
        self._grammars = grammars
        self._check_processors = check_processors
        generation = config.generation
        self._is_greedy = generation.get("do_sample") is False
        usual = usual_params(generation).no_repeat_ngram
        self._defaults: dict[str, Any] = {**DEFAULTS, **own_values(generation), NO_REPEAT: None}
        if isinstance(usual, NoRepeatNGramParams):
            self._defaults[NO_REPEAT] = usual.with_ids(encode)

    def check(self, params: SamplingParams) -> None:
        """Raises RequestError for values that this engine cannot serve, whatever the prompt."""
        for name in TEXTS:
            check_unicode(getattr(params, name), name)
        if params.guided_decoding is not None:
            check_unicode(dict(params.guided_decoding), "guided_decoding")
        self._check_stops(params)
        self._check_logprobs("logprobs", params.logprobs)
        self._check_logprobs("prompt_logprobs", params.prompt_logprobs)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        for sequence in params.stop_token_sequences:
            self._check_ids("stop_token_sequences", sequence)
        self._check_ids("bad_words_token_ids", params.bad_words_token_ids)
        self._check_ids("logit_bias", params.logit_bias)
        if params.guided_decoding is not None:
            self._check_guided(params.guided_decoding)
        if params.logits_processors or params.logits_processors_args:
            if self._check_processors is None:
                raise RequestError(
                    "logits_processors need a plugin that provides them; install one"
                )
            self._check_processors(params)

    def resolve(
        self, params: SamplingParams, num_prompt_tokens: int, number: int
    ) -> SamplingParams:
        """Returns params with every open field filled and `max_tokens` limited to what the context
        has left. number: of the request in this engine, from which, with the engine's seed, the
        seed of params that have none is derived. Raises PromptTooLongError."""
        num_left = self._num_tokens_left(num_prompt_tokens, params)
        filled = {
            name: value for name, value in self._defaults.items() if getattr(params, name) is None
        }
        is_open = all(getattr(params, name) is None for name in SAMPLING_CHOICES)
        is_greedy = self._is_greedy if params.do_sample is None else not params.do_sample
        if is_greedy and is_open:
            filled["temperature"] = 0.0
        filled["max_tokens"] = min(params.max_tokens or num_left, num_left)
        if params.seed is None:
            filled["seed"] = derive_seed(self._config.seed, number)
        filled["early_stop"] = self._early_stop(params)
        if params.no_repeat_ngram is not None or filled[NO_REPEAT] is not None:
            filled[NO_REPEAT] = self._no_repeat_ngram(params)
        return params.model_copy(update=filled)

    def _early_stop(self, params: SamplingParams) -> EarlyStopParams | None:
        """Returns when to end a text that runs away; None for never."""
        own, engine = params.early_stop, self._config.early_stop
        if own is True:
            own = engine or EarlyStopParams()
        found = engine if own is None else own
        return found if isinstance(found, EarlyStopParams) and found.enable_early_stop else None

    def _no_repeat_ngram(self, params: SamplingParams) -> NoRepeatNGramParams | None:
        """Returns what must not repeat; None for nothing. What is usual for the family would make
        some constraints impossible, and gives way to the caller's own n-grams."""
        own, usual = params.no_repeat_ngram, self._defaults[NO_REPEAT]
        if isinstance(own, NoRepeatNGramParams):
            check_unicode(own.may_repeat, NO_REPEAT)
            self._check_ids(NO_REPEAT, own.may_repeat_token_ids)
            return own.with_ids(self._encode)
        if own is True:
            return usual or NoRepeatNGramParams()
        is_usual = own is None and params.guided_decoding is None
        return usual if is_usual and not params.no_repeat_ngram_size else None

    def interrupt(self) -> None:
        """Ends a check that is under way, so that `close` need not wait."""
        if self._grammars is not None:
            self._grammars.interrupt()

    def close(self) -> None:
        """Ends the process that checks grammars."""
        if self._grammars is not None:
            self._grammars.close()

    def _num_tokens_left(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Returns how many tokens can be generated after the prompt: at least `min_tokens` and 1.

        Raises PromptTooLongError when fewer fit.
        """
        limit, needed = self._config.max_model_len, max(1, params.min_tokens)
        most = params.max_length
        if most is not None and num_prompt_tokens + needed > most:
            raise PromptTooLongError(
                f"the prompt has {num_prompt_tokens} tokens, and with {needed} more (min_tokens) "
                f"it would be over max_length = {most}, which counts them; raise it, or use "
                "max_tokens"
            )
        if num_prompt_tokens + needed > limit:
            raise PromptTooLongError(
                f"Input text is too long, length of prompt token({num_prompt_tokens}) + "
                f"min_dec_len ({needed}) > max_model_len({limit}); shorten the prompt or its "
                "media, lower min_tokens, or raise max_model_len"
            )
        return min(limit, most or limit) - num_prompt_tokens

    def _check_stops(self, params: SamplingParams) -> None:
        kinds = {
            "stop": (params.stop, "a stop text", "characters"),
            "stop_token_sequences": (params.stop_token_sequences, "a stop sequence", "ids"),
        }
        for name, (stops, one, units) in kinds.items():
            if len(stops) > MAX_STOPS:
                raise RequestError(
                    f"{name} has {len(stops)} entries, {MAX_STOPS} are allowed; remove some"
                )
            longest = max(map(len, stops), default=0)
            if longest > MAX_STOP_SIZE:
                raise RequestError(
                    f"{one} has {longest} {units}, {MAX_STOP_SIZE} are allowed; shorten it"
                )

    def _check_logprobs(self, name: str, wanted: int | None) -> None:
        limit = self._config.max_logprobs
        if wanted is None or limit == -1 or 0 <= wanted <= limit:
            return
        found = "-1 (the whole vocabulary)" if wanted == -1 else wanted
        raise RequestError(
            f"{name} = {found} is over the engine's max_logprobs = {limit}; lower it, or raise "
            "max_logprobs (enable_logprob=False makes it 0)"
        )

    def _check_ids(self, name: str, ids: Any) -> None:
        wrong = next((token_id for token_id in ids if not 0 <= token_id < self._vocab_size), None)
        if wrong is not None:
            raise RequestError(
                f"{name} has token id {wrong}; allowed are 0 to {self._vocab_size - 1}"
            )

    def _check_guided(self, guided: GuidedDecodingParams) -> None:
        if self._grammars is None:
            raise RequestError(
                "guided_decoding is refused because guided_decoding_backend is 'off'; set it to "
                "'auto'"
            )
        self._grammars.validate(guided)


def own_values(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of generation_config.json that are defaults of SamplingParams."""
    names = (*DEFAULTS, NO_REPEAT)
    return {name: generation[name] for name in names if generation.get(name) is not None}


def usual_params(generation: Mapping[str, Any]) -> SamplingParams:
    """Returns params with the values that open fields get. Raises CheckpointError for values that
    are out of range."""
    greedy = {"temperature": 0.0} if generation.get("do_sample") is False else {}
    try:
        return SamplingParams(**{**DEFAULTS, **own_values(generation), **greedy})
    except ConfigError as error:
        raise CheckpointError(f"generation_config.json of the model: {error}") from error


def derive_seed(engine_seed: int, number: int) -> int:
    """Returns a seed for the request with this number, spread over the whole range of seeds."""
    digest = blake2b(f"{engine_seed} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % (MAX_SEED + 1)


def sample_seed(seed: int, index: int) -> int:
    """Returns the seed of one of the n samples of a prompt."""
    return (seed + index) % (MAX_SEED + 1)
