"""Each rule of the scheduler by itself. The loop's executor also checks every plan."""

import pytest

from mmdeploy_llm.engine.schedule.scheduler import Scheduler
from mmdeploy_llm.request import RequestStatus
from mmdeploy_llm.values.deadline import Deadline
from mmdeploy_llm.values.plan import RequestFailure, StepResult


@pytest.fixture
def make_loop(kit):
    return lambda **config: kit.Loop(kit.make_config(**config))


def sizes(plan):
    """Returns request id -> tokens of the step, in the order of the plan."""
    return {item.request_id: item.num_tokens for item in plan.scheduled}


class TestTokenBudget:
    def test_prompts_are_split_into_chunks(self, kit, make_loop):
        loop = make_loop(max_num_batched_tokens=5)
        loop.add(kit.make_request("a", 12, max_tokens=2))
        assert [sizes(loop.step()) for _ in range(4)] == [{"a": 5}, {"a": 5}, {"a": 2}, {"a": 1}]
        assert [plan.scheduled[0].samples for plan in loop.plans] == [False, False, True, True]
        assert [plan.scheduled[0].start for plan in loop.plans] == [0, 5, 10, 12]

    def test_decode_comes_first_then_running_prompts_then_admissions(self, kit, make_loop):
        loop = make_loop(max_num_batched_tokens=10)
        loop.add(kit.make_request("a", 3))
        loop.step()
        loop.add(kit.make_request("b", 14), kit.make_request("c", 20))
        assert sizes(loop.step()) == {"a": 1, "b": 9}
        plan = loop.step()
        assert sizes(plan) == {"a": 1, "b": 5, "c": 4}
        assert [new.request_id for new in plan.new] == ["c"]

    def test_whole_prompts_wait_for_a_step_with_enough_budget(self, kit, make_loop):
        loop = make_loop(enable_chunked_prefill=False, max_num_batched_tokens=20, max_model_len=20)
        loop.add(kit.make_request("a", 12), kit.make_request("b", 10), kit.make_request("c", 2))
        assert sizes(loop.step()) == {"a": 12}, "c does not overtake b"
        assert sizes(loop.step()) == {"a": 1, "b": 10, "c": 2}

    def test_one_token_prompts_stand_among_the_decodes(self, kit, make_loop):
        loop = make_loop()
        loop.add(kit.make_request("a", 5), kit.make_request("b", 1))
        assert list(sizes(loop.step())) == ["b", "a"]


class TestAdmission:
    def test_first_come_first_served_up_to_max_num_seqs(self, kit, make_loop):
        loop = make_loop(max_num_seqs=2)
        loop.add(*(kit.make_request(name, 2, max_tokens=2) for name in "abc"))
        assert list(sizes(loop.step())) == ["a", "b"]
        assert (loop.scheduler.stats().num_running, loop.scheduler.stats().num_waiting) == (2, 1)
        loop.step()
        assert list(sizes(loop.step())) == ["c"]

    def test_blocks_are_left_for_running_requests_to_grow(self, kit, make_loop):
        loop = make_loop(num_blocks=4)
        loop.add(kit.make_request("a", 4, max_tokens=12), kit.make_request("b", 12, max_tokens=1))
        assert list(sizes(loop.step())) == ["a"], "b would take the block that a needs next"
        loop.run()
        assert loop.scheduler.stats().num_preemptions == 0

    def test_nothing_is_left_for_requests_that_hold_all_they_can_need(self, kit, make_loop):
        loop = make_loop(num_blocks=4)
        loop.add(kit.make_request("a", 4, max_tokens=1), kit.make_request("b", 12, max_tokens=1))
        assert list(sizes(loop.step())) == ["a", "b"]

    def test_new_requests_tell_the_runner_all_it_needs(self, kit, make_loop):
        loop = make_loop()
        request = loop.add(kit.make_request("a", 7, media=((1, "cat", 3),), eos=(1, 2)))
        (new,) = loop.step().new
        assert new.token_ids == tuple(request.prompt_token_ids)
        assert new.prompt_len == 7
        assert (new.params, new.media) == (request.params, request.media)
        assert new.eos_token_ids == {1, 2}

    def test_an_id_that_is_in_use_is_our_mistake(self, kit, make_loop):
        loop = make_loop()
        loop.add(kit.make_request("a", 2))
        with pytest.raises(AssertionError, match="already here"):
            loop.add(kit.make_request("a", 2))


