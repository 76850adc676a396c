"""Reads files of a model folder, whoever made it: regular files of a bounded size only, JSON of a
bounded depth only. Every fault is a CheckpointError that names file, key and limits."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mmdeploy_llm.errors import CheckpointError, ConfigError
from mmdeploy_llm.system.portable import files
from mmdeploy_llm.values.text.display import error_text

if TYPE_CHECKING:
    from pydantic import BaseModel

MAX_JSON_BYTES = 8 * 2**20  # the largest config files in use have 3 MiB
MAX_INDEX_BYTES = 64 * 2**20
MAX_TEXT_BYTES = 512 * 2**20  # tokenizer.json, vocab.txt, tokenizer.model, ...
MAX_DEPTH = 64
MAX_INTEGER = 2**63 - 1
ANY_INTEGER = frozenset({"model_max_length"})  # transformers writes int(1e30) for "no limit"
MAX_SHOWN = 60  # characters of a value in a message
# Files that transformers reads whole.
TEXT_SUFFIXES = frozenset({".json", ".jinja", ".txt", ".model", ".tiktoken", ".bpe"})
TEMPLATE_FOLDER = "additional_chat_templates"

Schema = TypeVar("Schema", bound="BaseModel")


def check_regular(path: Path, max_bytes: int | None = None) -> None:
    """Raises CheckpointError unless `path` is a regular file, or a link to one, of at most
    `max_bytes` (None: any size). A FIFO or a device would block or never end."""
    try:
        _check_status(path, os.stat(path), max_bytes)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def check_folder(folder: Path) -> None:
    """Raises CheckpointError for anything in a model folder that must not be opened, because
    transformers opens files by name itself: what is no regular file, and texts that are too
    large."""
    for path in _entries(folder):
        try:
            status = os.stat(path)
        except OSError:  # a link to nothing is a missing file
            continue
        if not stat.S_ISDIR(status.st_mode):
            is_text = path.suffix in TEXT_SUFFIXES
            _check_status(path, status, MAX_TEXT_BYTES if is_text else None)


def read_text(path: Path, max_bytes: int = MAX_JSON_BYTES) -> str:
    """Returns the content of a regular file in UTF-8. Raises CheckpointError."""
    try:
        _check_status(path, os.stat(path), max_bytes)  # a socket cannot be opened
        # The file that was checked is the file that is read, and a FIFO does not block.
        descriptor = os.open(path, os.O_RDONLY | files.NO_WAIT)
        try:
            _check_status(path, os.fstat(descriptor), max_bytes)
            with open(descriptor, "rb", closefd=False) as file:
                data = file.read(max_bytes + 1)
        finally:
            os.close(descriptor)
        if len(data) > max_bytes:
            raise _too_large(path, len(data), max_bytes)
        return data.decode("utf-8")
    except (OSError, ValueError, MemoryError) as error:
        raise _unreadable(path, error) from error


def read_object(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Returns the JSON object in a file, {} when there is no such file.

    Raises CheckpointError for malformed JSON, nesting over MAX_DEPTH, integers outside 64 bits, NaN
    and text that is not Unicode.
    """
    if not os.path.lexists(path):
        return {}
    values = _parsed(path, max_bytes)
    if not isinstance(values, dict):
        raise CheckpointError(f"{path.name} of the model must hold a JSON object")
    _check_values(path.name, values)
    return values


def read_array(path: Path, max_bytes: int = MAX_JSON_BYTES) -> list[Any]:
    """Returns the JSON array in a file, which exists. Raises CheckpointError as read_object."""
    values = _parsed(path, max_bytes)
    if not isinstance(values, list):
        raise CheckpointError(f"{path.name} of the model must hold a JSON array")
    _check_values(path.name, {"": values})
    return values


def validated(
    schema: type[Schema], file_name: str, values: Mapping[str, Any], prefix: str = ""
) -> Schema:
    """Returns `values` as a `schema`. Raises CheckpointError with the first key that is wrong.

    The validators of `schema` raise ValueError with the allowed values as its text. prefix: where
    in the file `values` are, such as "text_config.".
    """
    from pydantic import ValidationError  # not at the top: workers read files without schemas

    try:
        return schema.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = prefix + ".".join(map(str, first["loc"]))
        allowed = str(first.get("ctx", {}).get("error", first["msg"]))
        raise fault(file_name, key, f"is {shown(first['input'])}", allowed) from None


def fault(file_name: str, key: str, found: str, allowed: str) -> CheckpointError:
    """Returns the error for one key of a file, or for the file itself where key is ""."""
    subject = f"{key[: 2 * MAX_SHOWN]!a} in {file_name}" if key else file_name
    return CheckpointError(f"{subject} of the model {found}; allowed: {allowed}")


