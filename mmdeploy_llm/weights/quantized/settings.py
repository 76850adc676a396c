"""Reads quantization_config, which config.json holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Strict, ValidationError

from mmdeploy_llm.errors import CheckpointError

MAX_GROUP = 2**31  # columns
METHOD = "quant_method"
Settings = TypeVar("Settings", bound="WeightSettings")


def _check_group(size: int) -> int:
    if size != -1 and not 0 < size <= MAX_GROUP:
        raise ValueError(f"it must be -1 (a whole row) or 1 to {MAX_GROUP} columns")
    return size


GroupSize = Annotated[int, Strict(), AfterValidator(_check_group)]
Flag = Annotated[bool, Strict()]


class WeightSettings(BaseModel):
    """The settings of a format, all that it has: others in quantization_config are refused, since
    they may say that weights are read otherwise."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class SchemeSettings(WeightSettings):
    """The settings that say how a file is read. Others are not looked at: the libraries that write
    these formats add notes of their own with each version."""

    model_config = ConfigDict(extra="ignore")


def quantization_settings(config: Any) -> Mapping[str, Any] | None:
    """Returns the quantization_config of a transformers config; None when it has none. Raises
    CheckpointError when it is no object."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        found = getattr(config, "compression_config", None)
    if found is None or isinstance(found, Mapping):
        return found
    to_dict = getattr(found, "to_dict", None)
    values: object = to_dict() if callable(to_dict) else None
    if not isinstance(values, Mapping):
        raise CheckpointError(
            f"quantization_config in config.json must be an object, got {str(found)[:80]!r}"
        )
    return values


def read_settings(kind: type[Settings], values: Mapping[str, Any]) -> Settings:
    """Validates quantization_config without quant_method. Raises CheckpointError, naming the
    field."""
    own = {name: value for name, value in values.items() if name != METHOD}
    try:
        return kind.model_validate(own)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        reason = first["msg"]
        if first["type"] == "extra_forbidden":
            reason = f"it is not known; known: {', '.join(kind.model_fields) or 'none'}"
        raise CheckpointError(
            f"quantization_config.{place[:80]} of config.json cannot be read: {reason}, got "
            f"{str(first.get('input'))[:80]!r}"
        ) from None
