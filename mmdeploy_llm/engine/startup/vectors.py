"""Decides what is known of a model's vectors and scores: by its folder, else by its family."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from mmdeploy_llm.errors import PluginContractError
from mmdeploy_llm.hooks import Checkpoint, ModelSpec, PluginManager
from mmdeploy_llm.hooks.factories import imported_for
from mmdeploy_llm.hooks.objects.relatives import HeadKind, head_of
from mmdeploy_llm.layers.pooling.rules import Activation, EmbeddingRules
from mmdeploy_llm.layers.pooling.sentence_folder import activation_of, read_rules

REPOSITORY = "models--"  # before the name of a repository in the hub's cache


def rules_of(
    plugins: PluginManager, spec: ModelSpec, checkpoint: Checkpoint, tokenizer: Any
) -> EmbeddingRules:
    """Returns the rules of a checkpoint: those of its folder, which say everything, else those of
    its family, whose pairs are for a head that scores. tokenizer: the library's own.

    Raises CheckpointError for a malformed folder, PluginError for the family's rules.
    """
    family, own = _of_family(plugins, spec), read_rules(checkpoint.folder)
    head = head_of(checkpoint.architecture, spec.architectures)
    if own is None:
        own = _for_head(family, head, tokenizer)
        if own.score_tokens is not None and not _names_reranker(checkpoint.folder):
            own = replace(own, assumed_of=checkpoint.folder.name)
    return replace(own, activation=own.activation or _activation(own, checkpoint.config))


def _for_head(family: EmbeddingRules, head: HeadKind, tokenizer: Any) -> EmbeddingRules:
    if head == "words":
        tokens = _score_tokens(family, tokenizer)
        return replace(family, score_tokens=tokens, pairs=family.pairs if tokens else None)
    return replace(family, pairs=family.pairs if head == "labels" else None)


def _names_reranker(folder: Path) -> bool:
    """Whether the name of a model says that it scores pairs: that of its folder, or of the hub's
    repository whose snapshot it is."""
    names = [folder.name, *(part for part in folder.parts if part.startswith(REPOSITORY))]
    return any("rerank" in name.lower() for name in names)


def _activation(rules: EmbeddingRules, config: Any) -> Activation:
    """Returns what is applied to scores, by config.json of a cross-encoder, else as for all of
    them: a sigmoid to the score of one label."""
    told = getattr(config, "sentence_transformers", None)
    name = told.get("activation_fn") if isinstance(told, dict) else None
    name = name or getattr(config, "sbert_ce_default_activation_function", None)
    if name is not None:
        return activation_of("config.json", name)
    is_one = rules.score_tokens is not None or getattr(config, "num_labels", 1) == 1
    return "sigmoid" if is_one else "identity"


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
