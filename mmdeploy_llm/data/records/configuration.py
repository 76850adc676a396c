"""The configuration of a run, and the file OUTPUT.config.json that keeps those of an output: what a
resumed run is compared with, and what it names when they differ.

{digest: {"model": as the caller named it, "values": {name: value}, "accepts": [digest, ...],
          "root": path, "plugin_files": {path: digest}}}

accepts: earlier configurations whose results a run with this one was told to keep.
root: the folder that ids of files are relative to; of a batch over files only.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.values.options.config import EngineConfig

from .files import Folder, open_regular
from .identity import digest_of
from .unicode_text import escaped, unescaped

MAX_BYTES = 64 * 2**20
MAX_SHOWN = 60  # characters of a value in a message
FILES = ("model", "tokenizer")  # values that are digests of files
PRIVATE = ("root", "plugin_files")  # paths of this machine

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """The settings that decide the answers of a run besides its items. model: its name, for
    messages; it is compared by its files, whose digest is in `values`. plugin_files: path -> digest
    of single files that are plugins; another one is told, not refused."""

    model: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    plugin_files: Mapping[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Equal for equal values."""
        return digest_of(self.values)


class ConfigurationFile:
    """The configurations of one output. Written only by the run that has locked the output.

    output: its name, for messages. path: of the file.
    embedded: returns what the output itself says, in a text for each of its files; used when the
    file is missing.
    """

    def __init__(
        self,
        output: str,
        path: Path,
        embedded: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        self._output, self._path, self._embedded = output, path, embedded

    @classmethod
    def beside(cls, output: Path) -> ConfigurationFile:
        """Returns those of an output that is one file; their file is beside it."""
        return cls(str(output), output.with_name(f"{output.name}.config.json"))

    def check_file(self) -> None:
        """Raises ConfigError when somebody else's file has the name."""
        if os.path.lexists(self._path):
            self._read()

    @property
    def text(self) -> str:
        """All configurations, as they are embedded in the files of an output: without paths of this
        machine, which are nobody else's business."""
        known = self._read()
        return _as_json({digest: _without(PRIVATE, entry) for digest, entry in known.items()})

    @property
    def root(self) -> str | None:
        """The folder that ids of files are relative to, None where nothing says it."""
        roots = (entry.get("root") for entry in self._read().values())
        return next((unescaped(root) for root in roots if isinstance(root, str)), None)

    @property
    def known(self) -> dict[str, Any]:
        """The configurations by their digests."""
        return self._read()

    @property
    def models(self) -> list[str]:
        """The names of the models."""
        return sorted({str(entry.get("model")) for entry in self._read().values()})

    def check(self, mine: Configuration, found: Collection[str]) -> None:
        """Raises ConfigError when an output has results of configurations (digests) that are
        neither this one nor accepted by it, and names the differences."""
        known = self._read()
        self._tell_files(mine, known)
        accepted = known.get(mine.digest, {}).get("accepts", ())
        others = sorted(set(found) - {mine.digest, *accepted})
        if not others:
            return
        earlier = known.get(others[-1])
        words = f"{str(self._path)!r} is missing, so the differences cannot be named"
        if earlier is not None:
            words = "; ".join(differences(earlier, mine)) or "the differences cannot be named"
        raise ConfigError(
            f"{self._output!r} has results of another configuration: {words}. --resume-anyway "
            'keeps them and does the rest with this one (in Python: resume="anyway"); --overwrite '
            "does all again, --output writes elsewhere"
        )

    def _tell_files(self, mine: Configuration, known: Mapping[str, Any]) -> None:
        """Warns of plugin files that are not those of the earlier results."""
        then = known.get(mine.digest, {}).get("plugin_files")
        if not isinstance(then, dict) or then == mine.plugin_files:
            return
        paths = sorted({*then, *mine.plugin_files})
        words = [
            f"{path!r} {'is not given now' if path not in mine.plugin_files else word}"
            for path in paths
            if then.get(path) != mine.plugin_files.get(path)
            for word in ["has changed" if path in then else "was not given then"]
        ]
        logger.warning(
            "%r has results with other plugin files: %s; they stay", self._output, "; ".join(words)
        )

    def write(
        self,
        mine: Configuration,
        found: Collection[str],
        *,
        is_new: bool,
        root: str | None = None,
    ) -> None:
        """Adds a configuration. found: configurations whose results it keeps. is_new: forgets what
        the file holds. root: see above."""
        self.check_file()
        known = {} if is_new else self._read()
        before = known.get(mine.digest, {}).get("accepts", ())
        accepts = sorted({*before, *found} - {mine.digest})
        entry = {"model": mine.model, "values": mine.values, "accepts": accepts}
        entry |= {"plugin_files": mine.plugin_files} if mine.plugin_files else {}
        own = {} if root is None else {"root": escaped(root)}
        entries = {**known, mine.digest: entry}
        self._save({name: {**_without(("root",), each), **own} for name, each in entries.items()})

    def adopt(self, others: Iterable[ConfigurationFile]) -> None:
        """Replaces the configurations by those of other outputs, whose results were copied."""
        known: dict[str, Any] = {}
        for other in others:
            known.update(other._read())
        if known:
            self._save(known)

    def _save(self, known: Mapping[str, Any]) -> None:
        with Folder.open(self._path.parent) as folder:
            folder.write(self._path.name, [_as_json(known).encode() + b"\n"])

    def _read(self) -> dict[str, Any]:
        try:
            with open_regular(self._path, os.O_RDONLY) as file:
                texts: Iterable[str | bytes] = [file.read(MAX_BYTES)]
        except FileNotFoundError:
            texts = self._embedded()
        known: dict[str, Any] = {}
        for text in texts:
            known.update(self._parsed(text))
        return known

    def _parsed(self, text: str | bytes) -> dict[str, Any]:
        try:
            known = json.loads(text)
        except (ValueError, RecursionError):
            known = None
        if not isinstance(known, dict) or not all(map(_is_entry, known.values())):
            raise ConfigError(
                f"{str(self._path)!r} does not hold the configurations of a batch; move it away"
            )
        return known


def _without(names: Collection[str], entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name not in names}


def _as_json(value: Any) -> str:
    """Returns a value as JSON; objects that JSON cannot hold by their type."""
    return json.dumps(value, sort_keys=True, default=lambda found: f"<{type(found).__name__}>")


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("values"), dict):
        return False
    accepts = entry.get("accepts")
    return isinstance(accepts, list) and all(isinstance(digest, str) for digest in accepts)


def differences(earlier: Mapping[str, Any], mine: Configuration) -> list[str]:
    """Returns one sentence for each value that differs. earlier: an entry, see above."""
    before, now = earlier["values"], json.loads(_as_json(mine.values))
    differences = []
    for name in sorted({*before, *now}):
        if before.get(name) == now.get(name):
            continue
        if name in FILES and name in before and name in now:
            words = f"the files of the {name} differ"
            if name == "model":
                words += f" ({mine.model!r} now, {_shown(earlier.get('model'))} then)"
            differences.append(words)
        else:
            differences.append(f"{name} is {_value(now, name)}, was {_value(before, name)}")
    return differences


def _value(values: Mapping[str, Any], name: str) -> str:
    if name in values:
        return _shown(values[name])
    option = EngineConfig.model_fields.get(name)
    return "not set" if option is None else f"{option.default!r}, the default of LLM"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
