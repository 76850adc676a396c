"""Reads datasets of the Hugging Face hub in the child, streamed. Needs the extra `datasets`.

    hf://datasets/OWNER/NAME[@REVISION][?config=NAME&split=NAME]

Code of a dataset is never run, images and videos stay the bytes that they are, and what a dataset
names as its files is opened only where it is one of its own.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qsl

from mmdeploy_llm.data.rows.rows import MAX_SHOWN
from mmdeploy_llm.errors import ConfigError

from .arrow import batch_pieces
from .places import Cursor, Piece, Place

SCHEME = "hf://datasets/"
ROWS_AT_ONCE = 16
EXAMPLE = f"{SCHEME}owner/name?split=train"


class HubTable:
    """The rows of one split of a dataset.

    Raises ConfigError when the dataset cannot be opened, names files that are not its own, or has
    several splits and none is named.
    """

    def __init__(self, given: str) -> None:
        path = given.partition("?")[0]
        options = hub_options(given)
        try:
            self._dataset = _split(path, _loaded(path, options), options.get("split"))
        except ConfigError:
            raise
        except Exception as error:  # the library raises anything
            raise ConfigError(
                f"{given!r} cannot be opened as a dataset: {_reason(error)}"
            ) from None
        self.num_rows: int | None = getattr(self._dataset, "num_rows", None)

    def pieces(self, cursor: Cursor) -> Iterator[Piece]:
        """Yields the wanted rows. What the library cannot read ends the dataset with an error."""
        skipped = cursor.now.line - 1
        dataset = self._dataset.skip(skipped) if skipped else self._dataset
        batches = iter(dataset.iter(1 if cursor.is_careful else ROWS_AT_ONCE))
        while not cursor.is_past:
            end = Place(file=1, line=cursor.now.line + 1)
            yield cursor.enter(f"row {cursor.now.line} and later ones", lost=end)
            try:
                table = next(batches)
                for batch in table.combine_chunks().to_batches():
                    yield from batch_pieces(batch, cursor)
            except StopIteration:
                return
            except MemoryError:
                raise
            except Exception as error:  # the library raises anything
                yield cursor.lose(_reason(error))
                return


def hub_options(given: str) -> dict[str, str]:
    """Returns the options of a dataset's name. Raises ConfigError for unknown ones."""
    options = dict(parse_qsl(given.partition("?")[2], keep_blank_values=True))
    for name in options:
        if name not in ("config", "split"):
            raise ConfigError(f"{given!r} has the option {name!r}; config and split are known")
    return options


def _loaded(path: str, options: dict[str, str]) -> Any:
    import datasets

    _confine(datasets.data_files)
    name, _, revision = path.removeprefix(SCHEME).partition("@")
    return datasets.load_dataset(
        name, options.get("config"), revision=revision or None, streaming=True
    )


def _confine(module: Any) -> None:
    """Makes the library refuse what a dataset names as its files and is not beneath it: paths of
    this machine, other datasets and other hosts. Called in the child, for which this is final."""
    found: Callable[..., list[str]] = module.resolve_pattern

    def confined(pattern: str, base_path: str, *args: Any, **options: Any) -> list[str]:
        check_pattern(pattern, base_path)
        return found(pattern, base_path, *args, **options)

    module.resolve_pattern = confined


def check_pattern(pattern: str, base: str) -> None:
    """Raises ConfigError for a pattern that names files elsewhere than beneath a base."""
    inside = pattern.removeprefix(f"{base.rstrip('/')}/") if base else pattern
    parts = inside.replace("\\", "/").split("/")
    if ".." in parts or "::" in inside or "://" in inside or posixpath.isabs(inside):
        raise ConfigError(
            f"its description names {pattern[:MAX_SHOWN]!r} as data, which is not beneath it; give "
            "that to the batch itself, if you trust it"
        )


def _split(path: str, found: Any, split: str | None) -> Any:
    """Returns one split, which yields tables of Arrow, in which media are not decoded."""
    if isinstance(found, dict):
        if split is None and len(found) == 1:
            (split,) = found
        if split not in found:
            has = ", ".join(map(repr, found))
            raise ConfigError(f"{path!r} has the splits {has}; choose one as in {EXAMPLE}")
        found = found[split]
    return found.with_format("arrow")


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:MAX_SHOWN]}"
