"""Reads what tokenizers return: a dict with `input_ids`, of one sequence or of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmdeploy_llm.errors import RequestError

IDS, MASK = "input_ids", "attention_mask"
# Keys of a tokenizer's result that say nothing more about the ids.
IGNORED = ("length", "offset_mapping", "special_tokens_mask", "token_type_ids")


def is_encoding(prompt: Any) -> bool:
    """Returns whether the prompt is a dict with `input_ids`, such as a BatchEncoding."""
    return isinstance(prompt, Mapping) and IDS in prompt


def encoded_rows(encoding: Mapping[str, Any]) -> list[list[Any]]:
    """Returns the ids of each sequence, without the padding at its ends that the mask marks.

    Lists, arrays and tensors are accepted, of one or two dimensions. Raises RequestError for a mask
    that does not fit the ids, and for several sequences that share other keys, such as images.
    """
    rows = _rows(encoding[IDS])
    mask = encoding.get(MASK)
    masks = [[1] * len(row) for row in rows] if mask is None else _rows(mask)
    if [len(row) for row in rows] != [len(row) for row in masks]:
        raise RequestError(
            f"{MASK} must have the shape of {IDS}, got rows of {[len(row) for row in masks][:8]} "
            f"and {[len(row) for row in rows][:8]} items"
        )
    others = sorted(str(name) for name in encoding if name not in (IDS, MASK, *IGNORED))
    if len(rows) > 1 and others:
        raise RequestError(
            f"{IDS} holds {len(rows)} sequences, which cannot share {', '.join(others[:8])}; give "
            "a list with one dict for each"
        )
    return [_unpadded(row, own) for row, own in zip(rows, masks, strict=True)]


def one_sequence(encoding: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the dict with `prompt_token_ids` in place of a tokenizer's keys.

    Raises RequestError as `encoded_rows` does, and unless there is one sequence.
    """
    rows = encoded_rows(encoding)
    if len(rows) != 1:
        raise RequestError(
            f"a prompt is one sequence, but {IDS} holds {len(rows)}; give a dict for each"
        )
    pixels = [name for name in encoding if str(name).startswith("pixel_values")]
    if pixels:
        raise RequestError(
            f"processed media ({pixels[0]}) are not accepted beside {IDS}; give the images or "
            "videos themselves in multimodal_data, and a prompt with one placeholder for each"
        )
    others = {name: encoding[name] for name in encoding if name not in (IDS, MASK, *IGNORED)}
    if "prompt_token_ids" in others:
        raise RequestError(f"a prompt dict takes {IDS} or prompt_token_ids, not both")
    return {"prompt_token_ids": rows[0], **others}


def _rows(values: Any) -> list[list[Any]]:
    """Returns a list, array or tensor as rows; one row where it has one dimension."""
    found = listed(values)
    if not isinstance(found, (list, tuple)):
        raise RequestError(
            f"{IDS} and {MASK} must be lists, arrays or tensors, got {type(values).__name__}"
        )
    items = [listed(item) for item in found]
    is_batch = [isinstance(item, (list, tuple)) for item in items]
    if all(is_batch) and items:
        return [list(item) for item in items]
    if any(is_batch):
        raise RequestError(f"{IDS} and {MASK} must be one sequence or rows, found a mixture")
    return [items]


def listed(values: Any) -> Any:
    """Returns an array or tensor as nested lists, any other value unchanged."""
    return values.tolist() if callable(getattr(values, "tolist", None)) else values


def _unpadded(row: list[Any], mask: list[Any]) -> list[Any]:
    """Returns the ids between the first and the last 1 of the mask."""
    if any(flag not in (0, 1) for flag in mask):
        raise RequestError(f"{MASK} must consist of 0 and 1")
    used = [index for index, flag in enumerate(mask) if flag]
    if not used:
        return []
    first, end = used[0], used[-1] + 1
    if len(used) != end - first:
        raise RequestError(f"{MASK} has a 0 between two 1s; padding belongs at the ends")
    return row[first:end]
