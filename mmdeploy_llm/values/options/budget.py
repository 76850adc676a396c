"""TokenBudget: the most tokens of a media item, as an option of an engine, a prompt or a preset."""

from __future__ import annotations

from typing import Literal, TypeGuard

# A number, what the family's authors use, or what the checkpoint allows.
TokenBudget = int | Literal["auto", "full"]
A_BUDGET = '"auto", "full" or a whole number above 0'


def is_budget(value: object) -> TypeGuard[TokenBudget]:
    """Whether a value is a budget."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return is_count or value in ("auto", "full")
