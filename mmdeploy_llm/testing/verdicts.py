"""Runs checks, and tells the outcome of each."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mmdeploy_llm.hooks.names import error_text
from mmdeploy_llm.hooks.records import FAULTS
from mmdeploy_llm.testing.models.base import Check, CheckFailed, CheckSkipped


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome of one check.

    check: name of the check.
    subject: what was checked, such as "reasoning parser acme"; "" for the plugin as a whole.
    message: why it failed or was skipped; when it passed, what the author should know, or "".
    since: the version of the plugin API with which the check came; None: the first.
    """

    check: str
    subject: str
    outcome: Literal["pass", "fail", "skip"]
    message: str
    seconds: float
    since: tuple[int, int] | None = None


def run(checks: Sequence[Check], what: str, subject: Any) -> Iterator[Verdict]:
    """Yields a verdict per check. Any exception of the plugin counts as a failure."""
    for check in checks:
        start = time.perf_counter()
        outcome: Literal["pass", "fail", "skip"] = "pass"
        message = ""
        try:
            message = check(subject) or ""
        except CheckSkipped as reason:
            outcome, message = "skip", str(reason)
        except CheckFailed as failure:
            outcome, message = "fail", str(failure)
        except FAULTS as error:
            outcome, message = "fail", f"the plugin raised {error_text(error)}"
        yield Verdict(
            check=check.__name__,
            subject=what,
            outcome=outcome,
            message=message,
            seconds=time.perf_counter() - start,
            since=getattr(check, "since", None),
        )


def skipped(check: str, what: str, message: str) -> Verdict:
    """Returns the verdict of a check that did not run."""
    return Verdict(check=check, subject=what, outcome="skip", message=message, seconds=0.0)
