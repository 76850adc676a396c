"""Finds the file of a model that a plugin reads: one of another format than safetensors or GGUF."""

from __future__ import annotations

import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.hooks import ModelFile, ModelFileSpec, PluginManager
from mmdeploy_llm.system.guarding.folder_files import check_regular
from mmdeploy_llm.system.portable import files
from mmdeploy_llm.values.first_bytes import HEAD
from mmdeploy_llm.values.options.model_names import GGUF_SUFFIX
from mmdeploy_llm.weights.gguf import find_gguf

MAX_NAMED = 10


def is_gguf(place: Path) -> bool:
    """Whether a place is a GGUF file, or a folder with some. Raises CheckpointError, see
    find_gguf."""
    return bool(find_gguf(place)) if place.is_dir() else place.suffix == GGUF_SUFFIX


def may_be_file(place: Path) -> bool:
    """Whether a plugin is asked for a place: any file, and a folder without safetensors files."""
    return not place.is_dir() or not any(place.glob("*.safetensors"))


def find_model_file(place: Path, plugins: PluginManager) -> ModelFile | None:
    """Returns the model in a file, or in the only such file of a folder; None where no plugin knows
    one.

    Raises CheckpointError for a folder with several, PluginConflictError where two plugins claim
    the file at one priority.
    """
    specs = plugins.provided(ModelFileSpec)
    found: dict[Path, list[ModelFileSpec]] = {}
    for path in _candidates(place, specs):
        head = _head(path)
        own = [spec for spec in specs if _is_of(spec, path, head, in_folder=place.is_dir())]
        if own:
            found[path] = own
    if not found:
        return None
    if len(found) > 1:
        names = sorted(path.name for path in found)
        raise CheckpointError(
            f"{place} holds {len(names)} models: {', '.join(names[:MAX_NAMED])}; name one of them: "
            f"model={str(place / names[0])!r}"
        )
    ((path, own),) = found.items()
    wanted = f"files that begin as {path.name!r:.80} does"
    return plugins.build(plugins.preferred(own, wanted, path.name), path)


def no_model(place: Path) -> CheckpointError:
    """Returns the error for a place that holds no model."""
    if not place.is_dir():
        return CheckpointError(
            f"there is no model {str(place)!r}: it is a file that begins as no known format of "
            "models; give a folder, a GGUF file, or a file that a loaded plugin reads"
        )
    return CheckpointError(
        f"the folder {str(place)!r} has no config.json and no GGUF file; give the folder of a "
        "model in transformers' format, or a GGUF file"
    )


def _candidates(place: Path, specs: tuple[ModelFileSpec, ...]) -> Iterator[Path]:
    if not place.is_dir():
        yield place
        return
    patterns = {name for spec in specs for name in spec.file_names}
    for path in sorted(place.iterdir()) if patterns else ():
        if path.is_file() and any(fnmatchcase(path.name, name) for name in patterns):
            yield path


def _is_of(spec: ModelFileSpec, path: Path, head: bytes, *, in_folder: bool) -> bool:
    if in_folder and not any(fnmatchcase(path.name, name) for name in spec.file_names):
        return False
    begins = ((0, own) if isinstance(own, bytes) else own for own in spec.first_bytes)
    return any(head.startswith(begin, offset) for offset, begin in begins)


def _head(path: Path) -> bytes:
    check_regular(path)
    descriptor = os.open(path, os.O_RDONLY | files.NO_WAIT)
    try:
        return files.read_at(descriptor, HEAD, 0)
    finally:
        os.close(descriptor)
