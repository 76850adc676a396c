"""AnyModel: transformers' own modules as a Model of this engine (see hooks.Model).

They run in the fastest way that is exact: all tokens of a step together (together.py), one sequence
after the other (by_sequence.py), or all of each sequence again at each step (again.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mmdeploy_llm.caches import PagedKV
from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.forward import ForwardInputs

from . import BY_PROMPT, masks, mechanisms, structure
from .again import Again
from .by_sequence import BySequence
from .interface import NotCausal
from .probe import Sizes
from .together import Together
from .wrapped import Wrapped


class AnyModel(Wrapped):
    """A transformers model with the methods of hooks.Model.

    config: transformers' config of an architecture with a head that returns logits. Raises
    ModelNotSupportedError with the layer and the reason when the engine cannot run it.
    """

    is_cacheable = False  # it is checked with its weights

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        sizes: Sizes | None = None
        self.draft_head: nn.Module | None = None  # see draft.py
        self._way: Together | BySequence | Again
        try:
            self._way = Together(self.parts)
            sizes = self._way.check_on_meta()
        except NotCausal:
            raise
        except ModelNotSupportedError as error:
            self._way = self._by_sequence(error)
        self._prepare_weights()
        self._set_sizes(sizes or Sizes(layers=(PagedKV(num_kv_heads=1, head_dim=1),)))

    @property
    def text_layers(self) -> Sequence[nn.Module]:
        """See hooks.Model."""
        drafts = () if self.draft_head is None else (self.draft_head,)
        return (*structure.decoder_layers(self.parts.decoder).values(), *drafts)

    @property
    def way(self) -> Together | BySequence | Again:
        """How the tokens of a step are computed."""
        return self._way

    @property
    def attends_itself(self) -> bool:
        """Whether transformers computes the attention; see forward.SequenceAttention."""
        return not isinstance(self._way, Together)

    @property
    def mechanisms(self) -> tuple[str, ...]:
        """Names what serves the model, as the census lists it; complete with its weights."""
        way = self._way
        own = (mechanisms.TOGETHER,) if isinstance(way, Together) else way.mechanisms
        more = (*mechanisms.of_caches(self, self.cache), *mechanisms.of_parts(self.parts))
        return tuple(dict.fromkeys((*own, *more)))

    @property
    def long_after(self) -> int | None:
        """See forward.ForwardInputs.is_long."""
        return self._way.long_after if isinstance(self._way, Together) else None

    @property
    def sees_prompts(self) -> bool:
        """See hooks.Model. A prompt that was an answer elsewhere is repeated as a prompt."""
        if isinstance(self._way, Again):
            return self._way.repeats
        return self.parts.name in BY_PROMPT or self.parts.name in masks.KNOWN

    def init_buffers(self, device: torch.device) -> None:
        """Completes the weights, and runs the checks that need them."""
        self._complete_weights(device)
        self.eval()
        self._set_sizes(self._checked())

    def _checked(self) -> Sizes:
        """Returns the sizes of the fastest way that passes its checks."""
        try:
            return self._way.check_on_weights()
        except ModelNotSupportedError as error:
            if isinstance(self._way, Again) or self.draft_head is not None:
                raise
            is_together = isinstance(self._way, Together)
            self._way = self._by_sequence(error) if is_together else Again(self.parts, error)
            return self._checked()

    def forward(self, inputs: ForwardInputs) -> Tensor:
        """Returns the hidden states after the final norm, [T, hidden]."""
        return self._way.forward(inputs)

    def logits(self, hidden: Tensor) -> Tensor:
        """Computes the logits: [N, hidden] -> [N, vocab]."""
        if isinstance(self._way, Again):
            return self._way.logits(hidden)
        return super().logits(hidden)

    def add_draft_head(self, head: nn.Module, names: Mapping[str, str]) -> None:
        """Takes a draft head. names: see WeightTable.add."""
        self.draft_head = head
        self._weights.add(head, "draft_head.", names)
        self._set_sizes(self._sizes)

    def _by_sequence(self, because: ModelNotSupportedError) -> BySequence | Again:
        """Returns one of the slower ways. Raises `because` where these are closed too."""
        try:
            return BySequence(self.parts, because)
        except ModelNotSupportedError:
            return Again(self.parts, because)

    def _set_sizes(self, sizes: Sizes) -> None:
        self._sizes = sizes
        if isinstance(self._way, Again):
            self.hidden_size = self._way.hidden_size
        self.num_layers = len(sizes.layers)
        self.num_kv_heads = sizes.layers[0].num_kv_heads
        self.head_dim = sizes.layers[0].head_dim
        self.has_sinks = sizes.has_sinks
        states = () if sizes.states is None else (sizes.states,)
        drafts = () if self.draft_head is None else (replace(sizes.layers[-1], window=None),)
        self.cache = (*sizes.layers, *states, *drafts)
