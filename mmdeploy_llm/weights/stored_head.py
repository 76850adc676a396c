"""Follows the weights where config.json says that the output head is the embedding, but the
checkpoint stores another head, as transformers 5 does."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.hooks import Checkpoint

from .files import LOADABLE, SafetensorsFile
from .find import find_weights

logger = logging.getLogger(__name__)

TIE = "tie_word_embeddings"
HEAD = re.compile(r"(^|\.)(lm_head|embed_out)\.")
# What stands beside a head's matrix, which may be tied all the same (a bias, layers before it).
BESIDE = re.compile(r"(^|\.)lm_head\.(bias$|dense\.|(layer_)?norm\.)")
EMBEDDING = re.compile(r"(^|\.)(embed_tokens|embed_in|wte|word_embeddings)\.weight$")
CHUNK_VALUES = 2**22  # compared at once


def follow_stored_head(checkpoint: Checkpoint) -> Checkpoint:
    """Returns the checkpoint, with a config that says that head and embedding differ where the
    stored ones do, which is logged. Other files say by their tensors what is tied.

    Reads weights only where the config ties them and the files hold a head all the same.
    """
    levels = _levels(checkpoint.config)
    if checkpoint.other_files or not any(getattr(level, TIE, False) for level in levels):
        return checkpoint
    with ExitStack() as stack:
        try:
            paths = find_weights(checkpoint.folder)
            files = [stack.enter_context(SafetensorsFile(path)) for path in paths]
        except CheckpointError:  # raised again by who reads the weights, where they are needed
            return checkpoint
        owners = {key: file for file in files for key in file.entries}
        heads = [key for key in owners if HEAD.search(key)]
        if all(BESIDE.search(key) for key in heads) or _is_embedding(heads, owners):
            return checkpoint
    logger.warning(
        "config.json ties the output head to the embedding (%s), but %s differs from it: the "
        "stored head is used",
        TIE,
        heads[0],
    )
    config = copy.deepcopy(checkpoint.config)
    for level in _levels(config):
        setattr(level, TIE, False)
    return replace(checkpoint, config=config)


def untie(values: Mapping[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns what config.json of a copy holds: as `follow_stored_head` has read the ties."""
    copied = copy.deepcopy(dict(values))
    if not any(getattr(level, TIE, False) for level in _levels(checkpoint.config)):
        for level in (copied, copied.get("text_config")):
            if isinstance(level, dict) and level.get(TIE):
                level[TIE] = False
    return copied


def _levels(config: Any) -> Sequence[Any]:
    """Returns the configs that may tie a head: the whole one and that of the language model."""
    return [level for level in (config, getattr(config, "text_config", None)) if level is not None]


def _is_embedding(heads: Sequence[str], owners: Mapping[str, SafetensorsFile]) -> bool:
    """Whether the stored head holds the values of the embedding, and nothing beside them."""
    if len(heads) != 1 or not heads[0].endswith(".weight"):
        return False
    embeddings = [key for key in owners if EMBEDDING.search(key)]
    return any(_are_equal(heads[0], key, owners) for key in embeddings)


def _are_equal(one: str, other: str, owners: Mapping[str, SafetensorsFile]) -> bool:
    """Compares two tensors by chunks, without holding either in memory."""
    entries = [owners[key].entries[key] for key in (one, other)]
    if entries[0].shape != entries[1].shape or not {e.dtype for e in entries} <= LOADABLE:
        return False
    total = torch.Size(entries[0].shape).numel()
    for first in range(0, total, CHUNK_VALUES):
        chunks = []
        for key, entry in zip((one, other), entries, strict=True):
            chunk = torch.empty(min(CHUNK_VALUES, total - first), dtype=entry.dtype)
            owners[key].read_into(key, chunk, first_value=first, transpose=False)
            chunks.append(chunk)
        if not torch.equal(chunks[0].float(), chunks[1].float()):
            return False
    return True
