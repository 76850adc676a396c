"""plan_next: the step after one whose result is not known yet, and when there is none."""

import pytest

from mmdeploy_llm.engine.schedule.scheduler import Scheduler
from mmdeploy_llm.values.plan import RequestFailure, StepResult

EOS = 9


@pytest.fixture
def make(kit):
    def scheduler(*requests, num_blocks=16, **config):
        made = Scheduler(
            kit.make_config(
                max_num_batched_tokens=8, max_model_len=32, num_blocks=num_blocks, **config
            )
        )
        for one in requests:
            made.add(one)
        return made

    return scheduler


@pytest.fixture
def request_of(kit):
    def request(name, num_prompt=3, max_tokens=10):
        arrival = float(ord(name))
        return kit.make_request(
            name, num_prompt, max_tokens=max_tokens, eos=(EOS,), arrival_time=arrival
        )

    return request


def commit(scheduler, plan, token=5, **tokens):
    sampled = {item.request_id: token for item in plan.scheduled if item.samples} | tokens
    return scheduler.commit(plan, StepResult(step_id=plan.step_id, sampled=sampled), 0.0)


def items(plan):
    return [(one.request_id, one.start, one.num_tokens, len(one.new_block_ids)) for one in plan]


def test_every_request_decodes_on_in_the_same_order(make, request_of):
    scheduler = make(request_of("a"), request_of("b", 4))
    plan = scheduler.plan(0.0)
    following = scheduler.plan_next(plan)
    assert following.step_id == plan.step_id + 1
    assert items(following.scheduled) == [("a", 3, 1, 0), ("b", 4, 1, 1)]  # b's block is full
    commit(scheduler, plan)
    scheduler.check_integrity()
    third = scheduler.plan_next(following)
    assert items(third.scheduled) == [("a", 4, 1, 1), ("b", 5, 1, 0)]
    commit(scheduler, following)
    commit(scheduler, third)
    scheduler.check_integrity()
    # A plan of the usual kind follows as if plan_next had not been called.
    assert items(scheduler.plan(0.0).scheduled) == [("a", 5, 1, 0), ("b", 6, 1, 0)]


def test_a_request_that_the_first_step_ends_is_passed_over_in_the_next(make, request_of):
    scheduler = make(request_of("a"), request_of("b", 4))
    plan = scheduler.plan(0.0)
    following = scheduler.plan_next(plan)
    updates = commit(scheduler, plan, b=EOS)
    assert [update.finish_reason for update in updates] == [None, "stop"]
    scheduler.check_integrity()
    assert scheduler.plan_next(following) is None  # a request ended
    updates = commit(scheduler, following)
    assert [update.request.request_id for update in updates] == ["a"]
    assert scheduler.plan(0.0).drop == ("b",)


def test_a_failed_step_ends_the_requests_of_the_following_one_too(make, request_of):
    scheduler = make(request_of("a"))
    plan = scheduler.plan(0.0)
    following = scheduler.plan_next(plan)
    failure = RequestFailure(code=500, message="gone")
    assert len(scheduler.fail(plan, failure)) == 1
    assert commit(scheduler, following) == ()
    assert not scheduler.has_work


def test_none_before_the_last_token(make, request_of):
    scheduler = make(request_of("a", max_tokens=3))
    plan = scheduler.plan(0.0)
    following = scheduler.plan_next(plan)
    commit(scheduler, plan)
    third = scheduler.plan_next(following)
    commit(scheduler, following)
    assert scheduler.plan_next(third) is None
    assert commit(scheduler, third)[0].finish_reason == "length"


def test_none_while_a_prompt_is_unfinished(make, request_of):
    scheduler = make(request_of("a", 12))
    assert scheduler.plan_next(scheduler.plan(0.0)) is None


def test_none_when_somebody_could_start(make, request_of):
    scheduler = make(request_of("a"))
    plan = scheduler.plan(0.0)
    scheduler.add(request_of("b"))
    assert scheduler.plan_next(plan) is None


def test_those_who_must_wait_do_not_stop_it(make, request_of):
    full = make(request_of("a"), request_of("b"), max_num_seqs=1)
    assert full.plan_next(full.plan(0.0)) is not None
    # b waits for blocks: a may grow to four of the five.
    short = make(request_of("a", 4, 12), request_of("b", 16), num_blocks=5)
    plan = short.plan(0.0)
    assert [one.request_id for one in plan.scheduled] == ["a"]
    assert short.plan_next(plan) is not None


def test_none_without_a_block(make, request_of):
    scheduler = make(request_of("a", 4), num_blocks=2)
    plan = scheduler.plan(0.0)
    for _ in range(4):
        following = scheduler.plan_next(plan)
        commit(scheduler, plan)
        plan = following
    assert scheduler.stats().num_free_blocks == 0
    assert scheduler.plan_next(plan) is None  # there is no slot for the ninth token


def test_none_after_an_abort(make, request_of):
    scheduler = make(request_of("a"), request_of("b"))
    plan = scheduler.plan(0.0)
    following = scheduler.plan_next(plan)
    commit(scheduler, plan)
    scheduler.abort(["a"])
    assert scheduler.plan_next(following) is None
    assert [update.request.request_id for update in commit(scheduler, following)] == ["b"]


def test_none_after_a_sequence_has_grown_long(make, request_of):
    """The next plan computes all its tokens again."""
    scheduler = make(request_of("a", 3), request_of("b", 2), long_after=4)
    plan = scheduler.plan(0.0)
    following = scheduler.plan_next(plan)  # computes the fourth token of a
    commit(scheduler, plan)
    assert scheduler.plan_next(following) is None
    commit(scheduler, following)
    scheduler.check_integrity()
    again = scheduler.plan(0.0)
    assert again.drop == ("a",)
    assert [len(new.token_ids) for new in again.new] == [5]
    assert items(again.scheduled) == [("b", 3, 1, 0), ("a", 0, 5, 2)]
