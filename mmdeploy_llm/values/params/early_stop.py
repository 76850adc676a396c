"""EarlyStopParams: when to end a text that runs away."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

from pydantic import Field, model_validator

from mmdeploy_llm.values.text.display import shown

from .frozen import FrozenParams

if TYPE_CHECKING:
    from .inner_dicts import EarlyStopOptions


class EarlyStopParams(FrozenParams):
    """When to end a text that runs away: one that repeats itself, whose tokens are all nearly
    certain. FastDeploy's `early_stop_config`."""

    enable_early_stop: bool = Field(default=True, description="False: never")
    window_size: int = Field(
        default=3000, ge=1, description="number of tokens in a row that must be nearly certain"
    )
    threshold: float = Field(
        default=0.99,
        ge=0,
        lt=1,
        description="probability above which a token is nearly certain: the model's own, before "
        "temperature, penalties and other rules",
    )

    if TYPE_CHECKING:

        def __init__(self, **options: Unpack[EarlyStopOptions]) -> None: ...

    @model_validator(mode="before")
    @classmethod
    def _read_strategy(cls, values: Any) -> Any:
        """Accepts the key `strategy` with its one value at FastDeploy, which is what this does."""
        if not isinstance(values, dict) or values.get("strategy") != "repetition":
            return values
        return {name: value for name, value in values.items() if name != "strategy"}


def read_early_stop(values: Any) -> Any:
    """Replaces FastDeploy's option `enable_early_stop` by the `early_stop_config` that it means."""
    if not isinstance(values, dict) or values.get("enable_early_stop") is None:
        return values
    own = {name: value for name, value in values.items() if name != "enable_early_stop"}
    is_enabled, config = values["enable_early_stop"], own.get("early_stop_config")
    if not isinstance(is_enabled, bool):
        raise ValueError(f"enable_early_stop must be True or False, got {shown(is_enabled)}")
    return {**own, "early_stop_config": ({} if config is None else config) if is_enabled else None}
