"""Tries grammars in a process that can be killed, before this process compiles them.

    Probe.check(grammar) --Helper--> serve(): compiles it, follows it for some tokens
       RequestError  <-- "E" + what is wrong | no answer in time | the process died

llguidance limits what it computes for one token, but not the time, memory and stack for compiling.
A grammar that passes here compiles in the engine's process as it did here: the stack here is
smaller than that of any thread there.
"""

from __future__ import annotations

import os
import random
import threading
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

from mmdeploy_llm.errors import WorkerDiedError
from mmdeploy_llm.system.processes.helper import Helper, drop_outputs, limit_memory
from mmdeploy_llm.system.processes.process import Channel

from .sources import Constraint, wrong
from .vocabulary import Vocabulary, first_line, llguidance, rust_error

SECONDS = 5.0  # to compile a grammar
MAX_MEMORY = 2**29  # bytes that compiling a grammar may take
MAX_RESULTS = 10_000  # of checked grammars that are kept, about 200 bytes each
STACK_BYTES = 2**20
NUM_STEPS = 150  # tokens, each about 0.5 ms
GOOD = b"G"
EMPTY = "allows only the empty text; give one that allows at least one character"
NOTHING = "matches no text; check what contradicts itself in it"
LIMITS: dict[str, Any] = {
    # llguidance computes about 14,000 units of fuel or 20,000 items in a millisecond.
    "step_lexer_fuel": 100_000,
    "step_max_items": 5_000,
    "max_items_in_row": 1_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}


class Probe:
    """Checks grammars and remembers the results, good and bad. Thread-safe. The process starts with
    this object, which does not wait for it."""

    def __init__(self, vocabulary: Vocabulary, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._helper = Helper("grammar", serve, vocabulary)
        self._helper.start()
        self._lock = threading.Lock()  # guards `_results`
        self._turn = threading.Lock()  # held while a grammar is tried
        self._results: OrderedDict[bytes, str] = OrderedDict()  # reason by digest; "" when good

    def check(self, constraint: Constraint, translated: Callable[[], str]) -> None:
        """Raises RequestError for a constraint that is wrong, allows no text, or needs too much
        time or memory; EngineError when this object is closed. translated: see `translate`."""
        key = blake2b(repr(constraint).encode(), digest_size=16).digest()
        reason = self._known(key)
        if reason is None:
            grammar = translated()
            with self._turn:
                reason = self._known(key)  # another thread may have tried it meanwhile
                if reason is None:
                    reason = self._try(grammar)
                    self._keep(key, reason)
        if reason:
            raise wrong(constraint, reason)

    def interrupt(self) -> None:
        """Ends a check that is under way and refuses later ones."""
        self._helper.interrupt()

    def close(self) -> None:
        """Ends the process."""
        self._helper.close()

    def _try(self, grammar: str) -> str:
        try:
            answer = self._helper.call(grammar, self._seconds)
        except TimeoutError:
            return f"takes more than {self._seconds:g} s to compile; make it simpler"
        except WorkerDiedError:
            return (
                f"needs more than {MAX_MEMORY >> 20} MiB to compile, or is nested too deeply; make "
                "it simpler"
            )
        return "" if answer == GOOD else answer[1:].decode("utf-8", "replace")

    def _known(self, key: bytes) -> str | None:
        with self._lock:
            if key in self._results:
                self._results.move_to_end(key)
            return self._results.get(key)

    def _keep(self, key: bytes, reason: str) -> None:
        with self._lock:
            self._results[key] = reason
            if len(self._results) > MAX_RESULTS:
                self._results.popitem(last=False)


def serve(channel: Channel) -> None:
    """Runs in the process: tries what comes until the channel closes."""
    os.putenv("RAYON_NUM_THREADS", "1")  # read by llguidance when it starts
    tokenizer = channel.receive().read()[0]
    channel.ready()
    limit_memory(MAX_MEMORY)
    drop_outputs()
    threading.stack_size(STACK_BYTES)
    while True:
        text, answers = channel.receive(), [b"E" + b"cannot be compiled"]
        thread = threading.Thread(target=_answer, args=(tokenizer, text, answers))
        thread.start()
        thread.join()
        channel.answer(answers[-1])


def _answer(tokenizer: Any, text: str, answers: list[bytes]) -> None:
    try:
        reason = wrong_with(tokenizer, text)
    except MemoryError:
        reason = f"needs more than {MAX_MEMORY >> 20} MiB to compile; make it simpler"
    answers.append(GOOD if reason is None else b"E" + reason.encode("utf-8", "replace"))


def wrong_with(tokenizer: Any, text: str) -> str | None:
    """Compiles a grammar and follows it for some random tokens. Returns what is wrong with it, None
    when nothing is."""
    matcher = compiled(tokenizer, text)
    if isinstance(matcher, str):
        return matcher
    eos, generator = tokenizer.eos_tokens, random.Random(0)
    for step in range(NUM_STEPS):
        words = bytearray() if matcher.is_stopped() else bytearray(matcher.compute_bitmask())
        if matcher.is_error():
            reason = matcher.get_error()
            return NOTHING if "NoExtension" in reason else _too_complex(reason)
        can_end = matcher.is_stopped() or any(words[i // 8] >> i % 8 & 1 for i in eos)
        for token_id in eos if words else ():
            words[token_id // 8] &= ~(1 << token_id % 8)
        token_id = _any_of(words, generator)
        if token_id is None:
            return None if step else EMPTY if can_end else NOTHING
        if not matcher.consume_token(token_id):
            return _too_complex(matcher.get_error())
    return None


def compiled(tokenizer: Any, text: str) -> Any:
    """Returns a matcher at the start of a grammar; a text that says what is wrong with it."""
    library = llguidance()
    limits = library.LLParserLimits(**LIMITS)
    try:
        matcher = library.LLMatcher(tokenizer, text, log_level=0, limits=limits)
    except BaseException as error:
        return _not_valid(rust_error(error))
    return _not_valid(matcher.get_error()) if matcher.is_error() else matcher


def _not_valid(reason: str) -> str:
    if "limits." in reason or "too large" in reason or "too big" in reason:
        return _too_complex(reason.partition("; either increase limits.")[0])
    return f"is not valid: {first_line(reason)}"


def _too_complex(reason: str) -> str:
    return f"is too complex ({first_line(reason)}); make it simpler"


def _any_of(words: bytearray, generator: random.Random) -> int | None:
    """Returns an id whose bit is set, from a random place on; None when no bit is."""
    start = generator.randrange(len(words)) if words else 0
    turned = words[start:] + words[:start]
    found = len(turned) - len(turned.lstrip(b"\0"))
    if found == len(turned):
        return None
    bits = [bit for bit in range(8) if turned[found] >> bit & 1]
    return 8 * ((start + found) % len(turned)) + generator.choice(bits)
