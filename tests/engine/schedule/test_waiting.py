"""The waiting queue: order, removal, return."""

import pytest

from mmdeploy_llm.engine.schedule.lifecycle import WaitingQueue
from mmdeploy_llm.engine.schedule.state import RequestState


@pytest.fixture
def make_state(kit):
    def make(number, **options):
        request = kit.make_request(f"r{number}", 3, **options)
        return RequestState.of(request, number, kit.make_config())

    return make


def numbers(queue):
    return [queue.pop().number for _ in range(len(queue))]


def test_order_is_arrival_then_number(make_state):
    queue = WaitingQueue()
    queue.push(make_state(1, arrival_time=5.0))
    queue.push(make_state(2, arrival_time=4.0))
    queue.push(make_state(3, arrival_time=4.0))
    queue.push(make_state(4, arrival_time=1.0))
    assert numbers(queue) == [4, 2, 3, 1]
    assert queue.peek() is None


def test_removed_requests_are_passed_over(make_state):
    queue, states = WaitingQueue(), [make_state(number) for number in range(4)]
    for state in states:
        queue.push(state)
    queue.remove(states[0])
    queue.remove(states[2])
    assert len(queue) == 2
    assert queue.peek() is states[1]
    assert set(queue.states()) == {states[1], states[3]}
    assert numbers(queue) == [1, 3]


def test_a_request_comes_back_before_those_that_arrived_later(make_state):
    queue, states = WaitingQueue(), [make_state(number) for number in range(3)]
    for state in states:
        queue.push(state)
    first = queue.pop()
    queue.push(first)
    assert numbers(queue) == [0, 1, 2]


def test_nobody_to_pop_is_our_mistake():
    with pytest.raises(AssertionError):
        WaitingQueue().pop()
