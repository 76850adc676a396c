"""Answerer: whatever answers prompts, as batches, estimates and transcripts see it."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from mmdeploy_llm.engine.intake.rendered import TokenCount
from mmdeploy_llm.errors import EngineError
from mmdeploy_llm.media.boxes.reading import FoundBoxes
from mmdeploy_llm.values.outputs.request_output import RequestOutput

from .ask import Ask
from .outcome import Answer


class Answerer(Protocol):
    """Answers asks, as LLM does, an LLM on a cluster, and an Answerer that wraps another one."""

    def answer_each(self, asks: Iterable[Ask]) -> Generator[Answer, None, None]:
        """Yields answers as they finish, see LLM.answer_each."""


@runtime_checkable
class LoadedModel(Answerer, Protocol):
    """An Answerer with its engine at hand: what LLM has beyond its answers. Its engine can die and
    be started again."""

    plugins: Any
    runtime: Any
    num_kv_blocks: int

    @property
    def death(self) -> EngineError | None:
        """Why nothing is computed any more; None while something is."""

    @property
    def num_dead(self) -> int:
        """Engines that have died while others go on."""

    def revive(self) -> None:
        """Starts engines in their place. Raises what loading raises."""

    def restart(self) -> None:
        """Starts an engine in place of the one that died. Raises what loading raises."""

    def count_tokens(self, prompt: Any) -> TokenCount:
        """Counts the tokens of a prompt. Raises RequestError."""

    def find_boxes(self, prompt: Any, text: str) -> FoundBoxes:
        """Returns the boxes in an answer to a prompt. Raises RequestError."""

    def get_tokenizer(self) -> Any:
        """Returns transformers' tokenizer of the model."""


class GeneratingModel(Protocol):
    """A model whose module computes in this process, as calibration needs it; LLM is one."""

    @property
    def model(self) -> Any: ...

    def generate(
        self, prompts: Any, sampling_params: Any = None, *, use_tqdm: Any = True
    ) -> Sequence[RequestOutput]: ...

    def count_tokens(self, prompt: Any) -> TokenCount: ...
