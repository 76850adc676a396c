"""Checks models, as check_plugin does: with the folder of a checkpoint, or on transformers' default
config of their architecture. Its imports take seconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from mmdeploy_llm.errors import CheckpointError, ModelNotSupportedError
from mmdeploy_llm.hooks import Checkpoint, ModelSpec, PluginManager
from mmdeploy_llm.hooks.records import describe
from mmdeploy_llm.hooks.selection import ANY_MODEL
from mmdeploy_llm.testing.models import models
from mmdeploy_llm.testing.models.base import factory_of
from mmdeploy_llm.testing.models.prompts import make_prompt
from mmdeploy_llm.testing.models.tiny_logits import tiny_equals_the_reference

from .verdicts import Verdict, run, skipped

FOLDER_TOLERANCE = 1e-3  # for real checkpoints, whose longer sums have larger rounding errors
NUM_LAYERS = 2  # number of layers of a model that is built from transformers' default config
SMALL_IMAGES = {"an image": ((1, 4, 6),), "two images": ((1, 4, 6), (1, 8, 4))}
ON_META = (
    models.builds_on_meta,
    models.has_what_the_engine_asks_for,
    models.unknown_keys_are_refused,
)


def check_model(
    spec: ModelSpec, manager: PluginManager, checkpoint: Checkpoint | None
) -> Iterator[Verdict]:
    """Yields the verdicts of a model."""
    if checkpoint is None:
        for architecture in spec.architectures:
            yield from _check_on_meta(spec, architecture)
        yield from run((tiny_equals_the_reference,), describe(spec), spec)
        return
    architectures = checkpoint.config.architectures or ()
    try:
        is_served = manager.model_for(architectures, checkpoint.config) is spec
    except ModelNotSupportedError:
        is_served = False
    if not is_served:
        yield skipped("builds_on_meta", describe(spec), "the folder is of another architecture")
        return
    yield from _check_all(spec, checkpoint)


def _check_all(spec: ModelSpec, checkpoint: Checkpoint) -> Iterator[Verdict]:
    """Yields the verdicts of the model that serves the checkpoint."""
    from mmdeploy_llm.testing.media import chats
    from mmdeploy_llm.testing.models import (
        determinism,
        embedders,
        equalities,
        ranks,
        variants,
        weights,
    )

    cases: dict[str, Sequence[models.Grid]] = {"text": (), "other text": ()}
    if "image" in spec.media and _has_grids(checkpoint.config):
        cases |= SMALL_IMAGES
    subject = _subject(spec, checkpoint.config, checkpoint.folder, cases)
    if _is_embedder(subject):
        subject.make_reference = embedders.EmbedderReference
        yield from run(embedders.CHECKS, describe(spec), subject)
        return
    checks = models.CHECKS + equalities.CHECKS + weights.CHECKS + variants.CHECKS
    checks += chats.CHECKS + determinism.CHECKS + ranks.CHECKS
    yield from run(checks, describe(spec), subject)


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
        yield skipped("builds_on_meta", what, reason)
        return
    config = _short_config(known.config_class)
    config.architectures = [architecture]
    text, has_tower = config.get_text_config(), getattr(config, "vision_config", True) is not None
    if getattr(text, "layer_types", ()) is None or not has_tower:
        reason = "transformers' default config is incomplete; give a model folder"
        yield skipped("builds_on_meta", what, reason)
        return
    subject = _subject(spec, config, Path(), {})
    try:
        with torch.device("meta"):
            factory_of(spec)(config)
    except (ModelNotSupportedError, CheckpointError) as error:
        reason = f"it refuses transformers' default config ({error}); give a model folder"
        yield skipped("builds_on_meta", what, reason)
        return
    except Exception:  # the checks say what is wrong
        pass
    yield from run(ON_META, what, subject)


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
