"""Builds the media processors of a model, for the intake and for tools that need no weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from mmdeploy_llm.engine.intake.chat import with_sources
from mmdeploy_llm.engine.intake.prompts import PromptReader
from mmdeploy_llm.errors import ConfigError, PluginContractError, UnsupportedMediaError
from mmdeploy_llm.hooks import (
    BoxRule,
    KindTable,
    MediaProcessor,
    MediaProcessorSpec,
    MediaSplitter,
)
from mmdeploy_llm.hooks.factories import imported_for
from mmdeploy_llm.hooks.names import did_you_mean, normalise
from mmdeploy_llm.media.budgets.choice import budgets_of
from mmdeploy_llm.media.loading.expanding import PartExpander
from mmdeploy_llm.media.loading.kinds import ModelMedia
from mmdeploy_llm.media.loading.loader import MediaLoader
from mmdeploy_llm.media.loading.outside import encoder_rule
from mmdeploy_llm.media.loading.reader import media_limits
from mmdeploy_llm.media.loading.within_budget import within_budget
from mmdeploy_llm.messages import MEDIA_KINDS, MediaItem
from mmdeploy_llm.values.closing import closed_on_error
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.prompt import PromptParts
from mmdeploy_llm.weights.folder import PROMPT_FILES, naming

from .model_files import ModelFiles, read_model_files

logger = logging.getLogger(__name__)


def open_media(config: EngineConfig) -> MediaLoader:
    """Returns a loader for the media of a model, without the model's weights. Raises what
    `read_model_files` raises."""
    files = read_model_files(config, PROMPT_FILES)
    with naming(config.model):
        media = build_media(files, config)
    return MediaLoader(
        media=media,
        fetch=files.plugins.fetch_media,
        limits=media_limits(config),
        max_items=config.limit_mm_per_prompt or {},
        budgets=budgets_of(config),
        guard=files.plugins.guard,
    )


def build_media(files: ModelFiles, config: EngineConfig) -> ModelMedia:
    """Builds what reads the media of a model: the processors of the kinds that its family takes, or
    that a plugin adds to it by its name, and the splitters of kinds that yield one of these.

    Raises what `build_processors` raises, and PluginError for parts of messages that no function
    writes.
    """
    plugins, table = files.plugins, files.plugins.kinds
    _check_limits(config, table)
    PartExpander(table, model=files.spec.name).check()
    chosen = {
        kind: plugins.media_processor(kind, files.spec.name, spec=files.spec)
        for kind in table.kinds
    }
    encoder = encoder_rule(files.spec, files.checkpoint, plugins.owner(files.spec))
    processors = build_processors(files, config)
    with closed_on_error() as opened:
        opened.callback(ModelMedia(processors=processors).close)
        splitters, yields = _build_splitters(files, config, chosen, tuple(processors))
    read = (*processors, *splitters)
    specs = {kind: spec for kind, spec in chosen.items() if spec is not None and kind in read}
    return ModelMedia(
        processors=processors,
        splitters=splitters,
        yields={**table.yields, **yields},
        known=table.kinds,
        part_types={
            name: kind
            for name, kind in table.part_types.items()
            if name.removesuffix("_url") not in table.kinds
        },
        part_texts={kind: spec.part_text for kind, spec in specs.items() if spec.part_text},
        encoded=files.spec.media,
        encoder=encoder,
        owners={kind: plugins.described(spec) for kind, spec in specs.items()},
    )


def _build_splitters(
    files: ModelFiles,
    config: EngineConfig,
    chosen: Mapping[str, MediaProcessorSpec | None],
    read: tuple[str, ...],
) -> tuple[dict[str, MediaSplitter], dict[str, str]]:
    """Builds the splitters of kinds that yield what the model reads, and says what they yield; one
    may yield the kind of another, and a ring of them yields nothing."""
    split = {kind: spec for kind, spec in chosen.items() if spec and spec.yields}
    left = {kind: spec for kind, spec in split.items() if kind not in read}
    splitters: dict[str, MediaSplitter] = {}
    yields: dict[str, str] = {}
    with closed_on_error() as opened:
        opened.callback(ModelMedia(splitters=splitters).close)
        while ready := [kind for kind, spec in left.items() if spec.yields in (*read, *splitters)]:
            for kind in ready:
                spec = left.pop(kind)
                options = _with_prefix(config.mm_processor_kwargs or {}, kind)
                try:
                    splitters[kind] = files.plugins.build_splitter(spec, files.checkpoint, options)
                except UnsupportedMediaError as reason:
                    logger.info("the model takes no %s: %s", kind, reason)
                else:
                    assert spec.yields is not None
                    yields[kind] = spec.yields
    return splitters, yields


def kinds_of(files: ModelFiles) -> tuple[str, ...]:
    """Returns the kinds that a model may have processors of: those of its family, and those that a
    plugin adds to it by the family's name."""
    name = normalise(files.spec.name)
    added = (
        spec.kind
        for spec in files.plugins.media_processors
        if spec.yields is None
        and spec.kind not in MEDIA_KINDS  # whether it encodes these, a family says itself
        and name in map(normalise, spec.models)
    )
    return tuple(dict.fromkeys((*files.spec.media, *added)))


