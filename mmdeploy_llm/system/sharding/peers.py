"""Peers: the other ranks of a model under tensor parallelism, as one rank sees them.

Ranks must do the same work in the same order: one that continues or gives up alone leaves the
others waiting in an exchange for ever. What may happen on one rank only (an error, memory that runs
out) is therefore reported to all ranks before any of them acts on it.
"""

from __future__ import annotations

from typing import Protocol


class Peers(Protocol):
    """The ranks that compute the same as this one."""

    def raised(self, error: BaseException) -> None:
        """Returns once all ranks have reported an error of the same kind after the same number of
        exchanges. Where only some have, the process ends instead."""

    def agree(self, is_fine: bool) -> bool:
        """Returns whether `is_fine` is True on all ranks, all of which call this at the same
        point."""


class NoPeers:
    """The peers of a runner that has the whole model: there are no other ranks."""

    def raised(self, error: BaseException) -> None:
        """Does nothing."""

    def agree(self, is_fine: bool) -> bool:
        """Returns `is_fine`."""
        return is_fine
