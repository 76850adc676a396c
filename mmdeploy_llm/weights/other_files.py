"""Offers what plugins read files of models with: texts within limits, and tensors as entries of a
checkpoint. A format is a ModelFileSpec of a plugin, see `mmdeploy_llm.hooks`."""

from mmdeploy_llm.kernels.coded import CodedWeight, CodeLayout
from mmdeploy_llm.system.guarding.folder_files import (
    MAX_TEXT_BYTES,
    check_regular,
    read_array,
    read_object,
    read_text,
    shown,
)
from mmdeploy_llm.weights.gguf.entries import EntryFile
from mmdeploy_llm.weights.gguf.header import Header, StoredTensor
from mmdeploy_llm.weights.gguf.library import TensorType, readable_types
from mmdeploy_llm.weights.gguf.reading import BlockFile, TensorSource
from mmdeploy_llm.weights.gguf.rows import TensorRows
from mmdeploy_llm.weights.tensor_file import WeightRows

__all__ = [
    "MAX_TEXT_BYTES",
    "BlockFile",
    "CodeLayout",
    "CodedWeight",
    "EntryFile",
    "Header",
    "StoredTensor",
    "TensorRows",
    "TensorSource",
    "TensorType",
    "WeightRows",
    "check_regular",
    "read_array",
    "read_object",
    "read_text",
    "readable_types",
    "shown",
]
