"""Checks of observers: how long their hooks hold the engine, on records of every kind, and what is
left when the engine stops."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, get_args, get_type_hints

from mmdeploy_llm.hooks import RequestRecord
from mmdeploy_llm.testing.models.base import Check, CheckSkipped, attributed, demand

from .arguments import example_arguments
from .bounded import bounded
from .left_over import Left
from .plugin_subject import PluginSubject

MAX_SECONDS: Mapping[str, float] = {  # of a call, on average, and of any call
    "on_step": 500e-6,
    "on_request_finished": 5e-3,
}
LONGEST_CALL = 0.2
BLOCKED = 10.0  # seconds after which a hook counts as hanging
NUM_ROUNDS, NUM_CALLS = 3, 60
ON_START, ON_STOP = "on_engine_start", "on_engine_stop"
IN_A_THREAD = "put the values into a queue that a thread of yours reads"


def observers_are_quick(subject: PluginSubject) -> None:
    """on_step takes microseconds, no call blocks: the engine's loop waits for it."""
    hooks = _observers(subject)
    with _running(subject, hooks):
        for hook, allowed in MAX_SECONDS.items():
            if hook not in hooks:
                continue
            # The least of several rounds: others use this machine too.
            rounds = [_measured(hook, hooks[hook]) for _ in range(NUM_ROUNDS)]
            mean, longest = min(found[0] for found in rounds), min(found[1] for found in rounds)
            demand(
                mean <= allowed,
                f"{hook} takes {mean * 1e6:,.0f} us on average, {allowed * 1e6:,.0f} us are "
                f"allowed; {IN_A_THREAD}",
            )
            demand(
                longest <= LONGEST_CALL,
                f"one of {NUM_CALLS} calls of {hook} takes {longest:.2f} s; {IN_A_THREAD}, and do "
                "not write to files or the network in the hook",
            )


def observers_bear_any_record(subject: PluginSubject) -> None:
    """Records of requests that failed, had no output or media of any kind raise nothing."""
    hooks = _observers(subject)
    if "on_request_finished" not in hooks and "on_step" not in hooks:
        raise CheckSkipped("it observes neither steps nor requests: nothing to add")
    with _running(subject, hooks):
        for hook, given in _varied():
            if hook in hooks:
                with attributed(f"{hook}({given!r:.300})", "accept every value of every field"):
                    _call(hook, hooks[hook], given)


def observers_leave_nothing(subject: PluginSubject) -> None:
    """From on_engine_start to on_engine_stop it changes nothing of the process, and leaves no
    thread, process or file."""
    hooks = _observers(subject)
    before = Left()
    with _running(subject, hooks):
        for hook in MAX_SECONDS:
            if hook in hooks:
                _measured(hook, hooks[hook])
    problem = before.difference()
    demand(
        problem is None,
        f"after on_engine_start, steps and on_engine_stop, {problem} (on_engine_stop is the place)",
    )


CHECKS: tuple[Check, ...] = (
    observers_are_quick,
    observers_bear_any_record,
    observers_leave_nothing,
)


class _running:
    """Calls on_engine_start before a block, and on_engine_stop after it."""

    def __init__(self, subject: PluginSubject, hooks: Mapping[str, Callable[..., Any]]) -> None:
        self._hooks = hooks

    def __enter__(self) -> None:
        if ON_START in self._hooks:
            _call(ON_START, self._hooks[ON_START], {})

    def __exit__(self, *_: object) -> None:
        if ON_STOP in self._hooks:
            _call(ON_STOP, self._hooks[ON_STOP], {})


def _observers(subject: PluginSubject) -> dict[str, Callable[..., Any]]:
    """Returns hook -> function of the plugin. Raises CheckSkipped for a plugin without any."""
    found = {
        hook: getattr(subject.loaded, hook)
        for hook in example_arguments()
        if hook.startswith("on_") and subject.has_hook(hook)
    }
    if not found:
        raise CheckSkipped("the plugin observes nothing: nothing to add")
    return found


def _call(hook: str, function: Callable[..., Any], changed: Mapping[str, Any]) -> None:
    """Calls a hook with example arguments, of which some fields are changed."""
    (name, value), *_ = example_arguments()[hook].items()
    arguments = {name: replace(value, **changed)} if changed else {name: value}
    given = {name: arguments[name] for name in inspect.signature(function).parameters}
    bounded(lambda: function(**given), BLOCKED, hook, f"never block; {IN_A_THREAD}")


def _measured(hook: str, function: Callable[..., Any]) -> tuple[float, float]:
    """Returns the mean and the longest seconds of some calls."""
    (name, value), *_ = example_arguments()[hook].items()
    given = {name: value} if name in inspect.signature(function).parameters else {}

    def call() -> list[float]:
        taken = []
        for _ in range(NUM_CALLS):
            start = time.perf_counter()
            function(**given)
            taken.append(time.perf_counter() - start)
        return taken

    with attributed(f"{hook}({', '.join(given)})", "let the hook accept any valid argument"):
        taken = bounded(call, BLOCKED, hook, f"never block; {IN_A_THREAD}")
    return sum(taken) / len(taken), max(taken)


def _varied() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields hook and changed fields: those of other ends of requests, and numbers of none."""
    reasons = [*get_args(get_type_hints(RequestRecord)["finish_reason"]), None]
    for reason in reasons:
        if reason is None or isinstance(reason, str):
            yield "on_request_finished", {"finish_reason": reason}
    for code in (200, 400, 408, 413, 422, 499, 500, 503, 504):
        yield "on_request_finished", {"error_code": code, "num_output_tokens": 0}
    yield "on_request_finished", {"num_media_tokens": {"image": 12, "audio": 3, "pdf": 0}}
    yield "on_request_finished", {"num_prompt_tokens": 0, "num_cached_tokens": 0}
    zeros = ("num_scheduled_tokens", "num_scheduled_requests", "num_sampled_tokens", "num_running")
    yield "on_step", dict.fromkeys(zeros, 0)
    yield "on_step", dict.fromkeys(("plan_time", "run_time", "deliver_time"), 0.0)
    yield "on_step", {"num_free_blocks": 0, "num_waiting": 10**6, "num_preemptions": 3}
