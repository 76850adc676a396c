"""Ends a benchmark with one line where the model that it is given is nowhere."""

from __future__ import annotations

import argparse
from pathlib import Path

CONFIG = "config.json"
WRITTEN = "checkpoints.py FOLDER writes models to measure"


def check_model(parser: argparse.ArgumentParser, name: str) -> None:
    """Ends the program unless this is the folder or GGUF file of a model, the name of a bundled
    one, or the id of one that the hub's cache has."""
    from mmdeploy_llm.errors import MMDeployLLMError
    from mmdeploy_llm.values.options.model_names import find_model, is_cached

    try:
        place = find_model(name)
    except MMDeployLLMError as error:
        parser.error(f"{error}; {WRITTEN}")
    if place is None and not is_cached(name):
        parser.error(
            f"there is no folder {name!r}, and the hub's cache has no model of that name; {WRITTEN}"
        )
    if place is not None and place.is_dir() and not any(place.glob("*.gguf")):
        check_folder(parser, place)


def check_folder(parser: argparse.ArgumentParser, folder: Path, written: str = WRITTEN) -> None:
    """Ends the program unless this is the folder of a model. written: what writes one. Imports no
    engine, so that any environment can use it."""
    if not (folder / CONFIG).is_file():
        found = f"has no {CONFIG}" if folder.is_dir() else "is no folder"
        parser.error(f"{str(folder)!r} {found}; {written}")
