"""Computes token ids in a process that can be killed, for tokenizers whose expressions could take
for ever.

    Encoder --Helper--> serve() --> tokenizers          another process, with limits of the system
      text, whether with special tokens -->   <-- b"I" ids | b"E" error
"""

from __future__ import annotations

import array
import math
import time
from typing import Any

from mmdeploy_llm.errors import RequestError, WorkerDiedError
from mmdeploy_llm.system.portable.limits import set_limit
from mmdeploy_llm.system.processes.helper import Helper, drop_outputs, limit_memory
from mmdeploy_llm.system.processes.process import Channel
from mmdeploy_llm.values.text.display import error_text

SECONDS = 30.0  # for one text, as for a template
MAX_MEMORY = 2**30  # bytes more than the tokenizer itself takes
MAX_ANSWER = 2**28  # bytes


class Encoder:
    """Encodes texts; at most one process, which several threads use one after the other."""

    def __init__(self, tokenizer: Any, seconds: float = SECONDS) -> None:
        """tokenizer: of the library tokenizers."""
        self._seconds = seconds
        self._helper = Helper("tokenizer", serve, (tokenizer.to_str(), seconds), MAX_ANSWER)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Returns the token ids of a text. Raises RequestError when that takes too long or too
        much memory, and when the tokenizer fails; EngineError when this is closed."""
        try:
            answer = self._helper.call((text, add_special_tokens), self._seconds)
        except TimeoutError:
            raise RequestError(
                f"the tokenizer did not read this text within {self._seconds:g} s; an expression "
                "of its tokenizer.json is no known one. Give another tokenizer or a shorter text"
            ) from None
        except WorkerDiedError:
            raise RequestError(
                "the tokenizer ended the process that read this text, by its memory or time; give "
                "another tokenizer or a shorter text"
            ) from None
        if answer[:1] != b"I":
            reason = answer[1:].decode("utf-8", "replace")
            raise RequestError(f"the tokenizer cannot read this text: {reason}")
        ids = array.array("I")
        ids.frombytes(answer[1:])
        return ids.tolist()

    def interrupt(self) -> None:
        """Ends a call that is under way and refuses later ones; may be called from any thread."""
        self._helper.interrupt()

    def close(self) -> None:
        """Ends the process."""
        self._helper.close()


def serve(channel: Channel) -> None:
    """Runs in the process: encodes what comes until the channel closes."""
    from tokenizers import Tokenizer

    source, seconds = channel.receive()
    tokenizer = Tokenizer.from_str(source)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    channel.ready()
    limit_memory(MAX_MEMORY)
    drop_outputs()
    while True:
        text, add_special_tokens = channel.receive()
        # Ends this process also when its parent is gone.
        set_limit("seconds", math.ceil(time.process_time() + seconds) + 2)
        try:
            ids = tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
            answer = b"I" + array.array("I", ids).tobytes()
        except BaseException as error:  # tokenizers raises bare Exception, and Rust panics
            answer = b"E" + error_text(error).encode("utf-8", "replace")
        channel.answer(answer)
