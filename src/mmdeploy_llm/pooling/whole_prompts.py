"""Prompts of models for which an item is a prompt of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mmdeploy_llm.errors import RequestError


def whole_prompt(
    text: str, markers: Sequence[str], kinds: Sequence[str], ids: Mapping[str, int]
) -> tuple[int, ...] | None:
    """Returns the prompt of an item of a kind that is a prompt of its own: its placeholder; None
    for other prompts.

    kinds: of the items. ids: kind -> placeholder, of those kinds. Raises RequestError for a text or
    another item beside it.
    """
    own = [kind for kind in kinds if kind in ids]
    if not own:
        return None
    for marker in markers:
        text = text.replace(marker, "")
    if len(kinds) > 1 or text.strip():
        beside = f"{len(kinds)} items" if len(kinds) > 1 else f"the text {text.strip()!r:.60}"
        raise RequestError(
            f"this model makes vectors of one {own[0]} or of a text, and the prompt has "
            f"{beside} together; give each as a prompt of its own"
        )
    return (ids[own[0]],)
