"""Finds the folder of a model by name and reads the folder's JSON files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from mmdeploy_llm.errors import CheckpointError, ModelError
from mmdeploy_llm.hooks import Checkpoint, ModelFile, PluginManager
from mmdeploy_llm.system.guarding.folder_files import (
    check_adapter,
    check_folder,
    library_error,
    read_object,
    validated,
)
from mmdeploy_llm.system.guarding.given_template import load_template
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.values.options.model_names import HUB_ID, find_model, is_cached
from mmdeploy_llm.weights.gguf import find_gguf, find_tower

from .model_file import find_model_file, is_gguf, may_be_file, no_model
from .named import check_named
from .schema import ChatTemplateFile, GenerationFile, ProcessorFile, TokenizerFile, check_config

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
TOKENIZER_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
PROMPT_FILES = (*TOKENIZER_FILES, "*.ttf")  # needed to prepare prompts
MODEL_FILES = (*PROMPT_FILES, "*.safetensors", "model.bin")  # CTranslate2's, no pickle
# Every JSON file that this package or transformers takes options from.
SCHEMAS: Mapping[str, type[BaseModel]] = {
    "chat_template.json": ChatTemplateFile,
    "generation_config.json": GenerationFile,
    "preprocessor_config.json": ProcessorFile,
    "processor_config.json": ProcessorFile,
    "tokenizer_config.json": TokenizerFile,
    "video_preprocessor_config.json": ProcessorFile,
}
NO_SCHEMA = ("added_tokens.json", "special_tokens_map.json")
COMPONENTS = ("image_processor", "video_processor")  # in processor_config.json


@contextmanager
def naming(name: str, *, kind: str = "model") -> Iterator[None]:
    """Adds the name, as the caller gave it, to the errors of a model that do not have it yet: most
    name a file of the model only."""
    try:
        yield
    except ModelError as error:
        if name not in str(error):
            error.args = (f"{error} ({kind} {name!r})", *error.args[1:])
        raise


def resolve_model(
    name: str, revision: str | None = None, patterns: tuple[str, ...] = MODEL_FILES
) -> Path:
    """Returns the place of a model: a local folder or GGUF file, or the folder of a bundled model's
    name or of a hub id, in this order.

    Only files of a hub repository that match `patterns` are fetched. Raises CheckpointError when
    there is no such model, or when the hub cannot be reached and its cache does not have it.
    """
    place = find_model(name)
    return _from_hub(name, revision, patterns) if place is None else place


def look_up(config: EngineConfig, patterns: tuple[str, ...] = MODEL_FILES) -> None:
    """Fetches a model and a tokenizer of which the hub's cache has nothing, and adapters, and looks
    whether a folder is that of a model, and whether there are the template and the plugins that the
    options name, so that a wrong name is told before torch is imported. Raises CheckpointError,
    ConfigError and PluginError."""
    for name, kind, own in (
        (config.model, "model", patterns),
        (config.tokenizer, "tokenizer", TOKENIZER_FILES),
    ):
        if name is None:
            continue
        with naming(name, kind=kind):
            if find_model(name) is None and not is_cached(name):
                _from_hub(name, config.revision, own)
    place = find_model(config.model)
    if place is not None:
        with naming(config.model):
            _check_place(place, config)
    with naming(config.model):
        for source in config.adapters.values():
            check_adapter(resolve_adapter(source))
    if config.chat_template is not None:
        load_template(config.chat_template)
    check_named(config)


def _check_place(place: Path, config: EngineConfig) -> None:
    """Raises CheckpointError for a folder or file that holds no model. Loads the plugins only where
    one of them must know the file."""
    if place.is_dir() and os.path.lexists(place / "config.json"):
        return
    if not is_gguf(place) and find_model_file(place, PluginManager.of(config)) is None:
        raise no_model(place)


def resolve_adapter(name: str) -> Path:
    """Returns the folder of an adapter: a local one, or what the hub has of an id. Raises
    CheckpointError."""
    try:
        folder = Path(name).expanduser()
        is_folder = folder.is_dir()
    except (OSError, RuntimeError) as error:  # a name that is too long, ~ of an unknown user
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"there is no adapter {name[:100]!r}: {reason}") from error
    if is_folder:
        return folder
    if folder.is_absolute() or name.startswith((".", "~")) or not HUB_ID.fullmatch(name):
        fault = "it is no folder" if folder.exists() else "no such folder"
        raise CheckpointError(f"there is no adapter {name!r}: {fault}")
    return _from_hub(name, None, ADAPTER_FILES)


def read_checkpoint(
    place: Path, plugins: PluginManager | None = None, known: Any = None
) -> Checkpoint:
    """Reads the JSON files of a model, without running code of the checkpoint.

    place: its folder, or its GGUF file; where there is no config.json, the config is made of the
    metadata of this file and of the one with the vision tower. plugins: who says how other files
    are read; None: those that are installed. known: the config of a folder, where it is known.

    Raises CheckpointError for a folder with neither, a malformed file, a value out of range, and an
    architecture that transformers does not know, ModelNotSupportedError for an architecture of GGUF
    that no plugin knows.
    """
    if (other := _other_file(place, plugins)) is not None:
        return _of_model_file(other)
    folder = place if place.is_dir() else place.parent
    image = _preprocessor(folder, "image_processor", "preprocessor_config.json")
    video = _preprocessor(folder, "video_processor", "video_preprocessor_config.json")
    generation = read_json(folder / "generation_config.json")
    files = find_gguf(place)
    if not files:
        return Checkpoint(
            folder=folder,
            config=_read_config(folder) if known is None else known,
            preprocessor=image,
            video_preprocessor=video,
            generation=generation,
        )
    from .gguf import described, table_names  # which import torch

    tower = find_tower(place)
    plugins = PluginManager.load() if plugins is None else plugins
    if os.path.lexists(folder / "config.json"):
        config = _read_config(folder)
        tower = tower if getattr(config, "vision_config", None) is not None else None
        tables = table_names(files, tower, plugins)
    else:
        found = described(files, tower, plugins)
        config, tables = found.config, found.tables
        image, video = image or found.image, video or found.video
    return Checkpoint(
        folder=folder,
        config=config,
        preprocessor=image,
        video_preprocessor=video,
        generation=generation,
        gguf_files=files,
        gguf_tower=tower,
        gguf_tables=tables,
    )


def _other_file(place: Path, plugins: PluginManager | None) -> ModelFile | None:
    """Returns the model in a file that a plugin reads; None for a place that needs
    none."""
    if is_gguf(place) or not may_be_file(place):
        return None
    found = find_model_file(place, PluginManager.load() if plugins is None else plugins)
    if found is None and not place.is_dir():
        raise no_model(place)
    return found


def _of_model_file(file: ModelFile) -> Checkpoint:
    """Describes a model by its file of another format; its values are checked as those of files."""
    config = check_config(file.read_json("config.json"), file.path.name)
    return Checkpoint(
        folder=file.path.parent,
        config=_config(file.path.parent, config),
        preprocessor=_checked("preprocessor_config.json", file),
        generation=_checked("generation_config.json", file),
        model_file=file,
    )


def _checked(name: str, file: ModelFile) -> Mapping[str, Any]:
    found = validated(SCHEMAS[name], f"{name}, as {file.path.name} has it,", file.read_json(name))
    return found.model_dump(exclude_unset=True)


def check_files(folder: Path) -> None:
    """Checks every file of a model folder that transformers will open by itself, config.json aside.
    Raises CheckpointError."""
    check_folder(folder)
    for name in (*SCHEMAS, *NO_SCHEMA):
        read_json(folder / name)


def read_json(path: Path) -> Mapping[str, Any]:
    """Reads a JSON object from a file, {} when there is no such file. Raises CheckpointError for a
    malformed file and for values out of range."""
    values = read_object(path)
    schema = SCHEMAS.get(path.name)
    if schema is not None:
        values = validated(schema, path.name, values).model_dump(exclude_unset=True)
    if schema is ProcessorFile:
        for name in COMPONENTS:
            inner = values.get(name)
            if isinstance(inner, dict):
                made = validated(schema, path.name, inner, f"{name}.")
                values[name] = made.model_dump(exclude_unset=True)
    return values


def _read_config(folder: Path) -> Any:
    check_files(folder)
    config = read_object(folder / "config.json")
    if not config and not (folder / "config.json").is_file():
        raise no_model(folder)
    made = check_config(config, "config.json")
    texts = [json.dumps(values, sort_keys=True) for values in (config, made)]
    return _config(folder, None if texts[0] == texts[1] else made)


def _config(folder: Path, values: Mapping[str, Any] | None) -> Any:
    """Returns transformers' config of a folder. values: of its config.json, where they are not as
    the file has them."""
    from transformers import CONFIG_MAPPING, AutoConfig

    try:
        if values is not None and values.get("model_type") in CONFIG_MAPPING:
            kind = CONFIG_MAPPING[values["model_type"]]
            found = kind.from_dict(dict(values), name_or_path=str(folder))
        else:
            found = AutoConfig.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True
            )
        _forget_code(found)
        if not found.architectures:
            found.architectures = _architectures_of(found.model_type)
        return found
    except Exception as error:  # transformers raises whatever its config classes raise
        raise CheckpointError(
            f"config.json of the model cannot be used: {library_error(error)}"
        ) from error


def _architectures_of(model_type: str) -> list[str] | None:
    """Returns the architecture of a config that names none, as transformers' Auto classes choose
    it: one for images and text before one for text. None where there is none."""
    from transformers.models.auto import modeling_auto

    tables = (
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    )
    found = next((table[model_type] for table in tables if model_type in table), None)
    return [found] if isinstance(found, str) else list(found) if found else None


def _forget_code(config: Any) -> None:
    """Removes from a config, and from all configs in it, the names of code in the checkpoint: a
    model of transformers makes its parts from them and would ask on stdin whether to run it."""
    from transformers import PreTrainedConfig

    todo = [config]
    while todo:
        found = todo.pop()
        if isinstance(found, (list, tuple)):
            todo.extend(found)
        elif isinstance(found, (dict, PreTrainedConfig)):
            values = found if isinstance(found, dict) else vars(found)
            values.pop("auto_map", None)
            todo.extend(values.values())


def _preprocessor(folder: Path, name: str, file_name: str) -> Mapping[str, Any]:
    """Reads a processor's options; the newer processor_config.json wins, as in transformers."""
    nested = read_json(folder / "processor_config.json").get(name)
    return nested if isinstance(nested, dict) else read_json(folder / file_name)


def _from_hub(name: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        path = snapshot_download(name, revision=revision, allow_patterns=list(patterns))
    except Exception as error:  # network errors can have any type
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"{name!r} is no local folder, and the hub did not return it: "
            f"{type(error).__name__}: {reason}\nCheck the name and the connection, or give a folder"
        ) from error
    return Path(path)
