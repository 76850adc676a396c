"""Decides what is known of a model's vectors and scores: by its folder, else by its family."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mmdeploy_llm.errors import PluginContractError
from mmdeploy_llm.hooks import Checkpoint, ModelSpec, PluginManager
from mmdeploy_llm.hooks.factories import imported_for
from mmdeploy_llm.hooks.relatives import head_of
from mmdeploy_llm.pooling.rules import EmbeddingRules
from mmdeploy_llm.pooling.sentence_folder import read_rules


def rules_of(
    plugins: PluginManager, spec: ModelSpec, checkpoint: Checkpoint, tokenizer: Any
) -> EmbeddingRules:
    """Returns the rules of a checkpoint. What its family says of pairs holds for every checkpoint
    that scores and whose folder has no template for them. tokenizer: the library's own.

    Raises CheckpointError for a malformed folder, PluginError for the family's rules.
    """
    family = _of_family(plugins, spec)
    own = read_rules(checkpoint.folder)
    head = head_of(checkpoint.architecture, spec.architectures)
    if own is None and head == "words":
        tokens = _score_tokens(family, tokenizer)
        return replace(family, score_tokens=tokens, pairs=family.pairs if tokens else None)
    if own is None:
        return replace(family, pairs=family.pairs if head == "labels" else None)
    scores = own.pairs is None and (head == "labels" or own.score_tokens is not None)
    return replace(own, pairs=family.pairs) if scores and own.system is None else own


def _of_family(plugins: PluginManager, spec: ModelSpec) -> EmbeddingRules:
    if spec.vectors is None:
        return EmbeddingRules()
    about = f"{spec.vectors}, the vectors of model {spec.name!r} of plugin {plugins.owner(spec)!r},"
    found = imported_for(spec.vectors, about)
    if not isinstance(found, EmbeddingRules):
        raise PluginContractError(f"{about} must be EmbeddingRules, got {type(found).__name__}")
    return found


def _score_tokens(rules: EmbeddingRules, tokenizer: Any) -> tuple[int, int | None] | None:
    """Returns the ids of the words between which the model decides; None where the tokenizer has
    none of them."""
    if rules.score_words is None:
        return None
    vocabulary = tokenizer.get_vocab()
    ids = [vocabulary.get(word) for word in rules.score_words]
    return None if None in ids else (ids[0], ids[1])
