"""Deadline: what it accepts, what is left, how it travels."""

import math
import pickle
import time

import pytest

from mmdeploy_llm.errors import RequestError, RequestTimeoutError
from mmdeploy_llm.values.deadline import Deadline, earlier


@pytest.mark.parametrize(
    "timeout",
    [0, -1, math.inf, math.nan, True, "5", None, [1], 1e10, 1e308, 2**63, 10**400],
)
def test_wrong_timeouts_are_the_requests_error(timeout):
    with pytest.raises(RequestError, match="timeout must be a number of seconds above 0 and at"):
        Deadline.after(timeout)


def test_a_number_that_python_does_not_write_is_refused_as_well():
    with pytest.raises(RequestError, match="got a value of type int that cannot be shown"):
        Deadline.after(10**5000)


def test_it_ends_after_its_seconds(clock):
    deadline = Deadline.after(0.5)
    clock.pass_by(0.49)
    deadline.check("it waited")
    assert 0 < deadline.left <= 0.0101
    clock.pass_by(0.02)
    message = "not finished within its timeout of 0.5 s: it waited; raise timeout or leave it out"
    with pytest.raises(RequestTimeoutError, match=message) as caught:
        deadline.check("it waited")
    assert caught.value.code == 408


def test_another_process_gets_what_is_left():
    """Its clock may have another zero."""
    deadline = Deadline(seconds=9.0, end=time.monotonic() + 5.0)
    copy = pickle.loads(pickle.dumps(deadline))
    assert copy.seconds == 9.0
    assert copy.end == pytest.approx(deadline.end, abs=0.1)


def test_the_earlier_of_two_counts():
    soon, late = Deadline.after(1), Deadline.after(9)
    assert earlier(soon, late) is earlier(late, soon) is soon
    assert earlier(None, late) is earlier(late, None) is late
    assert earlier(None, None) is None
