"""WaitingQueue: requests that wait for admission, in the order in which they are served."""

from __future__ import annotations

import heapq

from .state import RequestState


class WaitingQueue:
    """A priority queue sorted by `RequestState.order`; every operation is O(log n).

    A preempted request keeps its order and so returns before all of its priority that arrived
    later. The scheduler is the only writer.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, int], RequestState]] = []
        self._members: dict[int, RequestState] = {}  # by number; the heap also holds removed ones

    def __len__(self) -> int:
        return len(self._members)

    def push(self, state: RequestState) -> None:
        """Adds a request that is not in the queue."""
        self._members[state.number] = state
        heapq.heappush(self._heap, (state.order, state))

    def peek(self) -> RequestState | None:
        """Returns the next request, or None when the queue is empty."""
        while self._heap and self._heap[0][1].number not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> RequestState:
        """Removes and returns the next request."""
        state = self.peek()
        assert state is not None, "the queue is empty"
        heapq.heappop(self._heap)
        return self._members.pop(state.number)

    def remove(self, state: RequestState) -> None:
        """Removes a waiting request from any position."""
        del self._members[state.number]

    def states(self) -> list[RequestState]:
        """Returns all waiting requests, in no particular order."""
        return list(self._members.values())
