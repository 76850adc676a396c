"""Reads everything about a model that is cheap to read, so that most mistakes show before the
weights are loaded: plugins, config.json, tokenizer, chat template, parsers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from mmdeploy_llm.engine.intake.template import checkpoint_template
from mmdeploy_llm.engine.intake.tokenizer import (
    PromptTokenizer,
    eos_token_ids,
    load_own_tokenizer,
    load_tokenizer,
)
from mmdeploy_llm.engine.runner.sampling.grammar import GrammarBackend
from mmdeploy_llm.engine.runner.sampling.processors import LogitsProcessors
from mmdeploy_llm.engine.startup.parse_cache import ParseCache
from mmdeploy_llm.hooks import (
    Checkpoint,
    LogitsContext,
    ModelSpec,
    PluginManager,
    ReasoningParserSpec,
    ToolParserSpec,
)
from mmdeploy_llm.hooks.objects.relatives import HeadKind, head_of
from mmdeploy_llm.layers.drafts.wanted import AddDraftHead, draft_head_of
from mmdeploy_llm.layers.pooling.rules import EmbeddingRules
from mmdeploy_llm.system.guarding.given_template import load_template
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.weights.find import find_weights
from mmdeploy_llm.weights.folder import MODEL_FILES, TOKENIZER_FILES, naming, resolve_model
from mmdeploy_llm.weights.folder.text_sizes import TextSizes, read_text_sizes
from mmdeploy_llm.weights.quantized.settings import quantization_settings
from mmdeploy_llm.weights.stored_head import follow_stored_head

from .vectors import rules_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """The contents of a model folder, and the plugins that serve the model.

    plugins: all plugins of this engine, loaded in this process.
    spec: the plugin's spec for the checkpoint's architecture.
    eos_token_ids: tokens that end a sequence. text: sizes of the language model.
    chat_template: Jinja source, None when neither the options nor the checkpoint have one.
    reasoning_parser, tool_parser: None when the output is not parsed.
    reasoning_start_marker, reasoning_end_marker: texts around the reasoning; None without a parser,
    or when it has no such marker.
    grammars: None when guided decoding is off.
    logits_processors: the processors of the plugins.
    rules: what the folder, or else the family, says of vectors and scores.
    add_draft_head: called as add_draft_head(model, config), see ModelSpec.draft_head; None where no
        draft head is asked for.
    """

    plugins: PluginManager
    checkpoint: Checkpoint
    spec: ModelSpec
    tokenizer: PromptTokenizer
    eos_token_ids: frozenset[int]
    text: TextSizes
    chat_template: str | None
    reasoning_parser: ReasoningParserSpec | None
    reasoning_start_marker: str | None
    reasoning_end_marker: str | None
    tool_parser: ToolParserSpec | None
    grammars: GrammarBackend | None
    logits_processors: LogitsProcessors
    rules: EmbeddingRules
    add_draft_head: AddDraftHead | None = None

    @property
    def head(self) -> HeadKind:
        """The head of the checkpoint."""
        return head_of(self.checkpoint.architecture, self.spec.architectures)

    @property
    def stored_bytes(self) -> int:
        """The bytes of the files with the weights."""
        found = self.checkpoint.other_files or find_weights(self.checkpoint.folder)
        return sum(path.stat().st_size for path in found)

    @property
    def is_quantized(self) -> bool:
        """Whether the checkpoint stores weights in few bits, some of them at least."""
        settings = quantization_settings(self.checkpoint.config)
        return bool(self.checkpoint.other_files) or settings is not None


def read_model_files(config: EngineConfig, patterns: tuple[str, ...] = MODEL_FILES) -> ModelFiles:
    """Loads the plugins and reads the model folder. patterns: the files that are fetched of a model
    on the hub. Raises ConfigError, ModelError, PluginError."""
    with naming(config.model):
        return _read(config, patterns)


def _read(config: EngineConfig, patterns: tuple[str, ...]) -> ModelFiles:
    plugins = PluginManager.of(config)
    place = resolve_model(config.model, config.revision, patterns)
    cache = ParseCache(config, plugins)
    checkpoint = follow_stored_head(cache.checkpoint(place))
    tokenizer = _tokenizer(config, checkpoint, cache)
    text = read_text_sizes(checkpoint)
    eos_ids = eos_token_ids(checkpoint, tokenizer)
    spec = plugins.model_for(checkpoint.config.architectures or (), checkpoint.config)
    checkpoint = cache.for_plugins(checkpoint, spec)
    tools = spec.tools if config.tool_call_parser == "auto" else config.tool_call_parser
    if config.chat_template is not None:
        template: str | None = load_template(config.chat_template)
    else:
        template = checkpoint_template(checkpoint.folder, tokenizer.raw) or spec.chat_template
    parser = _reasoning_parser(config.reasoning_parser, plugins, spec, template)
    grammars = None
    if config.guided_decoding_backend != "off":
        grammars = GrammarBackend(
            tokenizer.raw,
            text.vocab_size,
            eos_ids,
            config.guided_decoding_timeout,
            new_parser=None if parser is None else lambda: plugins.build(parser),
        )
    return ModelFiles(
        plugins=plugins,
        checkpoint=checkpoint,
        spec=spec,
        tokenizer=tokenizer,
        eos_token_ids=eos_ids,
        text=text,
        chat_template=template,
        reasoning_parser=parser,
        reasoning_start_marker=_marker("start_marker", plugins, parser),
        reasoning_end_marker=_marker("end_marker", plugins, parser),
        tool_parser=plugins.tool_parser(tools) if tools else None,
        grammars=grammars,
        logits_processors=LogitsProcessors(
            plugins,
            LogitsContext(
                vocab_size=text.vocab_size, tokenizer=tokenizer.raw, eos_token_ids=eos_ids
            ),
            config.logits_processors,
        ),
        rules=rules_of(plugins, spec, checkpoint, tokenizer.raw),
        add_draft_head=draft_head_of(config, plugins, spec, checkpoint),
    )


def _tokenizer(config: EngineConfig, checkpoint: Checkpoint, cache: ParseCache) -> PromptTokenizer:
    if config.tokenizer is None:
        file = next(iter(checkpoint.other_files), None)
        load = partial(load_own_tokenizer, checkpoint)
        return PromptTokenizer(cache.tokenizer(file or checkpoint.folder, load))
    with naming(config.tokenizer, kind="tokenizer"):
        place = resolve_model(config.tokenizer, config.revision, TOKENIZER_FILES)
        own = (place,) if place.is_dir() else (place.parent, place)
        return PromptTokenizer(cache.tokenizer(place, partial(load_tokenizer, *own)))


def _reasoning_parser(
    requested: str | None, plugins: PluginManager, spec: ModelSpec, template: str | None
) -> ReasoningParserSpec | None:
    """Returns the requested parser; for "auto", the model family's.

    "auto" uses no parser when the chat template never mentions its end marker: not every model of
    a family reasons, and the whole answer of one that does not would be held back for a tag that
    never comes.
    """
    is_auto = requested == "auto"
    name = spec.reasoning if is_auto else requested
    if not name:
        return None
    parser = plugins.reasoning_parser(name)
    end = _marker("end_marker", plugins, parser)
    if is_auto and template is not None and end is not None and end not in template:
        return None
    return parser


def _marker(name: str, plugins: PluginManager, parser: ReasoningParserSpec | None) -> str | None:
    if parser is None:
        return None
    factory: Callable[..., Any] = plugins.resolve(parser)
    return getattr(factory, name, None)
