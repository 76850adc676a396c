"""Models with states: rows are owned, kept and found again, and a prefix hit needs a state."""

import pytest

from mmdeploy_llm.engine.schedule.scheduler import Scheduler
from mmdeploy_llm.engine.schedule.states import StateRows
from mmdeploy_llm.values.plan import StepResult

SYSTEM = 200  # tokens of the prompt that all requests share
CAPTION = {
    "max_num_batched_tokens": 512,
    "max_model_len": 512,
    "num_blocks": 64,
    "block_size": 16,
    "encoder_cache_tokens": 256,
}
WITH_STATES = {"num_state_rows": 2 + 2 * 4 + 8, "max_idle_states": 8}


def captions(kit, count):
    """Requests with one system prompt, an image each and a question."""
    system = list(range(1000, 1000 + SYSTEM))
    return [
        kit.make_request(
            f"r{number}",
            [*system, *[0] * 40, 7, 8, 9],
            media=[(SYSTEM, f"image-{number}", 40)],
            max_tokens=2,
            arrival_time=float(number),
        )
        for number in range(count)
    ]


@pytest.mark.one_is_quick
@pytest.mark.parametrize("states", [{}, WITH_STATES])
def test_captions_reuse_the_system_prompt(kit, states):
    """99 of 100 do, as on a model without states."""
    loop = kit.Loop(kit.make_config(**CAPTION, **states))
    first, *others = captions(kit, 100)
    loop.add(first)
    loop.run()
    for request in others:
        loop.add(request)
    loop.run()
    assert first.num_cached_tokens == 0
    assert [request.num_cached_tokens for request in others] == [192] * 99
    for request in (first, *others):
        assert loop.tokens[request.request_id] == kit.expected_tokens(request, 2)


def test_all_at_once_reuse_it_but_the_first_ones(kit):
    """Those that are admitted before the first state is kept compute the system prompt."""
    config = kit.make_config(**{**CAPTION, "max_num_batched_tokens": 243}, **WITH_STATES)
    loop = kit.Loop(config)
    requests = captions(kit, 100)
    for request in requests:
        loop.add(request)
    loop.run()
    assert sum(request.num_cached_tokens == 192 for request in requests) >= 97


def test_shared_text_is_kept_where_it_ends(kit):
    """The second request finds blocks without a state, and has one kept for the third."""
    loop = kit.Loop(kit.make_config(**CAPTION, **WITH_STATES))
    shared = list(range(500, 580))
    made = []
    for number in range(3):
        own = range(2000 + 100 * number, 2000 + 100 * number + 120)
        made.append(kit.make_request(f"r{number}", [*shared, *own], max_tokens=2))
        loop.add(made[-1])
        loop.run()
    assert [request.num_cached_tokens for request in made] == [0, 0, 80]
    for request in made:
        assert loop.tokens[request.request_id] == kit.expected_tokens(request, 2)


def test_the_same_prompt_again_computes_its_last_block(kit):
    loop = kit.Loop(kit.make_config(**CAPTION, **WITH_STATES))
    made = [kit.make_request(f"r{number}", range(300, 400), max_tokens=2) for number in range(2)]
    for request in made:
        loop.add(request)
        loop.run()
    assert made[1].num_cached_tokens == 96


def test_running_ahead_passes_rows_on(kit):
    scheduler = Scheduler(kit.make_config(**WITH_STATES))
    scheduler.add(kit.make_request("a", 3, max_tokens=8))
    first = scheduler.plan(0.0)
    scheduler.commit(first, StepResult(step_id=first.step_id, sampled={"a": 5}), 0.0)
    plan = scheduler.plan(0.0)
    following = scheduler.plan_next(plan)
    (one,), (two,) = plan.scheduled, following.scheduled
    assert one.state_rows[0] == first.scheduled[0].state_rows[1]
    assert two.state_rows[0] == one.state_rows[1]
    assert len({*one.state_rows, two.state_rows[1]}) == 3
    scheduler.commit(plan, StepResult(step_id=plan.step_id, sampled={"a": 5}), 0.0)
    scheduler.check_integrity()
    scheduler.abort(["a"])
    scheduler.check_integrity()


def test_no_step_runs_ahead_without_a_free_row(kit):
    config = kit.make_config(max_num_seqs=1, num_state_rows=4)
    scheduler = Scheduler(config)
    scheduler.add(kit.make_request("a", 3, max_tokens=8))
    first = scheduler.plan(0.0)
    scheduler.commit(first, StepResult(step_id=first.step_id, sampled={"a": 5}), 0.0)
    plan = scheduler.plan(0.0)
    assert scheduler.plan_next(plan) is None
    scheduler.commit(plan, StepResult(step_id=plan.step_id, sampled={"a": 5}), 0.0)
    scheduler.check_integrity()


class TestRows:
    @pytest.fixture
    def rows(self):
        return StateRows(num_rows=6, max_idle=2, block_size=4)

    def test_a_kept_row_outlives_its_request_until_it_is_the_oldest(self, rows):
        held = [rows.allocate() for _ in range(3)]
        for row, key in zip(held, (b"a", b"b", b"c"), strict=True):
            rows.keep(row, key)
            rows.release(row)
        assert [rows.find(key) for key in (b"a", b"b", b"c")] == [None, held[1], held[2]]
        assert rows.num_free == 4
        rows.check_integrity([])

    def test_a_shared_row_is_not_evicted(self, rows):
        row = rows.allocate()
        rows.keep(row, b"a")
        rows.share(row)
        rows.release(row)
        others = [rows.allocate() for _ in range(3)]
        assert rows.num_free == 0
        assert rows.find(b"a") == row
        rows.check_integrity([row, *others])

    def test_the_same_content_is_kept_once(self, rows):
        one, two = rows.allocate(), rows.allocate()
        rows.keep(one, b"a")
        rows.keep(two, b"a")
        rows.release(two)
        assert rows.find(b"a") == one
        rows.check_integrity([one])
