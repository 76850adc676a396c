"""Writes a copy of a model with an adapter merged into its weights."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.layers.adapters import read_adapter
from mmdeploy_llm.layers.adapters.attached import Blueprint
from mmdeploy_llm.layers.adapters.folder import check_inside
from mmdeploy_llm.system.guarding.folder_files import MAX_TEXT_BYTES, check_regular
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.values.options.plugin_choice import PluginChoice
from mmdeploy_llm.weights.files import SafetensorsFile
from mmdeploy_llm.weights.find import find_weights
from mmdeploy_llm.weights.folder import MODEL_FILES, read_checkpoint, resolve_model
from mmdeploy_llm.weights.stored_head import EMBEDDING, HEAD, TIE, follow_stored_head, untie
from mmdeploy_llm.weights.tensor_file import Entry

from .edits import Edits, edits_of
from .folders import Partial, check_output, copy_others, digest_of, written
from .loaded import built, is_quantized
from .rounders import Place
from .rounding import Rounded, Scheme
from .writer import Writer

# Training saves these beside an adapter; they take the place of the model's.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """The result of merge_adapter. num_changed: tensors that are others now. taken: the files of
    the tokenizer that are the adapter's. is_untied: whether the head is no longer the embedding."""

    folder: Path
    num_changed: int
    num_bytes: int
    taken: tuple[str, ...]
    is_untied: bool


def merge_adapter(model: str, adapter: str | Path, output: Path, **choice: Any) -> Merged:
    """Writes `model`, a folder or a hub's name, with the adapter in the folder `adapter` merged
    into its weights, to the new folder `output`. choice: plugins, plugin_files, blocked_plugins,
    use, as of an engine.

    The new folder grows as OUTPUT.partial and is renamed once it is whole; a run that was cut off
    is continued by the next one. Warns of an adapter without some of its tensors. Holds the
    adapter, one tensor and one file of the output in memory. Raises ConfigError for a folder that
    cannot be used or is there, CheckpointError for weights and adapters that do not fit.
    """
    config = EngineConfig.from_options(model, PluginChoice(**choice).model_dump())
    checkpoint = follow_stored_head(read_checkpoint(resolve_model(model, None, MODEL_FILES)))
    if checkpoint.other_files:
        raise ConfigError(
            f"{model} is {checkpoint.other_files[0].name}, no safetensors file; give the folder it "
            "was made of"
        )
    values = json.loads((checkpoint.folder / "config.json").read_text(encoding="utf-8"))
    if is_quantized(values):
        raise ConfigError(
            f"{model} is quantised: merge the adapter into the model that it was made of, and "
            "quantise that, or load the adapter beside it with adapters="
        )
    check_output(output, checkpoint.folder, overwrite=False)
    own, paths = read_adapter(adapter), find_weights(checkpoint.folder)
    taken = _tokenizer_files(Path(adapter))
    with ExitStack() as stack:
        files = [stack.enter_context(SafetensorsFile(path)) for path in paths]
        entries = {key: entry for file in files for key, entry in file.entries.items()}
    empty, heads = built(config, checkpoint), Heads.of(entries)
    edits = edits_of(own, entries, empty, heads.stored or heads.tied)
    Blueprint(empty, {}, torch.float32).tell(Path(adapter).name, own)
    with written(output, digest_of({"merge": own.digest}, paths)) as partial:
        writer = MergeWriter(partial, empty, edits, heads)
        writer.copy(paths)
        merged = writer.merged(untie(values, checkpoint))
        for name in taken:
            shutil.copyfile(Path(adapter) / name, partial.folder / name)
        copy_others(checkpoint.folder, partial.folder)
    return replace(merged, taken=taken)


def _tokenizer_files(adapter: Path) -> tuple[str, ...]:
    """Returns the names of the tokenizer's files in an adapter's folder. Raises CheckpointError for
    a link that leads out of it: the new folder would hold a file of this machine."""
    found = tuple(name for name in TOKENIZER_FILES if os.path.lexists(adapter / name))
    for name in found:
        check_inside(adapter, adapter / name)
        check_regular(adapter / name, MAX_TEXT_BYTES)
    return found


class AsTheyAre:
    """Rounds nothing."""

    def scheme(self, place: Place) -> Scheme | None:
        return None

    def round(self, key: str, weight: Tensor, scheme: Scheme) -> Rounded:
        raise AssertionError("no matrix has a scheme")


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The keys of the embedding and of the output head, "" where a checkpoint stores none. tied:
    the key that a head gets which was the embedding."""

    embedding: str
    stored: str
    tied: str

    @classmethod
    def of(cls, entries: Mapping[str, Entry]) -> Heads:
        """Finds the keys among those of a checkpoint."""
        embedding = next((key for key in entries if EMBEDDING.search(key)), "")
        is_inner = embedding.startswith("language_model.model.")
        return cls(
            embedding=embedding,
            stored=next((key for key in entries if HEAD.search(key)), ""),
            tied="language_model.lm_head.weight" if is_inner else "lm_head.weight",
        )


class MergeWriter(Writer):
    """Writes the tensors of a folder, changed as an adapter says."""

    def __init__(self, partial: Partial, model: Any, edits: Edits, heads: Heads) -> None:
        super().__init__(partial, model, AsTheyAre())
        self._edits, self._heads = edits, heads

    def _converted(self, key: str, entry: Entry, tensor: Tensor) -> dict[str, Tensor]:
        if key != self._heads.embedding or self._heads.stored:
            return {key: self._edits.applied(key, tensor)}
        return self._with_head(key, tensor)

    def _with_head(self, key: str, tensor: Tensor) -> dict[str, Tensor]:
        """Returns the embedding, and its head where they differ now. The rows of tokens are both's,
        as in PEFT; all else is of the one that the adapter names."""
        edits, head = self._edits, self._heads.tied
        if not edits.keys & {key, head}:
            return {key: tensor}
        tokens = {head: edits.tokens[key]} if key in edits.tokens else {}
        other = replace(edits, tokens={**tokens, **edits.tokens}).applied(head, tensor.clone())
        new = edits.applied(key, tensor)
        return {key: new} if torch.equal(new, other) else {key: new, head: other}

    def merged(self, config: dict[str, Any]) -> Merged:
        """Writes the last shard, the index and config.json, which says what changed of sizes and
        ties."""
        done, heads = self._done, self._heads
        is_untied = not heads.stored and heads.tied in {*done.places, *self._shard}
        levels = [x for x in (config, config.get("text_config")) if isinstance(x, dict)]
        if is_untied:
            for level in levels:
                level[TIE] = False
        if (new := self._edits.saved.get(heads.embedding)) is not None:
            for level in levels:
                if "vocab_size" in level:
                    level["vocab_size"] = len(new)
        self._write_index(config)
        return Merged(
            folder=self._partial.output,
            num_changed=len(self._edits.keys),
            num_bytes=done.bytes_after,
            taken=(),
            is_untied=is_untied,
        )
