"""The results of requests that want no text: vectors, scores of documents, probabilities of
labels."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from mmdeploy_llm.errors import OK
from mmdeploy_llm.values.pooling_request import PoolingRequest
from mmdeploy_llm.values.text.signatures import brief
from mmdeploy_llm.values.text.spelling import naming_elsewhere

from .forms import name_of, plain
from .request_output import RequestMetrics, RequestOutput

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PooledOutput(RequestOutput):
    """The engine's output of a request that wants no text. vector: [size] or [tokens, size], or
    [labels] of a score; None with an error. wanted: how it was made."""

    vector: NDArray[np.float32] | None = None
    wanted: PoolingRequest | None = None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class _Pooled:
    """The fields of all these outputs, as RequestOutput has them."""

    item: Any = None
    request_id: str = ""
    prompt_token_ids: list[int] = field(default_factory=list)
    num_input_image_tokens: int = 0
    num_input_video_tokens: int = 0
    num_cached_tokens: int = 0
    media_notes: tuple[str, ...] = ()
    metrics: RequestMetrics
    error_code: int = OK
    error_msg: str | None = None

    @property
    def is_ok(self) -> bool:
        """Whether there is no error."""
        return self.error_code == OK

    def _values(self) -> dict[str, Any]:
        names = (name for cls in reversed(type(self).__mro__) for name in _slots(cls))
        return {name: getattr(self, name) for name in names}

    def to_dict(self) -> dict[str, Any]:
        """Returns nested dicts and lists of what JSON has. Objects in `item` become short texts,
        numbers that are not finite None."""
        values = {**self._values(), "metrics": asdict(self.metrics)}
        return {name: plain(_listed(value)) for name, value in values.items()}

    def to_json(self, indent: int | None = None) -> str:
        """Returns `to_dict` as a JSON text."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def to_row(self) -> dict[str, Any]:
        """Returns texts, numbers and vectors, for a table:
        `pandas.DataFrame(output.to_row() for output in outputs)`."""
        values = self._values()
        metrics, ids = values.pop("metrics"), values.pop("prompt_token_ids")
        more = {"num_input_tokens": len(ids), "seconds": metrics.model_execute_time}
        return {**values, "item": name_of(self.item), **more}

    def __repr__(self) -> str:
        told = self._told() if self.is_ok else f"error {self.error_code}: {self.error_msg}"
        return f"{type(self).__name__}({name_of(self.item)!r}, {told})"

    def _told(self) -> str:
        raise NotImplementedError


@naming_elsewhere({"outputs": "embedding", "vector": "embedding"})
@brief
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class EmbeddingOutput(_Pooled):
    """The vector of one prompt.

    embedding: float32 [size], or [tokens, size] of a model that compares token by token; None with
        an error.
    item: the object that the caller passed in, without its pixels.
    prompt_token_ids: the ids that the model read, media placeholders included.
    num_cached_tokens: prompt tokens that were found in the prefix cache.
    media_notes: what of the text and its media the model did not get as it is, in sentences.
    error_code: 200 means success; otherwise `error_msg` says what went wrong.
    """

    embedding: NDArray[np.float32] | None = None

    def _told(self) -> str:
        assert self.embedding is not None, "without an error there is a vector"
        return f"{' x '.join(map(str, self.embedding.shape))} float32"


@naming_elsewhere({"outputs": "score", "relevance_score": "score", "document": "item"})
@brief
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ScoreOutput(_Pooled):
    """How well one document fits the query.

    score: larger fits better: a similarity, or the score of a model for pairs; None with an error.
    index: of the document among those that the caller passed in.
    item: the document.
    """

    score: float | None = None
    index: int = 0

    def _told(self) -> str:
        return f"index {self.index}, score {self.score:.4f}"


@naming_elsewhere({"outputs": "label or probabilities", "probs": "probabilities"})
@brief
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ClassifyOutput(_Pooled):
    """How probable each label is after one prompt.

    label: the most probable one; None with an error.
    probabilities: of all labels, in the order in which they were given; they sum up to 1.
    logprobs: the log-likelihood of each label, divided by its tokens with normalize_length.
    """

    label: str | None = None
    probabilities: Mapping[str, float] = field(default_factory=dict)
    logprobs: Mapping[str, float] = field(default_factory=dict)

    def _told(self) -> str:
        return f"{self.label!r} {self.probabilities[self.label or '']:.1%}"


def _slots(cls: type) -> tuple[str, ...]:
    found = cls.__dict__.get("__slots__", ())
    return (found,) if isinstance(found, str) else tuple(found)


def _listed(value: Any) -> Any:
    """Returns an array as a list."""
    tolist = getattr(value, "tolist", None)
    return tolist() if callable(tolist) else value