class TestPreemption:
    def run_tight(self, kit, make_loop, **config):
        """Runs two requests of which only one can grow to its end; returns loop and requests."""
        loop = make_loop(num_blocks=6, **config)
        requests = [kit.make_request(name, 6, max_tokens=14) for name in "ab"]
        loop.add(*requests)
        return loop, requests

    def test_the_newest_goes_and_comes_back_exact(self, kit, make_loop):
        loop, (old, new) = self.run_tight(kit, make_loop)
        loop.run()
        assert old.num_preemptions == 0
        assert new.num_preemptions == loop.scheduler.stats().num_preemptions == 1
        for request in (old, new):
            assert request.output_token_ids == kit.expected_tokens(request, 14)

    def test_it_is_dropped_keeps_its_tokens_and_starts_again_with_them(self, kit, make_loop):
        loop, (_, new) = self.run_tight(kit, make_loop)
        while not new.num_preemptions:
            tokens = tuple(new.prompt_token_ids + new.output_token_ids)
            plan = loop.step()
        assert plan.drop == ("b",)
        assert plan.new == ()
        assert new.status is RequestStatus.WAITING
        assert new.block_ids == []
        while not (plan := loop.step()).new:
            assert new.num_computed_tokens == 0
        assert [(again.token_ids, again.prompt_len) for again in plan.new] == [(tokens, 6)]

    def test_it_resumes_from_what_the_prefix_cache_kept(self, kit, make_loop):
        loop, (_, new) = self.run_tight(kit, make_loop)
        loop.run()
        again = [plan for plan in loop.plans if any(n.request_id == "b" for n in plan.new)][1]
        (item,) = [item for item in again.scheduled if item.request_id == "b"]
        assert item.start > 0
        assert new.num_cached_tokens == 0, "counts the first admission only"
        assert new.inference_start_time == 1001.0

    def test_what_it_computes_again_is_shared_again(self, kit, make_loop):
        loop, (_, new) = self.run_tight(kit, make_loop)
        loop.run()
        tokens = new.prompt_token_ids + new.output_token_ids
        later = loop.add(kit.make_request("c", [*tokens, 1], max_tokens=1))
        loop.run()
        assert later.num_cached_tokens == 16, "all full blocks of 19 computed tokens"

    def test_the_latest_arrival_goes_first(self, kit, make_loop):
        loop = make_loop(num_blocks=6)
        late = kit.make_request("late", 6, max_tokens=14, arrival_time=2.0)
        early = kit.make_request("early", 6, max_tokens=14, arrival_time=1.0)
        loop.add(late)
        loop.step()
        loop.add(early)
        loop.run()
        assert (late.num_preemptions > 0, early.num_preemptions) == (True, 0)

    def test_a_preempted_request_is_served_before_those_that_waited(self, kit, make_loop):
        loop, _ = self.run_tight(kit, make_loop, max_num_seqs=2)
        loop.add(kit.make_request("c", 6, max_tokens=1))
        loop.run()
        started = [new.request_id for plan in loop.plans for new in plan.new]
        assert started == ["a", "b", "b", "c"]

    def test_a_request_that_outgrows_the_whole_pool_fails_with_the_numbers(self, kit, make_loop):
        loop = make_loop(num_blocks=4)
        loop.add(kit.make_request("a", 6, max_tokens=40), kit.make_request("b", 6, max_tokens=2))
        loop.run()
        assert loop.reasons == {"a": "error", "b": "length"}
        failure = loop.ended["a"].failure
        assert failure.code == 500
        assert "17 tokens" in failure.message
        assert "4 blocks of 4 tokens" in failure.message
        assert len(loop.tokens["a"]) == 11, "what was generated until then is delivered"
        assert loop.scheduler.stats().num_free_blocks == 4


