"""Decides what becomes of a prompt whose engine died. It is one policy for several engines in this
process, for a batch that starts its engine again, and for the engines of a cluster.

    engines that died with it   it is computed
    0, 1                        with others (a cluster: with few others, after the first)
    2                           alone, so that nothing else can be the reason
    3                           not again: its output is an error
"""

from __future__ import annotations

from typing import Literal

from mmdeploy_llm.errors import WorkerDiedError

MAX_DEATHS = 3
MAX_LOADS = 3  # deaths in a row of an engine that loads its model, after which it is given up
ENGINE_RESTARTS = 2  # how often in a row an engine is started again, unless the caller says

Again = Literal["together", "alone", "never"]


def again(num_deaths: int) -> Again:
    """Returns how a prompt is computed that was in so many engines when they died."""
    if num_deaths >= MAX_DEATHS:
        return "never"
    return "alone" if num_deaths == MAX_DEATHS - 1 else "together"


def given_up(reason: object = None) -> WorkerDiedError:
    """Returns the error of a prompt that is not computed again. reason: of the last death."""
    why = "" if reason is None else f": {reason}"
    return WorkerDiedError(
        f"the engine died {MAX_DEATHS} times while it computed this item, the last time alone{why}"
    )
