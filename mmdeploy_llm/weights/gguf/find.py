"""Finds the GGUF files that hold the weights of a model."""

from __future__ import annotations

import re
from pathlib import Path

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.system.guarding.folder_files import check_regular
from mmdeploy_llm.values.options.model_names import GGUF_SUFFIX

SPLIT = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.gguf")
IN_NAME = "mmproj"  # of a file with a vision tower
MAX_FILES = 1000  # of one model
MAX_NAMED = 10


def find_gguf(place: Path) -> tuple[Path, ...]:
    """Returns the GGUF files of one model, in order: `place` itself, or the only ones of the folder
    `place`; () for a folder without any, or with safetensors files.

    Files named NAME-00001-of-00003.gguf belong together; one of them names all. Raises
    CheckpointError when the folder holds several models, and when a part is missing.
    """
    if not place.is_dir():
        return _parts(place)
    names = sorted(
        path.name
        for path in place.glob(f"*{GGUF_SUFFIX}")
        if IN_NAME not in path.name.lower() and not path.is_dir()
    )
    if not names or any(place.glob("*.safetensors")):
        return ()
    models = list(dict.fromkeys(_first_part(name) for name in names))
    if len(models) > 1:
        more = f" and {len(models) - MAX_NAMED} more" if len(models) > MAX_NAMED else ""
        raise CheckpointError(
            f"{place} holds {len(models)} models: {', '.join(models[:MAX_NAMED])}{more}; name one "
            f"of them: model={str(place / models[0])!r}"
        )
    return _parts(place / models[0])


def find_tower(place: Path) -> Path | None:
    """Returns the GGUF file with the vision tower of a model that `find_gguf` finds; None where
    there is none.

    Raises CheckpointError when several lie in the folder.
    """
    folder = place if place.is_dir() else place.parent
    if not place.is_dir() and IN_NAME in place.name.lower():
        return None
    names = sorted(
        path.name
        for path in folder.glob(f"*{GGUF_SUFFIX}")
        if IN_NAME in path.name.lower() and not path.is_dir()
    )
    if len(names) > 1:
        raise CheckpointError(
            f"{folder} holds {len(names)} vision towers: {', '.join(names[:MAX_NAMED])}; leave "
            "the one that you want with the model, and move the others elsewhere"
        )
    if not names:
        return None
    check_regular(folder / names[0])
    return folder / names[0]


def _first_part(name: str) -> str:
    split = SPLIT.fullmatch(name)
    return name if split is None else f"{split['name']}-00001-of-{split['total']}{GGUF_SUFFIX}"


def _parts(path: Path) -> tuple[Path, ...]:
    split = SPLIT.fullmatch(path.name)
    if split is None:
        check_regular(path)
        return (path,)
    total = int(split["total"])
    if not 1 <= total <= MAX_FILES:
        raise CheckpointError(
            f"{path.name} says that it is one of {total} files; allowed: 1 to {MAX_FILES}"
        )
    parts = [
        path.with_name(f"{split['name']}-{number:05d}-of-{split['total']}{GGUF_SUFFIX}")
        for number in range(1, total + 1)
    ]
    missing = [part.name for part in parts if not part.exists()]
    if missing:
        raise CheckpointError(
            f"{len(missing)} of the {total} files of this model are not in {path.parent}: "
            f"{', '.join(missing[:MAX_NAMED])}; download them too"
        )
    for part in parts:
        check_regular(part)
    return tuple(parts)