class TestPriority:
    def test_a_smaller_priority_starts_first_and_equals_in_order(self, kit, make_loop):
        loop = make_loop(max_num_seqs=1)
        priorities = {"a": 0, "b": 1, "c": -1, "d": 0, "e": -1}
        for name, priority in priorities.items():
            loop.add(kit.make_request(name, 3, max_tokens=1, priority=priority))
        loop.run()
        assert [new.request_id for plan in loop.plans for new in plan.new] == list("ceadb")

    def test_the_least_urgent_is_preempted_and_of_equals_the_newest(self, kit, make_loop):
        loop = make_loop(num_blocks=6)
        first = loop.add(kit.make_request("first", 6, max_tokens=14, priority=1))
        second = loop.add(kit.make_request("second", 6, max_tokens=14))
        loop.run()
        assert (first.num_preemptions, second.num_preemptions) == (1, 0)
        for request in (first, second):
            assert request.output_token_ids == kit.expected_tokens(request, 14)

    @pytest.mark.parametrize("scarce", ["seats", "blocks"])
    def test_running_requests_yield_to_a_more_urgent_one(self, kit, make_loop, scarce):
        loop = make_loop(**{"seats": {"max_num_seqs": 2}, "blocks": {"num_blocks": 9}}[scarce])
        old = [kit.make_request(name, 8, max_tokens=12) for name in ("old", "new")]
        loop.add(*old)
        for _ in range(3):
            loop.step()
        same = loop.add(kit.make_request("same", 12, max_tokens=2))
        loop.step()
        assert [request.num_preemptions for request in old] == [0, 0], "equals wait"
        urgent = loop.add(kit.make_request("urgent", 12, max_tokens=2, priority=-1))
        plans = [loop.step() for _ in range(2)]  # blocks are missed in the first
        assert [new.request_id for plan in plans for new in plan.new] == ["urgent"]
        assert [request.num_preemptions for request in old] == [0, 1], "the newest yields"
        loop.run()
        for request in (*old, same, urgent):
            tokens = kit.expected_tokens(request, request.params.max_tokens)
            assert request.output_token_ids == tokens

    def test_an_urgent_prompt_comes_before_a_long_one_that_is_under_way(self, kit, make_loop):
        loop = make_loop(max_num_batched_tokens=10)
        loop.add(kit.make_request("long", 40))
        loop.step()
        loop.add(kit.make_request("same", 6), kit.make_request("urgent", 6, priority=-1))
        assert sizes(loop.step()) == {"urgent": 6, "long": 4}
        assert sizes(loop.step()) == {"urgent": 1, "long": 9}
        loop.run()

    def test_the_next_step_is_not_planned_over_an_urgent_request(self, kit):
        """plan_next continues the running requests; one that must yield ends that."""
        scheduler = Scheduler(kit.make_config(max_num_seqs=1))
        scheduler.add(kit.make_request("a", 3))
        plan = scheduler.plan(0.0)
        scheduler.add(kit.make_request("same", 3))
        following = scheduler.plan_next(plan)
        assert following is not None
        scheduler.commit(plan, StepResult(step_id=plan.step_id, sampled={"a": 1}), 0.0)
        scheduler.add(kit.make_request("urgent", 3, priority=-1))
        assert scheduler.plan_next(following) is None


