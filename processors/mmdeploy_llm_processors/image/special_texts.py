"""Reads the texts of special tokens from a checkpoint's tokenizer."""

from __future__ import annotations

from collections.abc import Mapping

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.hooks import Checkpoint


def special_texts(checkpoint: Checkpoint, defaults: Mapping[str, str]) -> dict[str, str]:
    """Returns the text of each token that `defaults` names: the tokenizer's own, else that of the
    published models.

    Raises CheckpointError for one that is no text.
    """
    tokenizer = checkpoint.read_json("tokenizer_config.json")
    extra = tokenizer.get("extra_special_tokens")
    named = {**(extra if isinstance(extra, Mapping) else {}), **tokenizer}
    found = {name: named.get(name, text) for name, text in defaults.items()}
    for name, text in found.items():
        if isinstance(text, Mapping):  # an AddedToken
            found[name] = text = text.get("content")
        if not isinstance(text, str) or not text:
            raise CheckpointError(f"tokenizer_config.json has {name} = {text!r:.80}; give its text")
    return found
