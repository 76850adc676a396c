"""Peers: the runners of the other ranks, as one of them sees them.

Ranks that share a model must do the same, in the same order: one that goes on alone, or gives up
alone, leaves the others in an exchange for ever. What may happen on one rank only (an error, a want
of memory) is therefore told to all before anything follows from it.
"""

from __future__ import annotations

from typing import Protocol


class Peers(Protocol):
    """The ranks that compute the same as this one."""

    def raised(self, error: BaseException) -> None:
        """Returns when all ranks have raised such an error at the same place; where only some have,
        the process ends instead."""
        ...

    def agree(self, is_fine: bool) -> bool:
        """Whether it is so on all ranks, all of which ask at the same place."""
        ...


class NoPeers:
    """Of a runner that has the model alone."""

    def raised(self, error: BaseException) -> None:
        """See Peers."""

    def agree(self, is_fine: bool) -> bool:
        """See Peers."""
        return is_fine