class TestDeadlines:
    @pytest.fixture
    def add(self, kit):
        def add(loop, name, seconds, num_prompt=3, **options):
            deadline = Deadline(seconds=seconds, end=loop.now + seconds)
            request = kit.make_request(name, num_prompt, deadline=deadline, **options)
            return loop.add(request)

        return add

    def test_a_request_ends_where_it_is(self, kit, make_loop, add):
        """One that waits, one whose prompt is computed, and one that generates."""
        loop = make_loop(max_num_seqs=2, max_num_batched_tokens=4, num_blocks=64)
        media = [(2, "image", 8)]
        decoding = add(loop, "decoding", 5.5, max_tokens=40)
        add(loop, "prefill", 5.5, num_prompt=40, max_tokens=4)
        add(loop, "waiting", 5.5, num_prompt=12, media=media)
        other = loop.add(kit.make_request("other", 12, media=media, max_tokens=3))
        loop.run()
        assert other.output_token_ids == kit.expected_tokens(other, 3)
        messages = {
            name: update.failure.message for name, update in loop.ended.items() if update.failure
        }
        assert {loop.ended[name].failure.code for name in messages} == {408}
        begin = "the request was not finished within its timeout of 5.5 s: "
        end = "; raise timeout or leave it out"
        assert messages == {
            "decoding": f"{begin}it had generated 5 tokens{end}",
            "prefill": f"{begin}13 of its 40 prompt tokens were computed{end}",
            "waiting": f"{begin}it waited to start{end}",
        }
        assert loop.tokens["decoding"] == kit.expected_tokens(decoding, 5)
        assert loop.scheduler.stats().num_free_blocks == 64

    def test_media_of_a_late_request_stay_encoded(self, kit, make_loop, add):
        """Unlike those of a failed one, which may have caused the failure."""
        loop = make_loop()
        add(loop, "late", 1.5, num_prompt=12, media=[(2, "image", 8)], max_tokens=30)
        loop.step()
        loop.step()
        assert loop.reasons == {"late": "error"}
        loop.add(kit.make_request("next", 12, media=[(2, "image", 8)]))
        loop.run()
        assert loop.executor.num_encodes == {"image": 1}

    def test_requests_in_time_are_exact_whatever_else_ends(self, kit, make_loop, add):
        loop = make_loop(num_blocks=64)
        requests = [add(loop, f"r{i}", 2.5 + 2 * i, max_tokens=8) for i in range(12)]
        loop.run()
        late = [request for request in requests if request.finish_reason == "error"]
        assert 0 < len(late) < len(requests)
        for request in requests:
            tokens = loop.tokens[request.request_id]
            assert tokens == kit.expected_tokens(request, len(tokens))
            assert len(tokens) == 8 or request in late


class TestPrefixCache:
    def test_a_known_beginning_is_not_computed_again(self, kit, make_loop):
        loop = make_loop()
        first = loop.add(kit.make_request("a", range(100, 110)))
        loop.run()
        second = loop.add(kit.make_request("b", range(100, 112)))
        plan = loop.step()
        assert (plan.scheduled[0].start, plan.scheduled[0].num_tokens) == (8, 4)
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 8)
        assert plan.scheduled[0].new_block_ids == tuple(second.block_ids)
        loop.run()
        assert second.output_token_ids == kit.expected_tokens(second, 4)

    def test_a_request_in_progress_shares_its_blocks(self, kit, make_loop):
        loop = make_loop()
        first = loop.add(kit.make_request("a", range(100, 110), max_tokens=20))
        loop.step()
        second = loop.add(kit.make_request("b", range(100, 110), max_tokens=20))
        loop.step()
        assert second.block_ids[:2] == first.block_ids[:2]
        assert second.block_ids[2] != first.block_ids[2]

    def test_prompt_logprobs_need_the_whole_prompt(self, kit, make_loop):
        loop = make_loop()
        loop.add(kit.make_request("a", range(100, 110)))
        loop.run()
        again = loop.add(kit.make_request("b", range(100, 110), prompt_logprobs=1))
        loop.run()
        assert again.num_cached_tokens == 0
        assert loop.prompt_logprobs["b"] == list(range(10))

    def test_a_failed_step_is_not_shared(self, kit, make_loop):
        loop = make_loop()
        loop.add(kit.make_request("a", range(100, 110)))
        loop.step(failing={"a"})
        second = loop.add(kit.make_request("b", range(100, 110)))
        loop.run()
        assert second.num_cached_tokens == 0

    def test_off(self, kit, make_loop):
        loop = make_loop(enable_prefix_caching=False)
        loop.add(kit.make_request("a", range(100, 110)))
        loop.run()
        second = loop.add(kit.make_request("b", range(100, 110)))
        loop.run()
        assert second.num_cached_tokens == 0


