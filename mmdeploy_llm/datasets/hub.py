"""Reads what the library `datasets` reads, streamed: datasets of the Hugging Face hub, folders that
`save_to_disk` has written, and folders of media with a metadata file. Needs the extra `datasets`.

    hf://datasets/OWNER/NAME[@REVISION][?config=NAME&split=NAME]

Code of a dataset is never run, and images and videos stay the bytes that they are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl

from mmdeploy_llm.errors import ConfigError

from .arrow import batch_rows
from .files import suffixes_in
from .names import is_url
from .rows import MAX_CELL_BYTES, MAX_SHOWN, BadItem, Lines, Row

SCHEME = "hf://datasets/"
SAVED = ("state.json", "dataset_info.json")  # one split
SAVED_SPLITS = "dataset_dict.json"
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
ROWS_AT_ONCE = 16
EXAMPLE = f"{SCHEME}owner/name?split=train"


def is_dataset(given: str) -> bool:
    """Returns whether the library `datasets` reads an input: a dataset of the hub, not one of its
    files, or a folder with the library's files."""
    if given.startswith(SCHEME):
        name, _, _ = given.removeprefix(SCHEME).partition("?")
        return name.count("/") <= 1
    if is_url(given) or not os.path.isdir(given):
        return False
    if all(_has(given, name) for name in SAVED) or _has(given, SAVED_SPLITS):
        return True
    is_described = any(_has(given, name) for name in METADATA)
    return is_described and suffixes_in(given, ()) is None  # None: it has media


def _has(folder: str, name: str) -> bool:
    return os.path.isfile(os.path.join(folder, name))


class DatasetRows:
    """The rows of one split of a dataset.

    Raises ConfigError when the library is missing, the dataset cannot be opened, or it has several
    splits and none is named.
    """

    is_table = True
    is_by_suffix = False
    is_repeatable = True

    def __init__(self, given: str, max_bytes: int = MAX_CELL_BYTES) -> None:
        path, _, query = given.partition("?") if given.startswith(SCHEME) else (given, "", "")
        options = _options(query, given)
        try:
            self._dataset = _loaded(path, options)
        except ImportError:
            raise ConfigError(
                f"{given!r} is read by the library datasets: "
                'pip install "mmdeploy-llm[datasets]", or give Parquet files or WebDataset shards; '
                "`mmdeploy-llm caption` reads the pictures of a folder and leaves metadata aside"
            ) from None
        except ConfigError:
            raise
        except Exception as error:  # the library raises anything
            reason = f"{type(error).__name__}: {str(error)[:MAX_SHOWN]}"
            raise ConfigError(f"{given!r} cannot be opened as a dataset: {reason}") from None

    @property
    def num_rows(self) -> int | None:
        """The number of rows; None when the dataset is streamed."""
        return getattr(self._dataset, "num_rows", None)

    def read(self, lines: Lines) -> Iterator[Row | BadItem]:
        """Yields the wanted rows. What the library cannot read ends the dataset with an error."""
        first = 1
        batches = iter(self._dataset.iter(ROWS_AT_ONCE))
        while not lines.is_past(first):
            try:
                table = next(batches)
            except StopIteration:
                return
            except Exception as error:  # the library raises anything
                reason = f"{type(error).__name__}: {str(error)[:MAX_SHOWN]}"
                message = f"the dataset cannot be read from row {first} on: {reason}"
                yield BadItem(line=first, id=f"row {first} and later ones", message=message)
                return
            yield from batch_rows(table, first, lines)
            first += table.num_rows


def _options(query: str, given: str) -> dict[str, str]:
    options = dict(parse_qsl(query, keep_blank_values=True))
    for name in options:
        if name not in ("config", "split"):
            raise ConfigError(f"{given!r} has the option {name!r}; config and split are known")
    return options


def _loaded(path: str, options: dict[str, str]) -> Any:
    """Opens a dataset so that it yields tables of Arrow, in which media are not decoded."""
    import datasets

    split = options.get("split")
    if path.startswith(SCHEME):
        name, _, revision = path.removeprefix(SCHEME).partition("@")
        found = datasets.load_dataset(
            name, options.get("config"), revision=revision or None, streaming=True
        )
    elif _has(path, SAVED[0]) or _has(path, SAVED_SPLITS):
        found = datasets.load_from_disk(path)
    else:
        found = datasets.load_dataset(path, streaming=True)
    if isinstance(found, dict):
        if split is None and len(found) == 1:
            (split,) = found
        if split not in found:
            has = ", ".join(map(repr, found))
            hint = f"as in {EXAMPLE}" if path.startswith(SCHEME) else "by the folder of one of them"
            raise ConfigError(f"{path!r} has the splits {has}; choose one {hint}")
        found = found[split]
    return found.with_format("arrow")
