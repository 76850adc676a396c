"""Matches the paths of modules with the names and regular expressions of an adapter's config.

An expression comes from outside and may take for ever: one that is more than a plain name runs in a
process that can be killed, and that imports no torch.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Sequence

from mmdeploy_llm.errors import CheckpointError, WorkerDiedError
from mmdeploy_llm.system.portable.limits import set_limit
from mmdeploy_llm.system.processes.helper import Helper, limit_memory
from mmdeploy_llm.system.processes.process import Channel

SECONDS = 10.0
MAX_MEMORY = 2**28  # bytes
MAX_ANSWER = 2**26  # bytes
PLAIN = re.compile(r"\^?(?:[\w-]|\\?\.)*\$?", re.ASCII)  # cannot be matched in many ways

Matches = list[list[bool]]


def matches(patterns: Sequence[str], paths: Sequence[str], *, at_end: bool = False) -> Matches:
    """Returns for each pattern which paths it matches: the whole path, or with `at_end` its last
    names. Raises CheckpointError for a pattern that is no expression or takes too long."""
    is_plain = all(PLAIN.fullmatch(pattern) for pattern in patterns)
    if at_end:
        patterns = [rf"(?:.*\.)?(?:{pattern})" for pattern in patterns]
    if is_plain:
        return _matched(patterns, paths)
    helper = Helper("expressions", serve, None, MAX_ANSWER)
    try:
        answer = json.loads(helper.call((patterns, paths), SECONDS))
    except (TimeoutError, WorkerDiedError):
        raise CheckpointError(
            "an expression in adapter_config.json takes too long to match the adapter's modules; "
            "name the modules in a list instead"
        ) from None
    finally:
        helper.close()
    if isinstance(answer, str):
        raise CheckpointError(f"an expression in adapter_config.json cannot be read: {answer}")
    found: Matches = answer
    return found


def _matched(patterns: Sequence[str], paths: Sequence[str]) -> Matches:
    compiled = [re.compile(pattern) for pattern in patterns]
    return [[each.fullmatch(path) is not None for path in paths] for each in compiled]


def serve(channel: Channel) -> None:
    """Runs in the process: matches what comes, once."""
    channel.receive()
    channel.ready()
    limit_memory(MAX_MEMORY)
    set_limit("seconds", math.ceil(time.process_time() + SECONDS) + 2)
    patterns, paths = channel.receive()
    try:
        answer: Matches | str = _matched(patterns, paths)
    except (re.error, RecursionError, MemoryError, OverflowError) as error:
        answer = str(error)[:200] or type(error).__name__
    channel.answer(json.dumps(answer).encode())
