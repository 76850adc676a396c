"""Examines a machine for the command `doctor`: what it offers, what an engine will use and why,
what is missing and how to install it."""

from .comparison import self_test
from .examination import examine
from .findings import Finding, State

__all__ = ["Finding", "State", "examine", "self_test"]
