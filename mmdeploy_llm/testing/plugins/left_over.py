"""Finds what a plugin leaves in a process: threads, child processes, open files, functions that it
has replaced, and changed settings of the process and of libraries."""

from __future__ import annotations

import builtins
import gc
import locale
import logging
import os
import random
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from mmdeploy_llm.system.portable.signals import OF_PROGRAMS

GRACE = 3.0  # seconds in which threads and processes may end
# Modules whose functions and classes belong to all; those that are not imported are left out.
SHARED = (
    "builtins", "json", "os", "random", "socket", "threading", "time",
    "numpy", "PIL.Image", "PIL.ImageFile", "PIL.ImageOps", "av", "safetensors.torch",
    "torch", "torch.nn", "torch.nn.functional", "torch.nn.modules.module",
    "torch.nn.modules.linear",
    "transformers", "transformers.modeling_utils", "transformers.masking_utils",
    "transformers.processing_utils", "transformers.tokenization_utils_base",
    "transformers.image_utils", "transformers.image_transforms",
    "mmdeploy_llm.hooks", "mmdeploy_llm.layers", "mmdeploy_llm.forward",
)  # fmt: skip
# Classes in which methods are replaced most often: module -> names.
CLASSES = {
    "torch": ("Tensor",),
    "torch.nn": ("Module", "Linear", "Embedding"),
    "PIL.Image": ("Image",),
    "transformers": ("PreTrainedModel", "PreTrainedTokenizerFast", "ProcessorMixin"),
}
REPLACED = "do not replace what others use, make a subclass or a function of your own"
SIMPLE = (bool, int, float, str, bytes, type(None))
OWN_ENVIRONMENT = ("PYTEST_CURRENT_TEST",)


class Left:
    """The state of this process when it was made."""

    def __init__(self) -> None:
        self._random = _draw()  # so that a state that is set, not changed, differs too
        self._threads = {*threading.enumerate()}  # a new one may have the number of an ended one
        self._children = _children()
        self._files = _num_files()
        self._shared = _shared()
        self._settings = _settings()

    def difference(self) -> str | None:
        """Says what has changed since, and what to do; None when nothing has."""
        changed = self._changed()
        for restore in self._random:
            restore()
        return changed or self._running()

    def _changed(self) -> str | None:
        settings = _settings()
        for name, value in self._settings.items():
            if settings.get(name, value) != value:
                how = f"is {settings[name]!r:.80}, it was {value!r:.80}"
                if isinstance(value, bytes | tuple) or len(repr(value)) > 80:
                    how = f"has changed{_added(value, settings[name])}"
                return f"{name} {how}; leave settings of the process as they are, or restore them"
        after = _shared()
        for name, value in self._shared.items():
            if name in after and _is_replaced(name, value, after[name]):
                return f"{name} is another object; {REPLACED}"
        return None

    def _running(self) -> str | None:
        end, pause = time.monotonic() + GRACE, 0.01
        while (problem := self._still()) and time.monotonic() < end:
            gc.collect()
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        return problem

    def _still(self) -> str | None:
        threads = [own.name for own in threading.enumerate() if own not in self._threads]
        if threads:
            return f"the thread {threads[0]!r} still runs, one of {len(threads)}; end it in close()"
        children = _children() - self._children
        if children:
            return f"{len(children)} processes still run that it started; end them in close()"
        files = _num_files() - self._files
        if files > 0:
            return f"{files} more files or sockets are open than before; close them in close()"
        return None


def named_by(spec: Any) -> str:
    """Returns "module:name" of the factory of a spec, or of what it has instead: the reader of a
    format of corpora, the converter of a preset; "" where that names none."""
    named = (getattr(spec, name, None) for name in ("factory", "reader", "convert"))
    return next((name for name in named if name), "")


def replaced_by(module: str) -> str | None:
    """Says which shared function or class is now one of the package of `module`; None for none."""
    package = module.partition(".")[0] + "."
    for name, value in _shared().items():
        origin = f"{_origin(value)}."
        if origin.startswith(package) and not name.startswith(package):
            return f"{name} has been replaced by one of {origin[:-1]}; {REPLACED}"
    return None


def _is_replaced(name: str, before: Any, after: Any) -> bool:
    """Whether another function took the place of a shared one. Libraries do so with their own at
    their first use, under the same name."""
    if after is before:
        return False
    is_own = _origin(after).partition(".")[0] == name.partition(".")[0]
    return not is_own or getattr(after, "__name__", "") != getattr(before, "__name__", "")


