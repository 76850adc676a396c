"""Finds the video processor of a checkpoint, and the token that stands for its embeddings."""

from __future__ import annotations

import builtins
import importlib.util
import sys
import types
from collections.abc import Mapping
from importlib.machinery import SourceFileLoader
from typing import Any

import transformers

from mmdeploy_llm.errors import UnsupportedMediaError
from mmdeploy_llm.hooks import Checkpoint

from .operators import HAS_LANCZOS, PILLOW_MODES, Mode, Torchvision, reading

BACKENDS, BACKEND = "transformers.image_processing_backends", "TorchvisionBackend"
UTILITIES = "transformers.video_processing_utils"
# What transformers has under these names where torchvision is installed.
NAMES = {
    "tvF": Torchvision,
    "pil_torch_interpolation_mapping": {
        number: Mode(mode) for number, mode in enumerate(PILLOW_MODES)
    },
    "is_torchvision_greater_or_equal": lambda _: HAS_LANCZOS,
}
RESERVED = ("reserved", "unused")  # in the names of tokens that stand for nothing
TRAITS = ("lstrip", "rstrip", "single_word", "normalized")


def find_class(checkpoint: Checkpoint) -> tuple[Any, Mapping[str, Any]]:
    """Returns the class of the checkpoint's video processor and its fields, found as transformers'
    AutoVideoProcessor finds them. Raises UnsupportedMediaError where there is none."""
    model_type = checkpoint.config.model_type
    settings = checkpoint.video_preprocessor or checkpoint.preprocessor
    names = [settings.get("video_processor_type")]
    if names[0] is None:
        image = str(settings.get("image_processor_type", ""))
        names.append(image.replace("ImageProcessor", "VideoProcessor"))
        names.append(_class_of(model_type))
    for name in names:
        found = _imported(name) if isinstance(name, str) else None
        if found is not None:
            return found, {key: value for key, value in settings.items() if key != "auto_map"}
    raise UnsupportedMediaError(
        f"transformers has no video processor for the model type {model_type!r}"
        + (f" named {names[0]!r}" if names[0] else "")
        + "; give frames as images where the model takes these"
    )


def _imported(name: str) -> Any:
    """Returns transformers' class of a video processor, which its public name hides where
    torchvision is not installed; None if there is no such class."""
    public = getattr(transformers, name, None)
    module = str(getattr(public, "__module__", ""))
    if not name.endswith("VideoProcessor") or not module.startswith("transformers.models."):
        return None
    return _loaded(module).get(name)


def _class_of(model_type: str) -> str | None:
    """Returns the name of the video processor in the folder of a model type, or None."""
    name = model_type.replace("-", "_")
    found = _loaded(f"transformers.models.{name}.video_processing_{name}")
    return next(iter(found.get("__all__", ())), None)


def _loaded(name: str) -> dict[str, Any]:
    """Loads a module of transformers under another name, with Torchvision where it imports
    torchvision, and returns its names; {} when there is no such module. Raises
    UnsupportedMediaError for one that needs more.

    Not the module itself: it fails on import, or lacks these names, without torchvision.
    """
    own = f"{__name__}:{name}"  # transformers looks classes' modules up by their names
    if own in sys.modules:
        return vars(sys.modules[own])
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return {}
    if spec is None or spec.origin is None:
        return {}
    module = types.ModuleType(own)
    module.__file__, module.__package__ = spec.origin, spec.parent
    vars(module).update(NAMES, __builtins__={**vars(builtins), "__import__": _import})
    sys.modules[own] = module
    try:
        SourceFileLoader(own, spec.origin).exec_module(module)
    except Exception as error:  # transformers' code: anything may come
        del sys.modules[own]
        raise UnsupportedMediaError(
            f"{name} needs torchvision ({type(error).__name__}: {error}); use a plugin made for "
            "this model, or give frames as images"
        ) from error
    vars(module).update(NAMES)  # what it imports under a condition
    if name == BACKENDS:
        vars(module)[BACKEND] = reading(vars(module)[BACKEND])
    return vars(module)


def _import(name: str, given: Any = None, own: Any = None, of: Any = (), level: int = 0) -> Any:
    """Imports a module: Torchvision in place of torchvision, and modules that use it by _loaded."""
    if name.split(".")[0] == "torchvision":
        return Torchvision
    full = importlib.util.resolve_name("." * level + name, given["__package__"]) if level else name
    if full in (BACKENDS, UTILITIES) or ".video_processing_" in full:
        return types.SimpleNamespace(**_loaded(full))
    return __import__(name, given, own, of, level)


def stand_in(processor: Any, token: str, name: str) -> str:
    """Returns a token that stands for `token` in texts of videos: that of videos where the
    tokenizer has one, else one that is reserved. Raises UnsupportedMediaError when there is none
    that is separated from its neighbours in the same way."""
    known = {str(added): added for added in processor.tokenizer.added_tokens_decoder.values()}
    wanted = [getattr(known.get(token), trait, None) for trait in TRAITS]
    reserved = [text for text in known if any(word in text for word in RESERVED)]
    for text in (str(processor.video_token), *reserved):
        if text in known and [getattr(known[text], trait) for trait in TRAITS] == wanted:
            return text
    raise UnsupportedMediaError(
        f"transformers' {name} writes videos with the token of images, {token!r}, and the "
        f"tokenizer has no special token {processor.video_token!r} to tell them apart; add one to "
        "tokenizer.json, or give frames as images"
    )
