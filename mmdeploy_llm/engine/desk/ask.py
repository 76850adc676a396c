"""Ask: what a caller hands in at a desk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mmdeploy_llm.messages import Conversation, Prompt
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.pooling_request import PoolingRequest
from mmdeploy_llm.values.prompt import PromptParts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ask:
    """One prompt and how to answer it. Two asks are never equal, so that one can be a key.

    prompt: as the caller gave it, in any form that the intake reads, or read already.
    item: the caller's object, `output.item` of its outputs; None: the prompt.
    where: names the prompt in messages of errors, such as "conversation 3, ".
    stream: whether the ticket gets deltas; otherwise it gets one output at the end.
    request_id: of the outputs; "": the ticket makes one.
    priority: prompts of smaller numbers are served first, equal ones in the order of `submit`.
    timeout: seconds from `submit` after which the prompt ends with error code 408.
    group: the same number for asks that begin alike, such as questions about one picture: one
        engine gets them, and computes what they share once. None: it stands alone.
    num_retries: times that it was asked before, for an answer that keeps to a schema.
    num_deaths: engines that died while they computed it, see deaths.py.
    wanted: vectors or a score; None: text.
    adapter: name of the adapter to compute it with, unless the prompt names one; "": none.
    """

    prompt: Prompt | Conversation | PromptParts
    params: SamplingParams
    item: Any = None
    where: str = ""
    stream: bool = False
    request_id: str = ""
    priority: int = 0
    timeout: float | None = None
    group: int | None = None
    num_retries: int = 0
    num_deaths: int = 0
    wanted: PoolingRequest | None = None
    adapter: str = ""

    @property
    def shown(self) -> Any:
        """The object that the caller knows."""
        return self.prompt if self.item is None else self.item
