"""Loads Python files as modules, and says of a module which file it is."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
import traceback
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from mmdeploy_llm.errors import PluginLoadError
from mmdeploy_llm.values.text.display import error_text

PREFIX = "mmdeploy_llm_file_"
MAX_BYTES = 16 * 2**20
NUM_DIGITS = 12  # of the digest in a module's name


def load_file(path: Path) -> ModuleType:
    """Imports a Python file under a name of its own, once for each content of it.

    Raises PluginLoadError for what is no Python file, and for an error in it with the line.
    """
    path = path.expanduser().absolute()
    return _imported(path, check_file(path))


def load_named(path: Path, name: str) -> ModuleType:
    """Imports the module `name` that another process has loaded from `path`. Raises PluginLoadError
    when the file has changed since."""
    if name in sys.modules:
        return sys.modules[name]
    source = check_file(path)
    if _name_of(path, source) != name:
        raise PluginLoadError(
            f"the plugin file {str(path)!r} has changed since it was loaded; start a new engine"
        )
    return _imported(path, source)


def file_of(module: str) -> Path | None:
    """Returns the file of a module that `load_file` has loaded in this process, None of others."""
    found = sys.modules.get(module) if module.startswith(PREFIX) else None
    return None if found is None or found.__file__ is None else Path(found.__file__)


def check_file(path: Path) -> bytes:
    """Reads a plugin file. Raises PluginLoadError for one that is missing, no regular file, too
    large or not called *.py."""
    about = f"the plugin file {str(path)!r}"
    if path.suffix != ".py":
        raise PluginLoadError(f"{about} is no Python file; its name must end in .py")
    try:
        if not path.is_file():
            missing = "is no file" if path.exists() else "does not exist"
            raise PluginLoadError(f"{about} {missing}; correct the path")
        with path.open("rb") as file:
            source = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise PluginLoadError(f"{about} cannot be read: {error_text(error)}") from error
    if len(source) > MAX_BYTES:
        raise PluginLoadError(f"{about} has more than {MAX_BYTES} bytes")
    return source


def _name_of(path: Path, source: bytes) -> str:
    digest = hashlib.sha256(str(path).encode(errors="surrogateescape") + b"\0" + source).hexdigest()
    return f"{PREFIX}{re.sub(r'[^0-9a-zA-Z]', '_', path.stem)}_{digest[:NUM_DIGITS]}"


def _imported(path: Path, source: bytes) -> ModuleType:
    """Imports the file with Python's own import, which locks and forgets a module that fails."""
    name = _name_of(path, source)
    finder = _Finder(name, path, source)
    sys.meta_path.insert(0, finder)
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        lines = [at.lineno for at in traceback.extract_tb(error.__traceback__) if _is_in(at, path)]
        where = f" (line {lines[-1]} of {path.name})" if lines else ""
        raise PluginLoadError(f"{error_text(error)}{where}") from error
    finally:
        sys.meta_path.remove(finder)


def _is_in(frame: traceback.FrameSummary, path: Path) -> bool:
    return frame.filename == str(path)


class _Finder(MetaPathFinder):
    """Finds one module, whose source is at hand, while it is imported."""

    def __init__(self, name: str, path: Path, source: bytes) -> None:
        self._name, self._path, self._source = name, path, source

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Returns the spec of the module, None for any other name."""
        if fullname != self._name:
            return None
        loader = _Loader(self._path, self._source)
        return importlib.util.spec_from_file_location(fullname, self._path, loader=loader)


class _Loader(InspectLoader):
    """Compiles a source; no cached bytecode, which may be that of an older content."""

    def __init__(self, path: Path, source: bytes) -> None:
        self._path, self._source = path, source

    def get_source(self, fullname: str) -> str:
        """Returns the text of the file."""
        return importlib.util.decode_source(self._source)

    def get_code(self, fullname: str) -> CodeType:
        """Returns the compiled file; a syntax error names it and the line."""
        return compile(self._source, str(self._path), "exec", dont_inherit=True)
