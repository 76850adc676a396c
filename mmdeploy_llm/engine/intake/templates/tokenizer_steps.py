"""Looks at what a tokenizer.json does with a text, before any text goes through it.

A text passes the steps of a normalizer and a pre-tokenizer, and the tokens those of a decoder. A
file that was made to hurt may let a text grow with every step, or search it with an expression that
never ends; the library has no limits of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.system.guarding.folder_files import shown

MAX_STEPS = 64  # of one kind; published tokenizers have up to ten
MAX_TEXT = 4096  # characters that a step puts into the text
MAX_GROWTH = 64  # times that all steps together may lengthen a text
NESTED = ("normalizers", "pretokenizers", "decoders")
SECTIONS = ("normalizer", "pre_tokenizer", "decoder")
# Expressions of published tokenizers, and of those that transformers converts: their time grows as
# the text does.
KNOWN = frozenset(
    {
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[0-9][0-9][0-9]",
        r"\d{1,3}(?=(?:\d{3})*\b)",
        r"[\r\n]",
        r"\s?\p{L}+",
        r"\s?\p{P}+",
        r" {2,}",
        r"\s+",
        r"\n",
        r"\r",
    }
)


def check_steps(tokenizer: Any) -> bool:
    """Returns whether every text goes through in a time that grows as the text does; else its ids
    are to be computed where that can be ended.

    tokenizer: transformers' one; one without a Rust backend is not looked at. Raises
    CheckpointError for steps without end, texts that grow too much, and decoders with expressions
    of their own, which every token passes.
    """
    backend, is_known = getattr(tokenizer, "backend_tokenizer", None), True
    for section in SECTIONS if backend is not None else ():
        part = getattr(backend, section)
        steps = [] if part is None else list(_steps(json.loads(part.__getstate__())))
        _check(section, steps)
        unknown = [found for step in steps if (found := _expression(step)) not in (None, *KNOWN)]
        if unknown and section == "decoder":
            raise CheckpointError(
                f"the decoder in tokenizer.json searches each token with the expression "
                f"{shown(unknown[0])}, which could take for ever; allowed: plain texts"
            )
        is_known &= not unknown
    return is_known


def _steps(part: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the steps of a part, in order; sequences may hold sequences."""
    nested = next((part[key] for key in NESTED if key in part), None)
    if nested is None:
        yield part
        return
    for each in nested:
        yield from _steps(each)


def _check(section: str, steps: list[Mapping[str, Any]]) -> None:
    if len(steps) > MAX_STEPS:
        raise CheckpointError(
            f"the {section} in tokenizer.json has {len(steps)} steps; allowed: up to {MAX_STEPS}"
        )
    growth = 1.0
    for step in steps:
        added = max((len(step.get(key) or "") for key in ("content", "prepend")), default=0)
        if added > MAX_TEXT:
            raise CheckpointError(
                f"a step of the {section} in tokenizer.json adds {added} characters; allowed: up "
                f"to {MAX_TEXT}"
            )
        if step.get("type") == "Replace":
            growth *= max(1.0, _growth(step, added))
    if growth > MAX_GROWTH:
        raise CheckpointError(
            f"the steps of the {section} in tokenizer.json make a text up to {growth:.3g} times as "
            f"long; allowed: {MAX_GROWTH} times"
        )


def _growth(step: Mapping[str, Any], added: int) -> float:
    """Returns how many times longer a text can get; a match may also be empty."""
    text = (step.get("pattern") or {}).get("String")
    return added / len(text) if text else added + 1.0


def _expression(step: Mapping[str, Any]) -> str | None:
    """Returns the regular expression of a step, None where it looks for a plain text or none."""
    pattern = step.get("pattern")
    found = pattern.get("Regex") if isinstance(pattern, Mapping) else None
    return found if isinstance(found, str) else None
