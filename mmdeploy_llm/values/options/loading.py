"""LoadOptions: the options of an engine that say how its weights are loaded."""

from __future__ import annotations

from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from .adapters import AdapterOptions

CACHE_BYTES = 32 * 2**30


class LoadOptions(AdapterOptions):
    """How weights are loaded."""

    load_format: Literal["auto", "safetensors", "dummy"] = Field(
        default="auto",
        description="auto reads the checkpoint's safetensors files, or the GGUF file that is named "
        "or alone in the folder; safetensors only the former; dummy fills the weights with random "
        "numbers, for measurements of speed",
    )
    weight_cache: str | bool = Field(
        default=True,
        description="whether packed and rounded weights, config and tokenizer are kept in files, "
        "which the next start on a CPU maps; a path: the folder of these files, which only this "
        "user may write; off is False; True: ~/.cache/mmdeploy_llm/weights",
    )
    weight_cache_size: int = Field(
        default=CACHE_BYTES,
        ge=1,
        description="upper bound on the bytes of all files of weight_cache; those that were not "
        "used for longest are removed",
    )
    use_warmup: bool | None = Field(
        default=None,
        description="whether to compute one small step at start, so that the first request is not "
        "slower than the others; None: on CUDA, where much is prepared then; on a CPU the first "
        "request takes no longer than that step",
    )

    @field_validator("weight_cache", mode="before")
    @classmethod
    def _path_as_text(cls, value: Any) -> Any:
        if value == "off":
            return False
        return fspath(value) if isinstance(value, PathLike) else value

    @field_validator("weight_cache")
    @classmethod
    def _folder_has_a_name(cls, value: str | bool) -> str | bool:
        if value == "":
            raise ValueError("the path of the folder is empty; False switches the cache off")
        return value


def cache_folder(option: str | bool) -> Path | None:
    """Returns the folder that the option weight_cache names, None for False. Raises RuntimeError
    where the user has no home."""
    if isinstance(option, str):
        return Path(option).expanduser()
    return Path.home() / ".cache" / "mmdeploy_llm" / "weights" if option else None
