"""Shows what GGUF files hold as the entries of a checkpoint, each made of one tensor or several."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from mmdeploy_llm.weights.tensor_file import Entry, WeightRows, copy_rows

from .header import Header
from .rows import TensorRows


class Source(Protocol):
    """Tells where the values of an entry come from."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the entry."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the entry is read."""


S = TypeVar("S", bound=Source)


class EntryFile(ABC, Generic[S]):
    """The entries of the files of one header, used as a context manager; see TensorFile."""

    def __init__(self, header: Header, sources: Mapping[str, S]) -> None:
        """sources: key -> where its values come from."""
        self.path = header.paths[0]
        self.entries = {
            key: Entry(dtype=source.dtype, shape=source.shape, offset=0)
            for key, source in sources.items()
        }
        self._sources = sources
        self._rows = TensorRows(header.paths)

    @abstractmethod
    def _weight(self, source: S) -> WeightRows:
        """Returns the rows of an entry."""

    def __enter__(self) -> Self:
        self._rows.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._rows.__exit__()

    def read_into(self, key: str, out: Tensor, *, first_value: int, transpose: bool) -> None:
        """See TensorFile. first_value: the first one of a row."""
        source = self._sources[key]
        shape = source.shape or (1,)
        first, rest = divmod(first_value, math.prod(shape[1:]))
        assert rest == 0, "a tensor is read by whole rows"
        copy_rows(self._weight(source), shape, first, out, transpose=transpose)
