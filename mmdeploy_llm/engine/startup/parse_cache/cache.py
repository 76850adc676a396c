"""ParseCache: takes a model's config and tokenizer from files of the cache, and keeps them there
after the first start."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from mmdeploy_llm.hooks import Checkpoint, ModelSpec, PluginManager
from mmdeploy_llm.kernels.cpu import BuildError
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.weights.cache import NotKeptError, cache_folder, folder, source_key
from mmdeploy_llm.weights.folder import read_checkpoint

from .config import config_stand_in, describe_config
from .stand_in import LIBRARY, Source, StandIn, real
from .tokenizer import describe_tokenizer, tokenizer_stand_in

logger = logging.getLogger(__name__)

MAGIC = b"mmdeploy_llm parsed 1\n"
DIGEST_SIZE = 32
MAX_SIZE = 2**28  # bytes of a file
SUFFIX = ".parsed"
MORE_FILES = "additional_chat_templates"  # a folder of the model's folder
LIBRARIES = ("huggingface_hub", "jinja2", "tokenizers")
ROOT = Path(__file__).parents[3]  # mmdeploy_llm/
# What decides what is kept, and what is refused.
CODE = (
    "engine/startup/parse_cache",
    "weights/folder",
    "system/guarding",
    "engine/intake/templates",
    "engine/intake/tokenizer.py",
    "layers/basic/scaled_rope.py",
    "layers/config_reader.py",
)


class ParseCache:
    """Reads a model's config and tokenizer, with transformers only once for the same files. Used by
    the thread that starts an engine."""

    def __init__(self, options: EngineConfig, plugins: PluginManager) -> None:
        """plugins: those of the engine. Nothing is kept where others than those of this package
        are among them: they get transformers' own objects; nor where the program has imported
        transformers, and may have registered classes there."""
        self._plugins, self._max_bytes = plugins, options.weight_cache_size
        self._place: Path | None = None
        is_alone = LIBRARY not in sys.modules
        if is_alone and all(plugins.origin(spec).is_builtin for spec in plugins.specs):
            with suppress(RuntimeError):  # the user has no home
                self._place = cache_folder(options.weight_cache)

    def checkpoint(self, place: Path) -> Checkpoint:
        """Returns what `read_checkpoint` does, perhaps with a stand-in for the config."""
        path = self._path(place, "config")
        found = None if path is None else _read(path)
        if found is not None:
            source = Source(lambda: read_checkpoint(place, self._plugins).config)
            return read_checkpoint(place, self._plugins, config_stand_in(found, source))
        made = read_checkpoint(place, self._plugins)
        if path is not None and not made.other_files:
            self._keep(path, lambda: describe_config(made.config))
        return made

    def tokenizer(self, place: Path, load: Callable[[], Any]) -> Any:
        """Returns what `load` does, transformers' tokenizer of a folder, or a stand-in for it."""
        path = self._path(place, "tokenizer")
        found = None if path is None else _read(path)
        if found is not None:
            return tokenizer_stand_in(found, Source(load))
        made = load()
        if path is not None:
            self._keep(path, lambda: describe_tokenizer(made))
        return made

    def for_plugins(self, checkpoint: Checkpoint, spec: ModelSpec) -> Checkpoint:
        """Returns a checkpoint with transformers' own config where the plugins that serve the model
        import transformers. Raises PluginError."""
        if not issubclass(type(checkpoint.config), StandIn):
            return checkpoint
        self._plugins.resolve(spec)
        for kind in spec.media:
            found = self._plugins.media_processor(kind, spec.name, spec=spec)
            if found is not None:
                self._plugins.resolve(found)
        if LIBRARY not in sys.modules:
            return checkpoint
        return replace(checkpoint, config=real(checkpoint.config))

    def _path(self, place: Path, what: str) -> Path | None:
        """Returns the path of what is kept of a model; None where nothing is."""
        if self._place is None or not place.is_dir():
            return None
        try:
            versions = {name: metadata.version(name) for name in LIBRARIES}
            files = list(_files(place))
            code = (ROOT / name for name in CODE)
            key = source_key(files, code, {"what": what, "versions": sorted(versions.items())})
        except (OSError, metadata.PackageNotFoundError):  # told by who reads the files
            return None
        return self._place / f"{key}{SUFFIX}"

    def _keep(self, path: Path, describe: Callable[[], Any]) -> None:
        """Writes what is described; what prevents it is logged."""
        try:
            text = json.dumps(describe()).encode()
            if len(text) > MAX_SIZE:
                raise NotKeptError(f"it takes {len(text)} bytes; allowed: {MAX_SIZE}")
            folder.make_folder(path.parent, len(text), self._max_bytes)
            with folder.new_file(path) as file:
                if file is not None:  # else another process writes it
                    file.write(MAGIC + text + _digest(path, text))
        except (NotKeptError, folder.NoRoomError) as error:
            logger.info("config or tokenizer are not kept for the next start: %s", error)
        except (OSError, BuildError) as error:
            logger.warning("config or tokenizer are not kept for the next start: %s", error)
        else:
            folder.make_room(path, self._max_bytes)


def _files(place: Path) -> Iterator[Path]:
    """Yields the files of a model's folder."""
    for parent in (place, place / MORE_FILES):
        if parent.is_dir():
            yield from (path for path in parent.iterdir() if path.is_file())


def _read(path: Path) -> Any:
    """Returns the content of a file; None where there is none that is whole and this user's."""
    try:
        file, size = folder.open_kept(path)
        with closing(file):
            data = file.read(MAX_SIZE) if size < MAX_SIZE else b""
    except FileNotFoundError:
        return None
    except (OSError, BuildError) as error:
        logger.warning("%s. Until then transformers reads config and tokenizer", error)
        return None
    text, digest = data[len(MAGIC) : -DIGEST_SIZE], data[-DIGEST_SIZE:]
    if not data.startswith(MAGIC) or digest != _digest(path, text):
        logger.warning("%s is not whole and is written again", path)
        with suppress(OSError):
            path.unlink()
        return None
    return json.loads(text)


def _digest(path: Path, text: bytes) -> bytes:
    return hashlib.blake2b(path.name.encode() + b"\0" + text, digest_size=DIGEST_SIZE).digest()
