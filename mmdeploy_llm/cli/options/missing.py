"""Tells what is plainly missing before a command imports what it computes with."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mmdeploy_llm.data.files.missing import is_gone, no_corpus, nowhere
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.system.guarding.folder_files import check_adapter, check_new_folder
from mmdeploy_llm.system.guarding.group_size import stored_group
from mmdeploy_llm.values.options.weight_formats import BUILT_IN

MAGIC = "*?[{:"  # of globs, patterns, URLs and names that plugins read


def check_media(paths: Iterable[str]) -> None:
    """Raises ConfigError where none of the paths of media exists."""
    given = tuple(dict.fromkeys(paths))
    if given and all(is_gone(path) and _is_plain(path) for path in given):
        raise ConfigError(nowhere(given))


def check_corpus(name: str | None) -> None:
    """Raises ConfigError where the name of a corpus is a path that does not exist."""
    if name is not None and _is_plain(name) and not os.path.exists(name):
        raise ConfigError(no_corpus(name))


def check_outputs(names: Iterable[str], hint: str) -> None:
    """Raises ConfigError for the first name of an output that does not exist."""
    for name in names:
        if _is_plain(name) and not os.path.exists(name):
            raise ConfigError(f"{name!r} does not exist; {hint}")


def check_pictures(paths: Iterable[str]) -> None:
    """Raises ConfigError for the first picture that does not exist or is a folder."""
    for path in paths:
        if _is_plain(path) and is_gone(path):
            raise ConfigError(f"image file {path!r} does not exist")
        if os.path.isdir(path):
            raise ConfigError(
                f"{path!r} is a folder; name a picture in it, or run `mmdeploy-llm caption FOLDER`"
            )


def check_model(name: str, options: Mapping[str, Any]) -> None:
    """Fetches a model, and its tokenizer, of which the hub's cache has nothing, so that a wrong id
    is told before torch is imported. options: of LLM(). Raises CheckpointError."""
    from mmdeploy_llm.values.options.config import EngineConfig
    from mmdeploy_llm.weights.folder import look_up

    look_up(EngineConfig.from_options(name, options))


def check_rounding(group_size: int, calibrate: str | None) -> None:
    """Raises ConfigError for groups that are not saved, and for a set to calibrate with that does
    not exist or is a file of another kind."""
    stored_group(group_size)
    if calibrate == BUILT_IN:
        return
    check_corpus(calibrate)
    if calibrate is not None and os.path.isfile(calibrate):
        from mmdeploy_llm.batch.sources import open_source
        from mmdeploy_llm.data.records.ids import Selection
        from mmdeploy_llm.values.params import SamplingParams

        open_source(calibrate, SamplingParams(), Selection())


def check_copy(
    name: str,
    output: Path,
    options: Mapping[str, Any],
    *,
    adapter: Path | None = None,
    overwrite: bool = False,
) -> None:
    """Checks a model as check_model does, the folder that a copy of it is written to, and an
    adapter's. Raises ConfigError too."""
    check_new_folder(output, overwrite=overwrite)
    if adapter is not None:
        if not adapter.is_dir():
            raise ConfigError(f"{adapter} is no folder of an adapter")
        check_adapter(adapter)
    check_model(name, options)


def _is_plain(name: str) -> bool:
    return not any(char in name for char in MAGIC)
