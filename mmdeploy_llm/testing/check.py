"""check_plugin: runs the checks of an installed plugin that need no input from its author."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
import transformers

from mmdeploy_llm.errors import CheckpointError, MediaError, ModelNotSupportedError
from mmdeploy_llm.hooks import (
    AttentionBackendSpec,
    ChatPartSpec,
    Checkpoint,
    CorpusFormatSpec,
    MediaProcessorSpec,
    ModelSpec,
    OutputSinkSpec,
    PluginManager,
    WeightFormatSpec,
)
from mmdeploy_llm.hooks.names import error_text, normalise
from mmdeploy_llm.hooks.records import FAULTS, describe
from mmdeploy_llm.hooks.selection import ANY_MODEL
from mmdeploy_llm.testing.attention import backends
from mmdeploy_llm.testing.attention.subject import BackendSubject
from mmdeploy_llm.testing.data import corpus, outputs
from mmdeploy_llm.testing.data.corpus_subject import CorpusSubject
from mmdeploy_llm.testing.media import chats, processors, splitters
from mmdeploy_llm.testing.media.subject import ProcessorSubject, checkpoint_of
from mmdeploy_llm.testing.models import (
    determinism,
    embedders,
    equalities,
    models,
    ranks,
    variants,
)
from mmdeploy_llm.testing.models import weights as model_weights
from mmdeploy_llm.testing.models.base import Check, CheckFailed, CheckSkipped, factory_of
from mmdeploy_llm.testing.models.prompts import make_prompt
from mmdeploy_llm.testing.models.tiny_logits import tiny_equals_the_reference
from mmdeploy_llm.testing.plugins import (
    chat_parts,
    fetchers,
    fresh,
    logits,
    observers,
    parsers,
    plugins,
    tools,
)
from mmdeploy_llm.testing.plugins.declared import dated
from mmdeploy_llm.testing.plugins.installed import check_name
from mmdeploy_llm.testing.plugins.plugin_subject import PluginSubject
from mmdeploy_llm.testing.tiny import make_tokenizer
from mmdeploy_llm.testing.weights import products as weight_products
from mmdeploy_llm.testing.weights import reading as weight_reading
from mmdeploy_llm.testing.weights.subject import WeightFormatSubject
from mmdeploy_llm.weights.folder import read_checkpoint

from .given import FETCHER, GivenFields

FOLDER_TOLERANCE = 1e-3  # for real checkpoints, whose longer sums have larger rounding errors
NUM_LAYERS = 2  # number of layers of a model that is built from transformers' default config
SMALL_IMAGES = {"an image": ((1, 4, 6),), "two images": ((1, 4, 6), (1, 8, 4))}
ON_META = (
    models.builds_on_meta,
    models.has_what_the_engine_asks_for,
    models.unknown_keys_are_refused,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome of one check.

    check: name of the check.
    subject: what was checked, such as "reasoning parser acme"; "" for the plugin as a whole.
    message: why it failed or was skipped; when it passed, what the author should know, or "".
    since: the version of the plugin API with which the check came; None: the first.
    """

    check: str
    subject: str
    outcome: Literal["pass", "fail", "skip"]
    message: str
    seconds: float
    since: tuple[int, int] | None = None


def check_plugin(
    name: str, *, model_folder: Path | None = None, plugin_files: Sequence[Path] = ()
) -> Iterator[Verdict]:
    """Checks the installed plugin `name`, or the file with this path; yields one verdict per check
    as it finishes.

    Parsers are run on texts built from their markers, processors on generated media of their kind,
    models on transformers' default config of their architecture with few layers.
    model_folder: a checkpoint; the model that serves it gets all checks, processors get its files.
    plugin_files: plugins whose names are compared, too, as those of installed ones are.
    Raises PluginLoadError when no such plugin is installed, or the file cannot be read, and
    CheckpointError for an unreadable folder.
    """
    check_name(name)
    checkpoint = None if model_folder is None else read_checkpoint(model_folder)
    subject = PluginSubject.of(name, beside=plugin_files)
    return (dated(verdict, subject) for verdict in _verdicts(subject, checkpoint))


def _verdicts(subject: PluginSubject, checkpoint: Checkpoint | None) -> Iterator[Verdict]:
    yield from _run(plugins.CHECKS + fresh.CHECKS + observers.CHECKS, "", subject)
    try:
        manager = subject.manager
    except (CheckFailed, CheckSkipped):
        return  # the verdict of hooks_are_valid says why
    with ExitStack() as stack:
        given = GivenFields(plugin=subject, stack=stack)
        yield from _run(given.checks(), "", given)
        yield from _of_functions(subject, manager, given)
        for processor in manager.media_processors:
            yield from _check_processor(processor, checkpoint, given.of(processor.name))
        yield from _of_formats(subject, manager, given)
    for model in manager.models:
        yield from _check_model(model, manager, checkpoint)


