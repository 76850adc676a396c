"""Says which groups of columns may share a scale in a copy that is saved."""

from __future__ import annotations

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.values.options.weight_formats import MAX_GROUP, WHOLE_ROW


def stored_group(group_size: int) -> int:
    """Returns the columns of a group, more than a row has for WHOLE_ROW. Raises ConfigError for a
    size that is not saved."""
    if group_size == WHOLE_ROW:
        return MAX_GROUP
    if group_size < 8 or group_size % 8:
        raise ConfigError(
            f"group size {group_size}: give a multiple of 8, such as 32, 64 or 128, or {WHOLE_ROW} "
            "for whole rows"
        )
    return group_size
