"""The progress bar of `LLM.generate` and `LLM.chat`."""

from __future__ import annotations

from typing import Self

from tqdm import tqdm

from mmdeploy_llm.outputs import RequestOutput


class Progress:
    """A bar that counts finished prompts and shows tokens per second. A context manager."""

    def __init__(self, total: int, is_shown: bool) -> None:
        self._bar = tqdm(
            total=total, desc="Processed prompts", dynamic_ncols=True, disable=not is_shown
        )
        self._num_input = 0
        self._num_output = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def count(self, output: RequestOutput) -> None:
        """Counts one finished prompt."""
        self._num_output += sum(len(completion.token_ids) for completion in output.outputs)
        self._num_input += len(output.prompt_token_ids)
        elapsed = max(self._bar.format_dict["elapsed"], 1e-9)
        self._bar.set_postfix_str(
            f"est. speed input: {self._num_input / elapsed:.2f} toks/s, "
            f"output: {self._num_output / elapsed:.2f} toks/s",
            refresh=False,
        )
        self._bar.update(1)
