"""Prompts of models for which an item is a prompt of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mmdeploy_llm.errors import RequestError
from mmdeploy_llm.messages import MediaItem


def whole_prompt(
    text: str | None,
    media: Sequence[MediaItem],
    markers: Sequence[str],
    placeholders: Mapping[str, int],
) -> tuple[int, ...] | None:
    """Returns the prompt of an item of a kind that is a prompt of its own: its placeholder; None
    for other prompts, and where the text is None.

    placeholders: kind -> id, of those kinds. Raises RequestError for a text or another item beside
    it.
    """
    own = [item.kind for item in media if item.kind in placeholders]
    if text is None or not own:
        return None
    for marker in markers:
        text = text.replace(marker, "")
    if len(media) > 1 or text.strip():
        beside = f"{len(media)} items" if len(media) > 1 else f"the text {text.strip()!r:.60}"
        raise RequestError(
            f"this model makes vectors of one {own[0]} or of a text, and the prompt has "
            f"{beside} together; give each as a prompt of its own"
        )
    return (placeholders[own[0]],)
