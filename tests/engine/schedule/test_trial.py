"""Trial: whether requests have the draft head ready, by what a token takes with it and without."""

import pytest

from mmdeploy_llm.engine.schedule.trial import MIN_TOKENS, TRIED_EVERY, Trial

WITHOUT = 1.0  # seconds of a token


def run(seconds_with, num_requests, trial=None):
    """Starts requests of 48 tokens one after the other; returns which had the head ready."""
    trial, admitted = trial or Trial(), []
    for _ in range(num_requests):
        admitted.append(trial.admits())
        for _ in range(48):
            seconds = seconds_with if admitted[-1] else WITHOUT
            trial.observe(seconds, num_requests=1, num_ready=int(admitted[-1]), num_tokens=1)
    return admitted


@pytest.mark.parametrize("seconds_with", [0.7, 1.1])
def test_requests_have_it_where_it_pays_and_a_few_are_tried_the_other_way(seconds_with):
    pays = seconds_with < WITHOUT
    first = run(seconds_with, 4)
    assert first == [True, True, False, False]  # 64 tokens each way
    later = run(seconds_with, 10 * TRIED_EVERY)[4:]
    assert later.count(pays) >= 0.96 * len(later)
    assert later.count(not pays) >= 9


def test_what_pays_later_is_found():
    trial = Trial()
    assert run(1.2, 50, trial)[-9:].count(False) >= 8
    later = run(0.5, 40 * TRIED_EVERY, trial)
    assert later[-TRIED_EVERY:].count(True) >= TRIED_EVERY - 1


def test_steps_of_both_kinds_of_requests_tell_nothing():
    trial = Trial()
    for _ in range(MIN_TOKENS):
        trial.observe(9.0, num_requests=3, num_ready=2, num_tokens=3)
        trial.observe(1.0, num_requests=2, num_ready=2, num_tokens=2)
    assert not trial.admits()  # known with it: now without
    for _ in range(MIN_TOKENS):
        trial.observe(2.0, num_requests=2, num_ready=0, num_tokens=2)
    assert trial.admits()