class TestMedia:
    def test_a_hit_that_covers_the_item_spares_the_encoder(self, kit, make_loop):
        loop = make_loop(encoder_cache_tokens=6)
        media = ((1, "cat", 6),)
        prompt = list(range(100, 112))
        loop.add(kit.make_request("a", prompt, media=media))
        loop.run()
        loop.add(kit.make_request("dog", 12, media=((1, "dog", 6),)))  # evicts the cat
        loop.run()
        again = loop.add(kit.make_request("b", prompt, media=media))
        loop.run()
        assert again.num_cached_tokens == 8
        assert loop.executor.num_encodes == {"cat": 1, "dog": 1}

    def test_a_hit_that_ends_within_the_item_needs_it_encoded(self, kit, make_loop):
        loop = make_loop(encoder_cache_tokens=6)
        media = ((1, "cat", 6),)
        loop.add(kit.make_request("a", [100] + [0] * 6 + [101], media=media))
        loop.run()
        loop.add(kit.make_request("dog", 12, media=((1, "dog", 6),)))
        loop.run()
        again = loop.add(kit.make_request("b", [100] + [0] * 6 + [55], media=media))
        loop.run()
        assert again.num_cached_tokens == 4
        assert loop.executor.num_encodes["cat"] == 2
        assert again.output_token_ids == kit.expected_tokens(again, 4)

    def test_who_waits_for_the_encoder_is_not_overtaken_at_it(self, kit, make_loop):
        """`small` would fit beside `first` and delay `big`; many such requests would starve it."""
        loop = make_loop(encoder_cache_tokens=20, max_num_batched_tokens=8)
        loop.add(
            kit.make_request("first", 14, media=((0, "f", 12),)),
            kit.make_request("big", 20, media=((1, "b", 14),)),
            kit.make_request("small", 20, media=((0, "s", 8),)),
        )
        loop.step()
        assert sizes(loop.step()) == {"first": 6, "big": 1}
        loop.run()
        assert [item.key for plan in loop.plans for item in plan.encode] == ["f", "b", "s"]

    def test_nor_is_one_that_has_started_already(self, kit, make_loop):
        loop = make_loop(encoder_cache_tokens=9, max_num_batched_tokens=8)
        loop.add(
            kit.make_request("first", 12, media=((0, "f1", 5), (5, "f2", 5))),
            kit.make_request("big", 12, media=((1, "b", 7),)),
            kit.make_request("small", 12, media=((0, "s", 3),)),
        )
        assert sizes(loop.step()) == {"first": 5, "big": 1}
        assert sizes(loop.step()) == {"first": 7}
        loop.run()
        assert [item.key for plan in loop.plans for item in plan.encode] == ["f1", "f2", "b", "s"]

    def test_a_last_token_that_is_an_item_of_its_own_is_encoded(self, kit, make_loop):
        loop = make_loop(max_num_batched_tokens=4)
        request = loop.add(kit.make_request("a", 5, media=((4, "dot", 1),)))
        loop.run()
        assert request.output_token_ids == kit.expected_tokens(request, 4)
        assert [item.key for item in loop.plans[1].encode] == ["dot"]

    def test_two_halves_of_the_cache_do_not_block_each_other(self, kit, make_loop):
        loop = make_loop(encoder_cache_tokens=10, max_num_batched_tokens=4)
        for name in "abc":
            media = ((1, f"{name}1", 6), (8, f"{name}2", 6), (15, f"{name}3", 10))
            loop.add(kit.make_request(name, 30, media=media))
        loop.run()
        assert set(loop.reasons.values()) == {"length"}

    def test_an_atomic_item_waits_for_a_step_with_budget_for_all_of_it(self, kit, make_loop):
        loop = make_loop(atomic_media=True, max_num_batched_tokens=8)
        loop.add(kit.make_request("a", 2, max_tokens=3))
        loop.step()
        loop.add(kit.make_request("b", 12, media=((3, "cat", 8),), max_tokens=1))
        loop.add(kit.make_request("c", 2, max_tokens=1))
        assert sizes(loop.step()) == {"a": 1, "b": 3, "c": 2}
        loop.add(kit.make_request("d", 2, max_tokens=1))
        steps = [sizes(loop.step()) for _ in range(3)]
        assert steps == [{"a": 1}, {"b": 8}, {"b": 1, "d": 2}], "7 tokens are too few for 8"

    @pytest.mark.parametrize(
        ("changes", "start"),
        [
            ({}, 8),
            ({"num_state_rows": 20, "max_idle_states": 8}, 0),
            ({"window": 4, "num_window_blocks": 32}, 8),
            ({"window": 2, "num_window_blocks": 32}, 0),
        ],
    )
    def test_a_hit_within_an_atomic_item_needs_its_begin(self, kit, make_loop, changes, start):
        """Its last tokens attend to its first ones, whose keys a window may have left, and no state
        is kept within it."""
        loop = make_loop(atomic_media=True, **changes)
        media = ((2, "cat", 4), (6, "dog", 6))
        loop.add(kit.make_request("a", [*range(100, 112), 1], media=media))
        loop.run()
        again = loop.add(kit.make_request("b", [*range(100, 112)], media=media))
        loop.run()
        assert again.num_cached_tokens == start, "borders 4 and 8 lie within the items"
        longer = loop.add(kit.make_request("c", [*range(100, 112), 2], media=media))
        loop.run()
        assert longer.num_cached_tokens == 12