def build_processors(files: ModelFiles, config: EngineConfig) -> dict[str, MediaProcessor]:
    """Builds one processor for each kind of media that the model accepts and a plugin provides.

    A processor written for any model may find that this model accepts no such media; that kind is
    left out and logged. Raises PluginError when a processor cannot be built, ConfigError for a
    budget that it cannot keep to.
    """
    given = config.mm_processor_kwargs or {}
    for name in (f"{kind}_tokens" for kind in MEDIA_KINDS):
        if name in given:
            raise ConfigError(f"{name} is an option of its own: give LLM({name}=...)")
    found: dict[str, MediaProcessor] = {}
    kinds = kinds_of(files)
    known = dict.fromkeys((*kinds, *files.plugins.kinds.yields))
    with closed_on_error() as opened:
        opened.callback(ModelMedia(processors=found).close)
        for kind in kinds:
            spec = files.plugins.media_processor(kind, files.spec.name, spec=files.spec)
            if spec is None or spec.yields is not None:
                continue
            others = [other for other in known if other not in (kind, *MEDIA_KINDS)]
            options = _own_options(given, others)
            try:
                found[kind] = files.plugins.build(spec, files.checkpoint, options)
            except UnsupportedMediaError as reason:
                logger.info("the model takes no %s: %s", kind, reason)
            else:
                found[kind] = within_budget(found[kind], budgets_of(config).get(kind, "full"))
    return found


def _check_limits(config: EngineConfig, table: KindTable) -> None:
    """Raises ConfigError for a limit of a kind that nobody has."""
    for kind in config.limit_mm_per_prompt or ():
        if kind not in table.kinds:
            raise ConfigError(
                f"limit_mm_per_prompt has an unknown kind {kind!r}"
                f"{did_you_mean(kind, table.kinds)}; known: {', '.join(table.kinds)}"
            )


def _with_prefix(options: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Returns the options of a splitter, which begin with its kind."""
    return {name: value for name, value in options.items() if name.startswith(f"{kind}_")}


def box_rule_of(files: ModelFiles) -> BoxRule | None:
    """Returns how the model writes boxes; None where its plugin does not say. Raises PluginError
    for a rule that cannot be imported or is none."""
    name = files.spec.boxes
    if name is None:
        return None
    owner = files.plugins.owner(files.spec)
    about = f"{name}, the boxes of model {files.spec.name!r} of plugin {owner!r},"
    found = imported_for(name, about)
    if not isinstance(found, BoxRule):
        raise PluginContractError(f"{about} must be a BoxRule, got {type(found).__name__}")
    return found


def check_boxes(config: EngineConfig, params: SamplingParams) -> None:
    """Raises ConfigError for a model without a rule for boxes, and for parameters that leave out
    the tokens that its boxes are made of; needs no weights."""
    files = read_model_files(config, PROMPT_FILES)
    rule = box_rule_of(files)
    if rule is None:
        known = sorted(spec.name for spec in files.plugins.models if spec.boxes)
        raise ConfigError(
            f"no plugin says how {files.spec.name} writes boxes; those of {', '.join(known)} are "
            "known (docs/boxes.md)"
        )
    if rule.is_special and params.skip_special_tokens is not False:
        raise ConfigError(
            f"boxes of {files.spec.name} are special tokens: give skip_special_tokens=False "
            "(--sampling skip_special_tokens=false)"
        )


def _own_options(options: Any, others: list[str]) -> dict[str, Any]:
    """Returns the options without those of `others`, kinds that plugins add. The options of kind
    "chart" begin with "chart_", for example, and an image processor would not know them."""
    prefixes = tuple(f"{other}_" for other in others)
    return {name: value for name, value in options.items() if not name.startswith(prefixes)}


class ChatMedia:
    """Takes media out of chats, parts of plugins' types too. To be closed."""

    def __init__(self, config: EngineConfig) -> None:
        files = read_model_files(config, PROMPT_FILES)
        self._kinds = build_media(files, config)
        expander = expander_of(files, self._kinds, config)
        self._prompts = PromptReader.of_model(self._kinds, expander)

    def of(self, prompt: PromptParts) -> tuple[MediaItem, ...]:
        """Returns the items of a chat, in order. Raises RequestError."""
        read = self._prompts.read(prompt)
        return with_sources(read.messages or (), read.media)

    def close(self) -> None:
        """Closes what reads media."""
        self._kinds.close()


def expander_of(files: ModelFiles, media: ModelMedia, config: EngineConfig) -> PartExpander:
    """Returns what writes the parts of messages whose types plugins add, for a model."""
    return PartExpander(
        files.plugins.kinds,
        model=files.spec.name,
        takes=media.read,
        fetch=files.plugins.fetch_media,
        limits=media_limits(config),
        guard=files.plugins.guard,
    )
