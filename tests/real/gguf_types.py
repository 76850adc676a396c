"""Writes a model's weights as a GGUF file of each type, by ggml's own quantizer.

    python -m tests.real.gguf_types [TYPE]...

A matrix whose rows are no whole blocks of the type is written as Q8_0; vectors stay as they are.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize

from tests.real.closeness import Reference
from tests.real.packages import file_of, folder_of, made

MODEL = "smollm2"
K_TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", *K_TYPES, "IQ4_NL", "IQ4_XS")
FALLBACK = GGMLQuantizationType.Q8_0


def quantized(name: str, model: str = MODEL) -> Path:
    """Returns a model's file of a type, such as "Q4_K"; it is made once."""
    kind = GGMLQuantizationType[name]
    return made(f"{model}-{name}.gguf", lambda path: _write(path, model, kind))


@contextmanager
def own_weights(name: str, windows: int) -> Iterator[Reference]:
    """Yields the weights of a type's file in float32. Their folder is removed afterwards: all of
    them would take 6 GB."""
    reference = Reference(MODEL, windows, quantized(name))
    try:
        yield reference
    finally:
        shutil.rmtree(reference.folder)


def floats(model: str = MODEL) -> Iterator[tuple[str, np.ndarray]]:
    """Yields each tensor of the package's file in float32."""
    for tensor in GGUFReader(file_of(model)).tensors:
        yield tensor.name, dequantize(tensor.data, tensor.tensor_type).astype(np.float32)


def _write(path: Path, model: str, kind: GGMLQuantizationType) -> None:
    reader = GGUFReader(file_of(model))
    writer = GGUFWriter(path, reader.get_field("general.architecture").contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        item = field.types[1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=item)
    quantize = Quantizer()
    for name, values in floats(model):
        if values.ndim == 1:
            writer.add_tensor(name, values)
            continue
        is_whole = values.shape[-1] % GGML_QUANT_SIZES[kind][0] == 0
        own = kind if is_whole else FALLBACK
        writer.add_tensor(name, quantize(values, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Quantizer:
    """ggml's quantizer, which the package of whisper.cpp's bindings ships."""

    def __init__(self) -> None:
        folder = folder_of("ggml")
        ctypes.CDLL(str(folder / "libgomp.so"), ctypes.RTLD_GLOBAL)  # which it needs
        library: Any = ctypes.CDLL(str(folder / "libggml-base.so"))
        self._quantize, self._row_size = library.ggml_quantize_chunk, library.ggml_row_size
        self._quantize.restype = self._row_size.restype = ctypes.c_size_t
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._quantize.argtypes = [ctypes.c_int, pointer, pointer, *[number] * 3, pointer]
        self._row_size.argtypes = [ctypes.c_int, number]

    def __call__(
        self, values: np.ndarray, kind: GGMLQuantizationType, importance: np.ndarray | None = None
    ) -> np.ndarray:
        """Quantizes rows [n, k] of float32 to bytes [n, B]. importance: of the columns, [k]."""
        rows, columns = values.shape
        values = np.ascontiguousarray(values)
        coded = np.empty((rows, self._row_size(int(kind), columns)), np.uint8)
        weights = None if importance is None else importance.astype(np.float32).ctypes.data
        self._quantize(int(kind), values.ctypes.data, coded.ctypes.data, 0, rows, columns, weights)
        return coded


def main() -> None:
    """Writes the files of the types that are named, or of all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*", metavar="TYPE", default=TYPES)
    for name in parser.parse_args().types:
        path = quantized(name)
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
