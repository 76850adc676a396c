"""Decodes sound files in a worker process. Imports no torch, so that the worker is small."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mmdeploy_llm.errors import MediaError, UnsupportedMediaError
from mmdeploy_llm.media.sound.headers.formats import ACCEPTED, sniff_file
from mmdeploy_llm.values import first_bytes

PIECE = 2**22  # samples in one message


def format_of(blob: bytes) -> str:
    """Returns FFmpeg's name of the format. Raises UnsupportedMediaError; MediaError: no bytes."""
    if not blob:
        raise MediaError("the sound is empty (0 bytes)")
    name = sniff_file(blob)
    if name is None:
        known = first_bytes.format_of(blob[: first_bytes.HEAD])
        what = "the first bytes match no sound format that is supported"
        if known is not None:
            what = f"the file is {known.name}, from which no sound is read"
        raise UnsupportedMediaError(f"{what}; convert it to {ACCEPTED}")
    return name


def _container() -> Any:
    """Returns the module that reads files. Raises UnsupportedMediaError without PyAV."""
    try:
        return importlib.import_module(f"{__package__}.container")
    except ImportError as error:
        raise UnsupportedMediaError(
            f"sounds are decoded by PyAV: pip install av ({error})"
        ) from error


def decode(
    blob: bytes, limits: Mapping[str, Any], rate: int, span: Mapping[str, Any]
) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    """Yields the bytes of the samples of a part of a file, float32 at `rate`, those of all its
    channels (one, unless the span wants them apart) for each moment; with them the number of
    channels, and with the last ones notes of what was left out. Runs in a worker process, too.
    span: the fields of a container.Span.

    Raises MediaError for a file that cannot be read, MediaLimitError for one over a limit,
    UnsupportedMediaError for another format.
    """
    name, container = format_of(blob), _container()
    held, notes = list[np.ndarray](), list[str]()
    for piece in container.read_container(blob, name, rate, container.Span(**span), notes):
        held.append(piece)
        if sum(each.size for each in held) >= PIECE:
            yield _message(held)
            held = []
    fields, rest = _message(held or [np.zeros((1, 0), np.float32)])
    yield {**fields, "notes": notes}, rest


def _message(held: Sequence[np.ndarray]) -> tuple[dict[str, Any], np.ndarray]:
    """Returns the number of channels, and the bytes of pieces [channels, samples]."""
    whole = np.concatenate(held, axis=1)
    return {"channels": len(whole)}, whole.T.reshape(-1).view(np.uint8)