def library_error(error: BaseException) -> str:
    """Returns what transformers or tokenizers says about a checkpoint, for a message. Its advice to
    trust code of the checkpoint is not passed on."""
    if "trust_remote_code" in str(error):
        return (
            "it needs Python code of its own (auto_map), which is never run: trust_remote_code is "
            "always False. Use a plugin made for this model"
        )
    return error_text(error)


def shown(value: object) -> str:
    """Returns a value for a message, shortened."""
    text = ascii(value) if not isinstance(value, (dict, list)) else type(value).__name__
    if isinstance(value, (dict, list)) and len(value) <= 4:
        text = ascii(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _parsed(path: Path, max_bytes: int) -> Any:
    text = read_text(path, max_bytes)
    try:
        return json.loads(text)
    except RecursionError:
        raise fault(path.name, "", "is nested too deeply", f"{MAX_DEPTH} levels") from None
    except (ValueError, MemoryError) as error:
        raise _unreadable(path, error) from error


def _entries(folder: Path) -> Iterator[Path]:
    for place in (folder, folder / TEMPLATE_FOLDER):
        try:
            yield from sorted(place.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise CheckpointError(
                f"the model folder {str(folder)!r} cannot be listed: {error.strerror}"
            ) from error


def _check_status(path: Path, status: os.stat_result, max_bytes: int | None) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(
            f"{path.name} of the model is {_kind(status.st_mode)}; allowed: a regular file. "
            "Download the model again, or remove it from the folder"
        )
    if max_bytes is not None and status.st_size > max_bytes:
        raise _too_large(path, status.st_size, max_bytes)


def _kind(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "a folder"
    if stat.S_ISFIFO(mode):
        return "a FIFO"
    return "a socket" if stat.S_ISSOCK(mode) else "a device"


def _too_large(path: Path, found: int, allowed: int) -> CheckpointError:
    return fault(path.name, "", f"has {found} bytes or more", f"{allowed} bytes")


def _unreadable(path: Path, error: BaseException) -> CheckpointError:
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return CheckpointError(f"{path.name[:100]} of the model cannot be read: {reason}")


def _check_values(file_name: str, values: dict[str, Any]) -> None:
    """Walks without recursion through everything that a JSON file holds."""
    todo: list[tuple[str, Any, int]] = [("", values, 1)]
    while todo:
        key, value, depth = todo.pop()
        if depth > MAX_DEPTH:
            raise fault(file_name, key, "is nested too deeply", f"{MAX_DEPTH} levels")
        if isinstance(value, dict):
            for name, inner in value.items():
                own = f"{key}.{name}" if key else name
                if not _is_unicode(name):
                    raise fault(file_name, own, "is not Unicode text", "names in UTF-8")
                todo.append((own, inner, depth + 1))
        elif isinstance(value, list):
            todo.extend((key, inner, depth + 1) for inner in value)
        else:
            _check_value(file_name, key, value)


def _check_value(file_name: str, key: str, value: object) -> None:
    if isinstance(value, str) and not _is_unicode(value):
        raise fault(file_name, key, "is not Unicode text", "text in UTF-8")
    if isinstance(value, float) and math.isnan(value):
        raise fault(file_name, key, "is NaN", "a number")
    if isinstance(value, int) and abs(value) > MAX_INTEGER and key not in ANY_INTEGER:
        raise fault(file_name, key, f"is {shown(value)}", "an integer of 64 bits")


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True


ADAPTER_CONFIG = "adapter_config.json"


def check_adapter(folder: Path, names: Iterable[str] = (ADAPTER_CONFIG,)) -> None:
    """Raises CheckpointError unless `folder` has these files of an adapter."""
    for name in names:
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder} has no {name}: it is not the folder of a PEFT adapter")


def check_new_folder(output: Path, *, overwrite: bool) -> None:
    """Raises ConfigError for a folder that cannot be written to; overwrite: whether a model's
    folder is replaced."""
    if not os.path.lexists(output):
        return
    if output.is_symlink():
        raise ConfigError(f"{output} is a link; give the folder that it leads to")
    if not output.is_dir():
        raise ConfigError(f"{output} is a file or a device; give the name of a new folder")
    if not overwrite:
        raise ConfigError(f"{output} exists; give another folder, or overwrite to replace it")
    if any(output.iterdir()) and not (output / "config.json").exists():
        raise ConfigError(f"{output} has no config.json: only the folder of a model is replaced")
