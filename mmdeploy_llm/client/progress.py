"""The progress bar of `LLM.generate` and `LLM.chat`."""

from __future__ import annotations

import logging
import time
from contextlib import AbstractContextManager

from mmdeploy_llm.values.outputs.request_output import RequestOutput
from mmdeploy_llm.values.text.progress_bars import UseTqdm, open_bar, show_words

logger = logging.getLogger(__name__)


class Progress(AbstractContextManager["Progress"]):
    """A bar that counts finished prompts and shows tokens per second, and after it a warning when
    prompts have failed. Without a bar nothing is shown."""

    def __init__(self, total: int, use_tqdm: UseTqdm) -> None:
        self._bar = open_bar(use_tqdm or False, total=total, desc="Processed prompts")
        self._begin = time.monotonic()
        self._num_input, self._num_output, self._total = 0, 0, total if use_tqdm else 0
        self._failed: list[RequestOutput] = []

    def __exit__(self, *_: object) -> None:
        self._bar.close()
        if self._failed and self._total:
            self._tell()

    def _tell(self) -> None:
        first = self._failed[0]
        logger.warning(
            "%d of %d prompts failed (their outputs have is_ok False, an error_code and an "
            "error_msg); the first with error %d: %s",
            len(self._failed),
            self._total,
            first.error_code,
            first.error_msg,
        )

    def count(self, output: RequestOutput) -> None:
        """Counts one finished prompt."""
        self._failed += [] if output.is_ok else [output]
        self._num_output += sum(len(completion.token_ids) for completion in output.outputs)
        self._num_input += len(output.prompt_token_ids)
        seconds = max(time.monotonic() - self._begin, 1e-9)
        read, written = self._num_input / seconds, self._num_output / seconds
        words = f"est. speed input: {read:.2f} toks/s, output: {written:.2f} toks/s"
        show_words(self._bar, words)
        self._bar.update(1)