class TestEnds:
    def make_committed(self, kit, tokens, **options):
        """Commits `tokens` to a request one by one; returns the updates."""
        scheduler = Scheduler(kit.make_config(max_model_len=10))
        scheduler.add(kit.make_request("a", 3, **{"max_tokens": 20, **options}))
        updates = []
        for token in tokens:
            plan = scheduler.plan(5.0)
            result = StepResult(step_id=plan.step_id, sampled={"a": token})
            updates.extend(scheduler.commit(plan, result, 7.0))
        return updates

    @pytest.mark.parametrize(
        ("options", "tokens", "reason"),
        [
            ({"eos": (9,)}, [1, 9], "stop"),
            ({"eos": (9,), "ignore_eos": True}, [1, 9], None),
            ({"stop_token_ids": (9,)}, [1, 9], "stop"),
            ({"stop_token_ids": (9,), "ignore_eos": True}, [1, 9], "stop"),
            ({"eos": (9,), "min_tokens": 3}, [1, 9], None),
            ({"eos": (9,), "min_tokens": 3}, [1, 9, 9], "stop"),
            ({"stop_token_ids": (9,), "min_tokens": 3}, [9, 9], None),
            ({"max_tokens": 2}, [1, 2], "length"),
            ({"max_tokens": 2, "eos": (9,)}, [1, 9], "stop"),
            ({"max_tokens": None}, [1] * 7, "length"),
            ({}, [1] * 6, None),
            ({}, [1] * 7, "length"),
        ],
    )
    def test_reasons(self, kit, options, tokens, reason):
        updates = self.make_committed(kit, tokens, **options)
        assert [update.new_token_ids for update in updates] == [(token,) for token in tokens]
        assert [update.finish_reason for update in updates] == [None] * (len(tokens) - 1) + [reason]
        request = updates[0].request
        assert request.output_token_ids == tokens
        assert (request.status is RequestStatus.FINISHED) == (reason is not None)

    def test_times(self, kit, make_loop):
        loop = make_loop(max_num_batched_tokens=4)
        request = loop.add(kit.make_request("a", 6, max_tokens=3))
        loop.run()
        times = (request.inference_start_time, request.first_token_time, request.last_token_time)
        assert times == (1001.0, 1002.0, 1004.0)

    def test_delivery_ends_a_request(self, kit):
        loop = kit.Loop(kit.make_config(), stops=lambda request, tokens: len(tokens) == 2)
        request = loop.add(kit.make_request("a", 6, max_tokens=9))
        loop.run()
        assert (request.finish_reason, len(request.output_token_ids)) == ("stop", 2)
        assert loop.step().drop == ("a",)
        assert loop.scheduler.stats().num_free_blocks == 32

    def test_a_request_that_can_never_run_is_reported_by_the_next_step(self, kit, make_loop):
        loop = make_loop()
        request = loop.add(kit.make_request("a", 100), kit.make_request("b", 3, max_tokens=1))
        assert loop.scheduler.has_work
        loop.step()
        assert loop.reasons == {"a": "error", "b": "length"}
        assert loop.ended["a"].failure.code == 400
        assert request.status is RequestStatus.FINISHED
        assert not loop.scheduler.has_work

    def test_an_error_ends_one_request_only(self, kit, make_loop):
        loop = make_loop()
        loop.add(*(kit.make_request(name, 5) for name in "abc"))
        loop.step()
        plan = loop.step(failing={"b"})
        assert list(sizes(plan)) == ["a", "b", "c"]
        assert loop.reasons == {"b": "error"}
        assert loop.ended["b"].failure == RequestFailure(code=500, message="injected")
        assert loop.step().drop == ("b",)
        loop.run()
        assert loop.reasons == {"a": "length", "b": "error", "c": "length"}

    def test_media_of_a_failed_request_are_encoded_again(self, kit, make_loop):
        loop = make_loop()
        loop.add(kit.make_request("a", 9, media=((1, "cat", 5),)))
        loop.step(failing={"a"})
        loop.add(kit.make_request("b", 9, media=((1, "cat", 5),)))
        plan = loop.step()
        assert plan.forget == ("cat",)
        assert [item.key for item in plan.encode] == ["cat"]

    @pytest.mark.parametrize("breaks", ["before", "after"])
    def test_a_broken_step_ends_its_requests_and_no_others(self, kit, make_loop, breaks):
        loop = make_loop(max_num_seqs=2)
        gone = loop.add(kit.make_request("gone", 9, media=((1, "cow", 5),), max_tokens=1))
        loop.run()
        loop.add(*(kit.make_request(name, 9, media=((1, "cat", 5),)) for name in "abc"))
        plan = loop.step(breaks=breaks)
        assert plan.drop == ("gone",)
        assert gone.status is RequestStatus.FINISHED
        assert loop.reasons == {"gone": "length", "a": "error", "b": "error"}
        after = loop.step()
        assert set(after.drop) == {"gone", "a", "b"}
        assert after.forget == ("cat",)
        loop.run()
        assert loop.reasons["c"] == "length"

    def test_a_result_of_another_step_is_our_mistake(self, kit):
        scheduler = Scheduler(kit.make_config())
        plan = scheduler.plan(1.0)
        with pytest.raises(AssertionError):
            scheduler.commit(plan, StepResult(step_id=plan.step_id + 1), 1.0)


