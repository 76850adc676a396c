"""Reads adapter_config.json of a PEFT folder."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool

from mmdeploy_llm.guarding.folder_files import read_object, validated

CONFIG = "adapter_config.json"

Rank = Annotated[int, Field(ge=1, strict=True)]
Alpha = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class LoraSettings(BaseModel):
    """The keys of adapter_config.json that inference needs."""

    model_config = ConfigDict(extra="allow", frozen=True)

    r: Rank
    lora_alpha: Alpha
    use_rslora: StrictBool = False

    def scale(self) -> float:
        """Returns the factor of the low-rank products."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


def read_settings(folder: Path) -> LoraSettings:
    """Returns the settings of the adapter in `folder`. Raises CheckpointError."""
    values: dict[str, Any] = read_object(folder / CONFIG)
    return validated(LoraSettings, CONFIG, values)
