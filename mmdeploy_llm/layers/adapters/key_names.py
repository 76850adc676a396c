"""Names that the tensors of adapters have in other versions of their libraries."""

from __future__ import annotations

from collections.abc import Iterator

# The language model of a model with media lies below it or beside it, as its towers do.
RENAMES = (
    ("model.language_model.", "model."),
    ("model.language_model.", "language_model.model."),
    ("language_model.model.", "model.language_model."),
    ("model.language_model.", "language_model."),
    ("model.", "model.language_model."),
    ("model.visual.", "visual."),
    ("model.vision_tower.", "vision_tower."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
    ("lm_head.", "language_model.lm_head."),
    ("model.", ""),
    ("", "model."),
)


def names_of(key: str) -> Iterator[str]:
    """Yields a key, then those that other versions have for the same tensor."""
    yield key
    for old, new in RENAMES:
        if key.startswith(old):
            yield new + key.removeprefix(old)