class TestAbort:
    def test_running_and_waiting_requests_end_and_unknown_ids_do_nothing(self, kit, make_loop):
        loop = make_loop(max_num_seqs=1)
        loop.add(kit.make_request("a", 5), kit.make_request("b", 5))
        loop.step()
        plan = loop.step(aborts=["a", "b", "nobody", "a"])
        assert (plan.drop, plan.scheduled) == (("a",), ())
        assert loop.reasons == {"a": "abort", "b": "abort"}
        assert loop.ended["a"].failure.code == 499
        assert loop.scheduler.stats().num_free_blocks == 32
        assert not loop.scheduler.has_work

    def test_its_blocks_go_to_the_others_at_once(self, kit, make_loop):
        loop = make_loop(max_num_seqs=1)
        loop.add(kit.make_request("a", 5), kit.make_request("b", 5))
        loop.step()
        assert list(sizes(loop.step(aborts=["a"]))) == ["b"]

    def test_the_id_may_be_used_again(self, kit, make_loop):
        loop = make_loop()
        loop.add(kit.make_request("a", 5))
        loop.step()
        loop.scheduler.abort(["a"])
        loop.add(kit.make_request("a", 6, max_tokens=1))
        plan = loop.step()
        assert plan.drop == ("a",)
        assert [new.request_id for new in plan.new] == ["a"]


def test_a_sequence_that_grows_long_without_a_block_left_fails_alone(kit):
    """Its 17 tokens would never be admitted again: the KV cache holds 16."""
    loop = kit.Loop(kit.make_config(num_blocks=4, long_after=16))
    loop.add(kit.make_request("a", 10, max_tokens=20), kit.make_request("b", 5, max_tokens=3))
    loop.run()
    assert loop.reasons == {"a": "error", "b": "length"}
    assert "holds the whole KV cache of 4 blocks of 4 tokens" in loop.ended["a"].failure.message
    assert len(loop.tokens["a"]) == 7
