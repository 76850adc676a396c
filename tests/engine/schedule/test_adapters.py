"""AdapterBudget: which adapters are in memory, least recently used ones leave, held ones stay."""

import pytest

from mmdeploy_llm.engine.schedule.adapters import AdapterBudget
from mmdeploy_llm.values.adapter_ref import AdapterRef

A, B, C, D = (AdapterRef(name=n, folder="", key=n, num_bytes=10) for n in "abcd")
LARGE = AdapterRef(name="large", folder="", key="large", num_bytes=25)


def used(budget, *refs):
    """Holds each and releases it."""
    for ref in refs:
        budget.hold("user", ref)
        budget.release("user", ref)


def keys(budget):
    """Returns what the next plan frees, and what it reads."""
    return budget.take_unload(), tuple(ref.key for ref in budget.take_load())


def test_the_least_recently_used_leaves():
    budget = AdapterBudget(max_adapters=2)
    used(budget, A, B, A)
    assert keys(budget) == ((), ("a", "b"))
    assert keys(budget) == ((), ())  # both are in memory, and told once
    used(budget, C)
    assert budget.has_unload
    assert keys(budget) == (("b",), ("c",))
    assert not budget.has_unload
    used(budget, A)
    assert keys(budget) == ((), ())
    budget.check_integrity([])


def test_held_ones_stay():
    budget = AdapterBudget(max_adapters=2)
    budget.hold("one", A)
    budget.hold("two", A)
    used(budget, B, C)
    budget.release("one", A)
    used(budget, D)
    budget.drop("a")
    budget.drop("unknown")
    assert keys(budget) == ((), ("a", "d"))  # b and c were never read
    budget.check_integrity([("two", A), ("plain", None)])
    with pytest.raises(AssertionError):
        budget.check_integrity([])
    budget.release("two", A)
    budget.drop("a")
    assert keys(budget) == (("a",), ())


def test_more_than_memory_has_wait():
    budget = AdapterBudget(max_adapters=2)
    budget.hold("one", A)
    budget.hold("two", B)
    assert budget.can_hold(A)
    assert not budget.can_hold(C)
    with pytest.raises(AssertionError, match="more adapters than memory allows"):
        budget.hold("three", C)
    budget.release("one", A)
    assert budget.can_hold(C)
    budget.hold("three", C)
    assert not budget.can_hold(A)
    assert keys(budget) == ((), ("b", "c"))


def test_bytes_are_bounded_too():
    budget = AdapterBudget(max_adapters=9, max_bytes=35)
    used(budget, A, B, C)
    assert not budget.has_unload
    keys(budget)
    budget.hold("one", LARGE)
    assert keys(budget) == (("a", "b"), ("large",))
    budget.hold("two", C)
    assert not budget.can_hold(A)
    budget.check_integrity([("one", LARGE), ("two", C)])


def test_what_a_broken_plan_freed_is_freed_again():
    budget = AdapterBudget(max_adapters=1)
    used(budget, A)
    keys(budget)
    used(budget, B)
    assert keys(budget) == (("a",), ("b",))
    budget.unload_again(["a"])
    assert keys(budget) == (("a",), ())
    used(budget, A)
    budget.unload_again(["a"])  # in memory again, by the plan that follows
    assert keys(budget) == (("b",), ("a",))


def test_one_that_comes_back_in_the_same_plan_is_read_again():
    budget = AdapterBudget(max_adapters=1)
    used(budget, A)
    keys(budget)
    budget.drop("a")  # its files may be the cause of a failure
    budget.hold("one", A)
    assert keys(budget) == (("a",), ("a",))


def test_requests_wait_for_adapters_and_a_step_has_no_more_than_fit(kit):
    loop = kit.Loop(kit.make_config(max_adapters=2, max_num_batched_tokens=64))
    for at, ref in enumerate((A, B, C, None, A)):
        loop.add(kit.make_request(f"r{at}", 5, adapter=ref, max_tokens=3))
    plan = loop.step()
    assert [new.adapter for new in plan.new] == ["a", "b"]  # in order of arrival
    assert [ref.key for ref in plan.load] == ["a", "b"]
    loop.run()
    later = [new.adapter for plan in loop.plans[1:] for new in plan.new]
    assert later == ["c", "", "a"]
    assert sum((plan.unload for plan in loop.plans), ()) == ("a", "b")
    assert set(loop.reasons.values()) == {"length"}
