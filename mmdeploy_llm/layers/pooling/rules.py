"""EmbeddingRules and PairRule: what a model's folder says of its vectors, prompts and pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mmdeploy_llm.values.pooling_request import Pooling

Similarity = Literal["cosine", "dot", "euclidean", "manhattan", "maxsim"]
Activation = Literal["identity", "tanh", "gelu", "relu", "silu", "sigmoid"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRule:
    """How a query and a document become one prompt of a model that scores pairs.

    template: with {query} and {document}, and {instruction} if the model takes one; None: the
        tokenizer joins them, with its separators and token types.
    system: of the conversation that the chat template renders, whose user message the template is
        then; the media of query and document stand where these do. None: no chat template is used.
    instruction: where the caller gives none.
    has_roles: the chat template itself has the roles "query" and "document", for a message each.
    """

    template: str | None = None
    system: str | None = None
    instruction: str = ""
    has_roles: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseRule:
    """A dense layer after the pooling: y = activation(W x + b), or x + that if it is residual.
    weights: the file that holds them."""

    weights: Path
    in_features: int
    out_features: int
    has_bias: bool
    activation: Activation
    is_residual: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRules:
    """Says of a model's vectors what its sentence-transformers folder, or a plugin, knows.

    pooling: "tokens": a vector for each token, compared by MaxSim. normalize: whether vectors have
        length 1. dense: modules between pooling and normalisation, in order. size: of the states
        that are pooled.
    prompts: texts by name that stand before a prompt. default_prompt: the name of the one that is
        used where a request names none. query_prompt, document_prompt: those of queries and
        documents; None: default_prompt. includes_prompt: whether the mean has its tokens.
    suffixes: texts by the name of a prompt that stand after what it stands before.
    lower_case: whether texts are lowered before they become tokens.
    system: where vectors are made of conversations: the system message for a request without an
        instruction; an instruction takes its place. None: prompts are no conversations.
        chat_options: for its template.
    dimensions: vectors are cut to, where a request says nothing. max_tokens: longest prompt.
    similarity: how two vectors are compared. pairs: of a model that scores pairs.
    score_tokens: ids of "yes" and "no", the difference of whose logits is the score; without the
        second the score is the logit of the first. score_words: of a family, their texts.
    assumed_of: the name of a folder that does not say that its model scores pairs; None: one that
        does, or whose model scores none.
    activation: what is applied to a score; None: the default of its model.
    """

    pooling: Pooling | Literal["tokens"] | None = None
    normalize: bool = True
    dense: tuple[DenseRule, ...] = ()
    size: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    suffixes: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    query_prompt: str | None = None
    document_prompt: str | None = None
    includes_prompt: bool = True
    lower_case: bool = False
    system: str | None = None
    chat_options: Mapping[str, Any] = field(default_factory=dict)
    dimensions: int | None = None
    max_tokens: int | None = None
    similarity: Similarity = "cosine"
    pairs: PairRule | None = None
    score_words: tuple[str, str] | None = None
    score_tokens: tuple[int, int | None] | None = None
    assumed_of: str | None = None
    activation: Activation | None = None

    def around(self, instruction: str | None) -> tuple[str, str]:
        """Returns what stands before a text and after it. instruction: as in PoolingRequest."""
        name = self.default_prompt if instruction is None else instruction
        if name is None:
            return "", ""
        return self.prompts.get(name, name), self.suffixes.get(name, "")


NO_RULES = EmbeddingRules()  # of a folder that says nothing of vectors