def _of_functions(
    subject: PluginSubject, manager: PluginManager, given: GivenFields
) -> Iterator[Verdict]:
    """Checks what needs no checkpoint: fetcher, parsers, logits processors and chat parts."""
    if subject.has_hook(FETCHER):
        fetch = {"fetch": subject.loaded.fetch_media, "serves": {}, **given.of(FETCHER)}
        yield from _run(fetchers.CHECKS, "fetcher", fetchers.FetcherSubject(**fetch))
    for parser in manager.reasoning_parsers:
        reasoning = parsers.ParserSubject(spec=parser, **given.of(parser.name))
        yield from _run(parsers.CHECKS, describe(parser), reasoning)
    for tool_parser in manager.tool_parsers:
        found = tools.ToolParserSubject(spec=tool_parser, **given.of(tool_parser.name))
        yield from _run(tools.CHECKS, describe(tool_parser), found)
    for spec in manager.logits_processors:
        fields = {"new_tokenizer": make_tokenizer, **given.of(spec.name)}
        one = logits.LogitsProcessorSubject(spec=spec, **fields)
        yield from _run(logits.CHECKS, describe(spec), one)
    for part in manager.provided(ChatPartSpec):
        others = tuple(own for own in manager.provided(ChatPartSpec) if own is not part)
        fields = {"others": others, **given.of(part.name)}
        written = chat_parts.ChatPartSubject(spec=part, **fields)
        yield from _run(chat_parts.CHECKS, describe(part), written)


def _of_formats(
    subject: PluginSubject, manager: PluginManager, given: GivenFields
) -> Iterator[Verdict]:
    """Checks formats of weights, corpora and outputs, and attention backends."""
    for weights in (spec for spec in subject.specs if isinstance(spec, WeightFormatSpec)):
        checks = weight_reading.CHECKS + weight_products.CHECKS
        stored = WeightFormatSubject(spec=weights, **given.of(weights.name))
        yield from _run(checks, describe(weights), stored)
    for backend in manager.provided(AttentionBackendSpec):
        attention = BackendSubject(spec=backend, **given.of(backend.name))
        yield from _run(backends.CHECKS, describe(backend), attention)
    for form in manager.provided(CorpusFormatSpec):
        opened = CorpusSubject(spec=form, file=subject.file, **given.of(form.name))
        yield from _run(corpus.CHECKS, describe(form), opened)
    for sink in manager.provided(OutputSinkSpec):
        store = outputs.OutputSubject(spec=sink, file=subject.file, **given.of(sink.name))
        yield from _run(outputs.CHECKS, describe(sink), store)


def _run(checks: Sequence[Check], what: str, subject: Any) -> Iterator[Verdict]:
    """Yields a verdict per check. Any exception of the plugin counts as a failure."""
    for check in checks:
        start = time.perf_counter()
        outcome: Literal["pass", "fail", "skip"] = "pass"
        message = ""
        try:
            message = check(subject) or ""
        except CheckSkipped as reason:
            outcome, message = "skip", str(reason)
        except CheckFailed as failure:
            outcome, message = "fail", str(failure)
        except FAULTS as error:
            outcome, message = "fail", f"the plugin raised {error_text(error)}"
        yield Verdict(
            check=check.__name__,
            subject=what,
            outcome=outcome,
            message=message,
            seconds=time.perf_counter() - start,
            since=getattr(check, "since", None),
        )


def _skipped(check: str, what: str, message: str) -> Verdict:
    return Verdict(check=check, subject=what, outcome="skip", message=message, seconds=0.0)


def _check_processor(
    spec: MediaProcessorSpec, checkpoint: Checkpoint | None, fields: Mapping[str, Any]
) -> Iterator[Verdict]:
    what = describe(spec)
    with ExitStack() as stack:
        if checkpoint is not None and not _serves(spec, checkpoint):
            yield _skipped("builds", what, "the processor is for other models than the folder's")
            return
        folder = Path(stack.enter_context(TemporaryDirectory()))
        given = checkpoint or checkpoint_of(spec, folder)
        if spec.yields is not None:
            one = splitters.SplitterSubject(spec=spec, checkpoint=given, **fields)
            stack.callback(one.close)
            yield from _run(splitters.CHECKS, what, one)
            return
        subject = ProcessorSubject(spec=spec, checkpoint=given, **fields)
        stack.callback(subject.close)
        try:
            subject.samples = _readable_samples(subject)
        except CheckFailed as failure:
            if checkpoint is None:
                yield _skipped("builds", what, f"{failure}; give a model folder to build it with")
                return
            subject.samples = {}
        if not subject.samples:
            subject.too_large = {}
        yield from _run(processors.CHECKS, what, subject)


def _readable_samples(subject: ProcessorSubject) -> Mapping[str, Any]:
    """Returns the samples that are given, or the generated media that the processor can read: not
    every image processor reads image files."""
    processor, readable = subject.processor, {}
    given = subject.samples or {}
    if not subject.has_generated_samples:
        return given
    for name, source in given.items():
        try:
            processor.decode(source, subject.limits)
        except MediaError:
            continue
        except FAULTS:
            pass  # the checks will report it
        readable[name] = source
    return readable


