"""TextRules, MediaRules, ParamRules: what an intake is made of, for one model."""

from __future__ import annotations

from dataclasses import dataclass

from mmdeploy_llm.hooks import BoxRule, MediaLimits
from mmdeploy_llm.media.loading.expanding import PartExpander
from mmdeploy_llm.media.loading.kinds import ModelMedia
from mmdeploy_llm.media.loading.loader import Fetch
from mmdeploy_llm.system.guarding.calls import CallGuard

from .defaults import CheckProcessors, Grammars
from .tokenizer import PromptTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRules:
    """How texts become tokens.

    vocab_size: number of ids that the model knows. eos_token_ids: ids that end a sequence.
    chat_template: the one that messages are rendered with.
    reasoning_start_marker, reasoning_end_marker: markers of the reasoning parser.
    """

    tokenizer: PromptTokenizer
    vocab_size: int
    eos_token_ids: frozenset[int]
    chat_template: str | None = None
    reasoning_start_marker: str | None = None
    reasoning_end_marker: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaRules:
    """How media are read.

    media: what reads each kind. fetch, cache_bytes, guard: see MediaLoader.
    media_size: width of the rows of the model's encoder; None: unknown.
    box_rule: how the model writes boxes; None: no plugin says so.
    expander: of messages' parts of plugins' types.
    """

    media: ModelMedia
    fetch: Fetch
    limits: MediaLimits
    cache_bytes: int | None = None
    guard: CallGuard | None = None
    media_size: int | None = None
    box_rule: BoxRule | None = None
    expander: PartExpander | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamRules:
    """What checks the params of requests; see ParamsResolver."""

    grammars: Grammars | None = None
    check_processors: CheckProcessors | None = None
