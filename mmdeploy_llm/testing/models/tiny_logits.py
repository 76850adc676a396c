"""The check of `plugins check` that compares a model without a folder: on the tiny checkpoint that
its spec names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from mmdeploy_llm.hooks import ModelSpec
from mmdeploy_llm.hooks.names import error_text
from mmdeploy_llm.testing.tiny import family_of, write_family
from mmdeploy_llm.weights.folder import read_checkpoint

from .base import CheckSkipped, attributed, since
from .equalities import logits_equal_the_reference
from .models import Grid, ModelSubject, loads_the_checkpoint, transformers_reference
from .prompts import make_prompt

TOLERANCE = 1e-3  # of any family's float32 logits; its own tests may demand more


@since(1, 2)
def tiny_equals_the_reference(spec: ModelSpec) -> None:
    """The tiny checkpoint that the spec names loads, and its logits are the reference's."""
    if spec.tiny is None:
        raise CheckSkipped(
            "no logits were compared: the spec has no `tiny`; give it one, or a model folder"
        )
    with TemporaryDirectory() as folder:
        with attributed(f"reading {spec.tiny}", "correct the spec's `tiny`"):
            family = family_of(spec)
        if family.is_embedder:
            raise CheckSkipped(
                "no logits were compared: it gives vectors, which EmbedderConformance compares"
            )
        with attributed(f"writing the tiny checkpoint {spec.tiny}", "correct its Family"):
            write_family(family, Path(folder))
        _compare(_subject_of(spec, Path(folder)))


def _subject_of(spec: ModelSpec, folder: Path) -> ModelSubject:
    config = read_checkpoint(folder).config
    cases: dict[str, Sequence[Grid]] = {"text": (), "other text": ()}
    has_grids = hasattr(getattr(config, "vision_config", None), "spatial_merge_size")
    if "image" in spec.media and has_grids and hasattr(config, "image_token_id"):
        cases["an image"] = ((1, 4, 6),)
    return ModelSubject(
        spec=spec,
        folder=folder,
        config=config,
        cases=cases,
        tolerance=TOLERANCE,
        make_prompt=make_prompt,
        make_reference=transformers_reference,
    )


def _compare(subject: ModelSubject) -> None:
    try:
        for prompt in subject.prompts.values():
            subject.reference.logits(*prompt)
    except Exception as error:  # a model that hears or sees has no logits of text alone
        raise CheckSkipped(
            "no logits were compared: transformers' model does not run the prompts of "
            f"`plugins check` ({error_text(error)}); ModelConformance takes others"
        ) from error
    loads_the_checkpoint(subject)
    logits_equal_the_reference(subject)