def _serves(spec: MediaProcessorSpec, checkpoint: Checkpoint) -> bool:
    """Returns whether the processor is for the checkpoint's family, from whatever plugin."""
    try:
        config = checkpoint.config
        family = PluginManager.load().model_for(config.architectures or (), config).name
    except ModelNotSupportedError:
        return ANY_MODEL in spec.models
    return bool({normalise(family), ANY_MODEL} & set(map(normalise, spec.models)))


def _check_model(
    spec: ModelSpec, manager: PluginManager, checkpoint: Checkpoint | None
) -> Iterator[Verdict]:
    if checkpoint is None:
        for architecture in spec.architectures:
            yield from _check_on_meta(spec, architecture)
        yield from _run((tiny_equals_the_reference,), describe(spec), spec)
        return
    architectures = checkpoint.config.architectures or ()
    try:
        is_served = manager.model_for(architectures, checkpoint.config) is spec
    except ModelNotSupportedError:
        is_served = False
    if not is_served:
        yield _skipped("builds_on_meta", describe(spec), "the folder is of another architecture")
        return
    cases: dict[str, Sequence[models.Grid]] = {"text": (), "other text": ()}
    if "image" in spec.media and _has_grids(checkpoint.config):
        cases |= SMALL_IMAGES
    subject = _subject(spec, checkpoint.config, checkpoint.folder, cases)
    if _is_embedder(subject):
        subject.make_reference = embedders.EmbedderReference
        yield from _run(embedders.CHECKS, describe(spec), subject)
        return
    checks = models.CHECKS + equalities.CHECKS + model_weights.CHECKS + variants.CHECKS
    checks += chats.CHECKS + determinism.CHECKS + ranks.CHECKS
    yield from _run(checks, describe(spec), subject)


def _is_embedder(subject: models.ModelSubject) -> bool:
    """Whether the model says that it gives vectors only; False where it cannot be built, which the
    checks of all models report."""
    try:
        with torch.device("meta"):
            return bool(getattr(factory_of(subject.spec)(subject.config), "is_embedder", False))
    except Exception:
        return False


def _check_on_meta(spec: ModelSpec, architecture: str) -> Iterator[Verdict]:
    what = f"{describe(spec)} ({architecture})"
    known = getattr(transformers, architecture, None)
    if known is None:
        named = "any architecture" if architecture == ANY_MODEL else architecture
        reason = f"transformers has no config for {named}; give a model folder"
        yield _skipped("builds_on_meta", what, reason)
        return
    config = _short_config(known.config_class)
    config.architectures = [architecture]
    text, has_tower = config.get_text_config(), getattr(config, "vision_config", True) is not None
    if getattr(text, "layer_types", ()) is None or not has_tower:
        reason = "transformers' default config is incomplete; give a model folder"
        yield _skipped("builds_on_meta", what, reason)
        return
    subject = _subject(spec, config, Path(), {})
    try:
        with torch.device("meta"):
            factory_of(spec)(config)
    except (ModelNotSupportedError, CheckpointError) as error:
        reason = f"it refuses transformers' default config ({error}); give a model folder"
        yield _skipped("builds_on_meta", what, reason)
        return
    except Exception:  # the checks say what is wrong
        pass
    yield from _run(ON_META, what, subject)


def _subject(
    spec: ModelSpec, config: Any, folder: Path, cases: dict[str, Sequence[models.Grid]]
) -> models.ModelSubject:
    return models.ModelSubject(
        spec=spec,
        folder=folder,
        config=config,
        cases=cases,
        tolerance=FOLDER_TOLERANCE,
        make_prompt=make_prompt,
        make_reference=models.transformers_reference,
    )


def _short_config(config_class: Any) -> Any:
    """Returns the default config with few layers."""
    config = config_class()
    kinds = set(getattr(config, "layer_types", None) or ())
    for section in (config, config.get_text_config(), getattr(config, "vision_config", None)):
        _shorten(section)
    if kinds and set(config.layer_types) != kinds:  # the config may need a kind that was cut off
        return config_class(num_hidden_layers=NUM_LAYERS)
    return config


def _shorten(config: Any) -> None:
    """Reduces a config to NUM_LAYERS layers, including its lists with an entry per layer."""
    for name in ("num_hidden_layers", "depth"):
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, min(NUM_LAYERS, getattr(config, name)))
    for name in ("layer_types", "mlp_layer_types"):
        kinds = getattr(config, name, None)
        if isinstance(kinds, list) and len(kinds) > NUM_LAYERS:  # a computed one has followed
            setattr(config, name, kinds[:NUM_LAYERS])


def _has_grids(config: Any) -> bool:
    """Returns whether `make_prompt` can make prompts with random patches for the config."""
    vision = getattr(config, "vision_config", None)
    return hasattr(config, "image_token_id") and hasattr(vision, "spatial_merge_size")
