"""Places: where the states of rows lie that steps of one token change in place.

    step                row    place of its matrix
    prompt              5      3
    first token    5 -> 6      4: row 5 may be kept for other sequences, or read by several
    next tokens    6 -> 7      4
                   7 -> 6      4

A row that a step of one token has written is read by the next step of its sequence only. So that
step may change its matrix in place; should the step be computed again, the layer sees what it has
changed already.
"""

from __future__ import annotations

ZERO, PADDING = 0, 1  # rows that stay at their places, see engine.schedule.states


class Places:
    """The place of each row's matrix, of as many places as rows. The runner is its only user."""

    def __init__(self, num_rows: int) -> None:
        self._free = list(range(num_rows - 1, PADDING, -1))  # a stack: low ones first
        self._place_of = {ZERO: ZERO, PADDING: PADDING}
        self._num_users = [0] * num_rows  # rows at a place
        self._is_own = [False] * num_rows  # whether only the next step of a sequence reads a row

    def move(self, read: int, write: int, num_tokens: int) -> tuple[int, int]:
        """Returns where a step of a sequence finds its matrix and where it writes the next. What
        row `write` had before is forgotten. May be called again for a step that failed."""
        source = self._place_of.get(read, ZERO)
        if write == PADDING:
            return source, PADDING
        self._leave(write)
        is_in_place = num_tokens == 1 and self._is_own[read]
        target = source if is_in_place else self._free.pop()
        self._place_of[write] = target
        self._num_users[target] += 1
        self._is_own[write] = num_tokens == 1
        return source, target

    def _leave(self, row: int) -> None:
        place = self._place_of.pop(row, None)
        if place is None:
            return
        self._num_users[place] -= 1
        if not self._num_users[place]:
            self._free.append(place)
