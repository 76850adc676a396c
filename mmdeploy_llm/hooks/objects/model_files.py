"""ModelFileSpec: a format of files that hold a whole model, and what a plugin makes of such a file.
Imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmdeploy_llm.values.first_bytes import FirstBytes


class ModelFile(ABC):
    """A model in a file of another format than safetensors, shown as transformers has it. path: of
    the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def read_json(self, file_name: str) -> Mapping[str, Any]:
        """Returns what transformers' folder of this model has in a JSON file, such as config.json,
        generation_config.json and preprocessor_config.json; {} for a file that it has not. The
        result's "model_type" and "architectures" in config.json decide which family serves it.
        Raises CheckpointError, and ModelNotSupportedError for a model that is not read."""

    @abstractmethod
    def write_tokenizer(self, folder: Path) -> None:
        """Writes the files of which transformers makes the tokenizer into an empty folder. Raises
        CheckpointError where there is none, naming the file to add."""

    @abstractmethod
    def open_weights(self) -> AbstractContextManager[Any]:
        """Opens the weights: a TensorFile of mmdeploy_llm.weights.tensor_file whose keys are those
        of transformers' checkpoints. Raises CheckpointError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFileSpec:
    """A format of files that hold a model: its sizes, its weights and often its vocabulary.

    factory: "module:Class", called as factory(path) with the path of a file of the format; returns
        a ModelFile. Must not read the weights.
    first_bytes: what files of the format begin with; an entry may be (offset, bytes).
    file_names: what such a file is called in a folder, such as "model.bin" or "ggml-*.bin"; a
        folder that has safetensors or GGUF files is read by these.
    priority: the highest wins where two formats claim a file, and a tie is an error.
    """

    name: str
    factory: str
    first_bytes: tuple[FirstBytes, ...]
    file_names: tuple[str, ...] = ()
    priority: int = 0
