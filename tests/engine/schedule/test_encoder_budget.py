"""Encoder budget: what is encoded once, what is kept, evicted and forgotten."""

import pytest

from mmdeploy_llm.engine.schedule.encoder_budget import EncoderBudget


@pytest.fixture
def budget():
    return EncoderBudget(capacity=10, step_capacity=8)


@pytest.fixture
def media(kit):
    return lambda *names: [kit.make_media(name, int(name[1:])) for name in names]


def keys(items):
    return [item.key for item in items]


def test_an_item_is_encoded_once_for_all_who_hold_it(budget, media):
    budget.start_step()
    budget.hold("r1", media("a4", "a4"))
    budget.hold("r2", media("a4"))
    assert keys(budget.take_encode()) == ["a4"]
    budget.start_step()
    budget.hold("r3", media("a4"))
    assert budget.take_encode() == ()
    assert budget.num_held_tokens == budget.num_cached_tokens == 4
    budget.check_integrity({"r1": ["a4"], "r2": [], "r3": []})


def test_items_that_are_needed_at_once_count_as_one(budget, media):
    budget.start_step()
    assert budget.num_holdable("r1", media("a5", "b5")) == 1, "a step encodes 8 tokens"
    assert budget.num_holdable("r1", media("a5", "b5"), is_whole=True) == 2
    budget.hold("r2", media("c3"))
    assert budget.num_holdable("r1", media("a3", "b3"), is_whole=True) == 1, "others come first"


def test_what_another_request_holds_takes_no_room(budget, media):
    budget.start_step()
    budget.hold("r1", media("a6"))
    budget.start_step()
    assert budget.num_holdable("r2", media("a6", "b4")) == 2


def test_a_released_item_is_kept_until_its_tokens_are_needed(budget, media):
    budget.start_step()
    budget.hold("r1", media("a4"))
    budget.keep_only("r1")
    assert budget.take_forget() == ()
    budget.start_step()
    budget.hold("r2", media("b4"))
    assert budget.take_forget() == ()
    budget.start_step()
    budget.hold("r3", media("c4"))
    assert budget.take_forget() == ("a4",)
    assert budget.take_forget() == ()
    budget.check_integrity({"r2": ["b4"], "r3": ["c4"]})


def test_the_least_recently_used_item_goes_first(budget, media):
    for name in ("a3", "b3", "c3", "a3"):
        budget.start_step()
        budget.hold("r", media(name))
        budget.keep_only("r")
    budget.start_step()
    budget.hold("r", media("d6"))
    assert budget.take_forget() == ("b3", "c3")


def test_held_items_are_never_evicted(budget, media):
    budget.start_step()
    budget.hold("r1", media("a4", "b4"))
    assert budget.num_holdable("r2", media("c4")) == 0
    budget.start_step()
    assert budget.num_holdable("r2", media("c2", "d2")) == 1
    with pytest.raises(AssertionError):
        budget.hold("r2", media("c4"))


def test_cached_items_of_the_same_request_are_not_evicted_for_each_other(budget, media):
    budget.start_step()
    budget.hold("r1", media("a4"))
    budget.keep_only("r1")
    budget.start_step()
    budget.hold("r1", media("b5"))
    budget.keep_only("r1")
    budget.start_step()
    budget.hold("r2", media("c6", "a4"))
    assert keys(budget.take_encode()) == ["c6"]
    assert budget.take_forget() == ("b5",)


def test_a_step_encodes_up_to_its_budget_or_one_large_item(media):
    budget = EncoderBudget(capacity=40, step_capacity=8)
    budget.start_step()
    assert budget.num_holdable("r", media("a5", "b3", "c1")) == 2
    assert budget.num_holdable("r", media("a20", "b1")) == 1
    budget.hold("r", media("a5"))
    assert budget.num_holdable("q", media("b4")) == 0
    budget.start_step()
    assert budget.num_holdable("q", media("b4")) == 1


def test_a_closed_step_takes_no_new_items_but_goes_on_with_those_held(budget, media):
    budget.start_step()
    budget.hold("r1", media("a2"))
    budget.start_step()
    budget.close_step()
    assert budget.num_holdable("r1", media("a2", "b2")) == 1
    assert budget.num_holdable("r2", media("a2")) == 0
    budget.start_step()
    assert budget.num_holdable("r2", media("a2")) == 1


def test_keep_only_keeps_the_item_that_is_split(budget, media):
    budget.start_step()
    budget.hold("r1", media("a2", "b3"))
    budget.keep_only("r1", "b3")
    assert (budget.num_held_tokens, budget.num_cached_tokens) == (3, 5)


def test_a_failed_request_takes_its_own_items_with_it(budget, media):
    budget.start_step()
    budget.hold("r1", media("a2", "b3"))
    budget.hold("r2", media("b3"))
    budget.take_encode()
    budget.discard("r1")
    assert budget.take_forget() == ("a2",)
    budget.start_step()
    assert budget.num_cached_tokens == 3
    budget.check_integrity({"r2": ["b3"]})


def test_forgetting_again_leaves_cached_items_alone(budget, media):
    budget.start_step()
    budget.hold("r", media("a6"))
    budget.forget_again(["a6", "gone"])
    assert budget.take_forget() == ("gone",)


@pytest.mark.parametrize("needed", [{}, {"r": ["b6"]}, {"r": [], "q": ["a6"]}])
def test_integrity_check_finds_holders_that_are_gone_and_items_that_are_not_held(
    budget, media, needed
):
    budget.start_step()
    budget.hold("r", media("a6"))
    with pytest.raises(AssertionError):
        budget.check_integrity(needed)
