"""Reads checked values from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.system.guarding.folder_files import fault, shown

from .header import Header, Scalar, StoredTensor

MAX_WHOLE = 2**31
MIN_NUMBER, MAX_NUMBER = 1e-30, 1e30

MAX_LAYERS = 10_000
MAX_HEAD_DIM = 65_536


class Metadata:
    """The metadata of one model. Keys are given without the architecture before them."""

    def __init__(self, header: Header) -> None:
        self.header = header

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """The tensors of the model."""
        return self.header.tensors

    def has(self, key: str) -> bool:
        """Whether the file states a value."""
        return self._name(key) in self.header.values

    def whole(
        self, key: str, default: int | None = None, *, low: int = 1, high: int = MAX_WHOLE
    ) -> int:
        """Returns an integer, the default where there is none. Raises CheckpointError for one that
        is missing without default or out of range."""
        found = self.header.values.get(self._name(key), default)
        if type(found) is not int or not low <= found <= high:
            raise self.wrong(key, f"an integer from {low} to {high}")
        return found

    def number(self, key: str, default: float | None = None, *, low: float = MIN_NUMBER) -> float:
        """Returns a number, above 0 unless `low` is. Raises CheckpointError as `whole` does."""
        found = self.header.values.get(self._name(key), default)
        if isinstance(found, bool) or not isinstance(found, (int, float)):
            raise self.wrong(key, "a number")
        if not low <= found <= MAX_NUMBER:
            raise self.wrong(key, f"a number from {low:g} to {MAX_NUMBER:g}")
        return found

    def text(self, key: str, default: str) -> str:
        """Returns a text. Raises CheckpointError for another value."""
        found = self.header.values.get(self._name(key), default)
        if not isinstance(found, str):
            raise self.wrong(key, "a text")
        return found

    def values(self, key: str) -> tuple[Scalar, ...] | None:
        """Returns an array, None where the file has none."""
        found = self.header.values.get(self._name(key))
        return found if isinstance(found, tuple) else None

    def most(self, key: str, default: int | None = None) -> int:
        """Returns an integer above 0, or the largest of those that the file states for each layer.
        Raises CheckpointError as `whole` does."""
        found = self.values(key)
        if found is None:
            return self.whole(key, default)
        whole = [each for each in found if type(each) is int and 0 <= each <= MAX_WHOLE]
        if len(whole) != len(found) or not any(whole):
            raise self.wrong(key, f"integers from 0 to {MAX_WHOLE}, one of them above 0")
        return max(whole)

    def token(self, key: str) -> int | None:
        """Returns the id of a special token, None where the file names none."""
        found = self.header.values.get(f"tokenizer.ggml.{key}")
        if found is not None and type(found) is not int:
            raise fault(self._file(), f"tokenizer.ggml.{key}", f"is {shown(found)}", "a token id")
        return found

    def shape(self, name: str, num_axes: int) -> tuple[int, ...]:
        """Returns the shape of a tensor. Raises CheckpointError when it is not there, or has
        another number of axes."""
        tensor = self.tensors.get(name)
        if tensor is None or len(tensor.shape) != num_axes:
            found = "missing" if tensor is None else f"of shape {list(tensor.shape)}"
            raise CheckpointError(
                f"the tensor {name} of {self.header.paths[0]} is {found}; this architecture "
                f"({self.header.architecture}) needs one of {num_axes} axes"
            )
        return tensor.shape

    def wrong(self, key: str, allowed: str) -> CheckpointError:
        """Returns the error for a value that is missing or not allowed."""
        found = self.header.values.get(self._name(key))
        return fault(
            self._file(),
            self._name(key),
            "is missing" if found is None else f"is {shown(found)}",
            allowed,
        )

    def _name(self, key: str) -> str:
        return f"{self.header.architecture}.{key}"

    def _file(self) -> str:
        return self.header.paths[0].name


def num_layers(metadata: Metadata) -> int:
    """Returns the number of decoder layers, without those that predict further tokens. Raises
    CheckpointError when it is missing or out of range."""
    extra = metadata.whole("nextn_predict_layers", 0, low=0, high=MAX_LAYERS)
    found = metadata.whole("block_count", high=MAX_LAYERS) - extra
    if found < 1:
        raise metadata.wrong("nextn_predict_layers", "fewer than block_count")
    return found


def head_dim(metadata: Metadata) -> int:
    """Returns the channels of a head: as stated, else as the rows of the first query matrix."""
    num_heads = metadata.whole("attention.head_count")
    if metadata.has("attention.key_length"):
        found = metadata.whole("attention.key_length", high=MAX_HEAD_DIM)
        if metadata.whole("attention.value_length", found) != found:
            raise metadata.wrong("attention.value_length", f"the same as key_length, {found}")
        return found
    if "blk.0.attn_q.weight" in metadata.tensors:
        return max(1, metadata.shape("blk.0.attn_q.weight", 2)[0] // num_heads)
    return max(1, metadata.whole("embedding_length") // num_heads)


def has_biases(metadata: Metadata, name: str) -> bool:
    """Whether a matrix of the first layer has biases."""
    return f"blk.0.{name}.bias" in metadata.tensors