def _origin(value: Any) -> str:
    """Returns the module whose code a function, method or class is."""
    value = getattr(value, "__func__", getattr(value, "fget", value))
    globals_of_it = getattr(value, "__globals__", {})  # functools.wraps leaves them
    return str(globals_of_it.get("__name__") or getattr(value, "__module__", ""))


def _added(before: Any, after: Any) -> str:
    """Names what has come into a list."""
    if not isinstance(after, list):
        return ""
    new = [item for item in after if item not in before]
    return f", new is {new[0]!r:.80}" if new else ""


def _shared() -> dict[str, Any]:
    """Returns name -> each function and class of the SHARED modules, and methods of CLASSES."""
    found: dict[str, Any] = {}
    for name in SHARED:
        module = builtins if name == "builtins" else sys.modules.get(name)
        if isinstance(module, ModuleType):
            found |= {f"{name}.{key}": it for key, it in _callables(vars(module))}
        for class_name in CLASSES.get(name, ()) if module is not None else ():
            # Not by getattr, which imports what a lazy module has not needed yet.
            owner = vars(module).get(class_name)
            if isinstance(owner, type):
                found |= {f"{name}.{class_name}.{key}": it for key, it in _callables(vars(owner))}
    return found


def _callables(names: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in list(names.items()):
        if callable(value) or isinstance(value, classmethod | staticmethod | property):
            yield key, value


def _settings() -> dict[str, Any]:
    """Returns name -> value of settings that all of a process share."""
    root = logging.getLogger()
    found: dict[str, Any] = {
        **_torch_settings(),
        "random's state": random.getstate(),
        # Libraries add filters for categories of their own, and numpy for messages about itself.
        "warnings.filters": [
            it
            for it in warnings.filters
            if it[2].__module__ == "builtins" and "numpy" not in getattr(it[1], "pattern", "")
        ],
        "sys.path": list(sys.path),
        "sys.getrecursionlimit()": sys.getrecursionlimit(),
        "sys.excepthook": sys.excepthook,
        "sys.stdout": sys.stdout,
        "os.getcwd()": os.getcwd(),
        "locale": locale.setlocale(locale.LC_ALL),
        "socket.getdefaulttimeout()": socket.getdefaulttimeout(),
        "the level of the root logger": root.level,
        "handlers of the root logger": list(root.handlers),
    }
    for number in OF_PROGRAMS:
        found[f"the handler of {number.name}"] = signal.getsignal(number)
    for key, value in os.environ.items():
        if key not in OWN_ENVIRONMENT:
            found[f"os.environ[{key!r}]"] = value
    found["the names in os.environ"] = sorted(set(os.environ) - set(OWN_ENVIRONMENT))
    if "numpy" in sys.modules:
        import numpy as np

        found["numpy's random state"] = repr(np.random.get_state())
    for name in ("PIL.Image", "PIL.ImageFile"):
        module = sys.modules.get(name)
        for key, value in vars(module).items() if module else ():
            if key.isupper() and isinstance(value, SIMPLE):
                found[f"{name}.{key}"] = value
    return found


def _torch_settings() -> dict[str, Any]:
    """Returns those of torch, where it is imported."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_rng_state"):
        return {}
    return {
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.get_default_device()": str(torch.get_default_device()),
        "torch.get_num_threads()": torch.get_num_threads(),
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision(),
        "torch.are_deterministic_algorithms_enabled()": (
            torch.are_deterministic_algorithms_enabled()
        ),
        "torch's random seed": torch.random.initial_seed(),
        "torch's random state": torch.get_rng_state().numpy().tobytes(),
    }


def _draw() -> list[Callable[[], Any]]:
    """Draws a random number of each library that is imported; returns what puts the states back."""
    restore: list[Callable[[], Any]] = [partial(random.setstate, random.getstate())]
    random.random()
    torch, numpy = (sys.modules.get(name) for name in ("torch", "numpy"))
    if torch is not None and hasattr(torch, "get_rng_state"):
        restore.append(partial(torch.set_rng_state, torch.get_rng_state()))
        torch.rand(1)
    if numpy is not None and hasattr(numpy, "random"):
        restore.append(partial(numpy.random.set_state, numpy.random.get_state()))
        numpy.random.random()
    return restore


def _children() -> set[int]:
    """Returns the ids of the child processes that run. Only Linux tells them."""
    found = set()
    for path in Path("/proc/self/task").glob("*/children"):
        try:
            found |= set(map(int, path.read_text(encoding="ascii", errors="replace").split()))
        except OSError:
            continue
    return {child for child in found if _runs(child)}


def _runs(child: int) -> bool:
    try:
        text = Path(f"/proc/{child}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] != "Z"


def _num_files() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0
