"""Options of the model, and of how it is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import typer

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.values.options.engine_flags import EngineFlags
from mmdeploy_llm.values.options.model_names import check_offline, find_model

from .groups import Given, Group, Rows
from .providers import ProviderOptions


def known_model(name: str | None) -> str | None:
    """Returns the name of a model. Raises ModelError for one that is plainly wrong: the id of a hub
    is looked up when the model is loaded, unless that may not be."""
    if name is not None and find_model(name) is None:
        check_offline(name)
    return name


Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        metavar="NAME",
        envvar="MMDEPLOY_LLM_MODEL",
        callback=known_model,
        help="A folder, Hugging Face id, GGUF file or name. Names are those of bundled "
        "models. The file with the "
        "vision tower of a GGUF file, mmproj-*.gguf, is found in the same folder.",
    ),
]
Engine = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="Another engine option, such as max_model_len=4096. May be repeated.",
    ),
]
Adapter = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=FOLDER",
        hidden=True,
        help="A LoRA adapter: a PEFT folder or an id on the hub. Of several, prompts name theirs, "
        "and --adapter NAME says which one the others have. May be repeated.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions(Group):
    """The model, and how it is computed."""

    title: ClassVar[str] = "Model"

    model: Model = "shapes-vl"
    computed: Annotated[
        Given, Rows(EngineFlags, "dtype", "device", "image_tokens", "video_tokens", "pixels")
    ]
    adapter: Adapter = None
    engine: Engine = None
    providers: ProviderOptions

    def to_engine(self) -> dict[str, Any]:
        """Returns what the options set, and the adapters."""
        return {**Group.to_engine(self), **adapter_options(self.adapter or [])}


def adapter_options(given: list[str]) -> dict[str, Any]:
    """Returns the options of adapters, where texts of --adapter are given."""
    adapters = [text for text in given if "=" in text]
    names = [text for text in given if "=" not in text]
    if len(names) > 1:
        raise ConfigError(f"--adapter {' and '.join(names)}: one of them is that of every prompt")
    if not names and len(adapters) == 1:
        names = [adapters[0].partition("=")[0]]
    options = {"adapters": adapters, "default_adapter": "".join(names)}
    return {name: value for name, value in options.items() if value}
