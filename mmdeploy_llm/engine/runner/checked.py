"""CheckedModel: a plugin's model, its outputs checked for the shapes that the runner relies on."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mmdeploy_llm.errors import PluginContractError
from mmdeploy_llm.forward import ForwardInputs
from mmdeploy_llm.hooks import Model
from mmdeploy_llm.hooks.objects.model import cross_of
from mmdeploy_llm.request import MediaSpan


class CheckedModel:
    """Calls a plugin's model and checks its outputs. Raises PluginContractError for one of a wrong
    shape, in which the runner might read rows of other requests.

    name: the model in messages, such as "AcmeForCausalLM (plugin 'acme')". num_axes: of its M-RoPE
    positions; 0 where token i has position i. has_cross, sees_prompts, has_draft_head: of
    hooks.Model.
    """

    def __init__(self, model: Model, name: str, vocab_size: int) -> None:
        self._model = model
        self._name = name
        self._vocab_size = vocab_size
        self.has_cross = cross_of(model) is not None
        self.has_draft_head = getattr(model, "draft_head", None) is not None
        self.sees_prompts = bool(getattr(model, "sees_prompts", False))
        first = model.positions(1, ())
        self.num_axes = 0 if first is None else len(first)

    def forward(self, inputs: ForwardInputs) -> Tensor:
        """Returns hidden states [T, hidden]."""
        shape = (inputs.token_ids.shape[0], self._model.hidden_size)
        meaning = "a row of hidden_size values for each token"
        return self._checked("forward", self._model.forward(inputs), shape, meaning)

    def draft(self, inputs: ForwardInputs, hidden: Tensor) -> Tensor:
        """Returns the hidden states of the draft head [T, hidden]; only where the model has one."""
        meaning = "a row of hidden_size values for each row of hidden states"
        found = self._model.draft_head(inputs, hidden)  # type: ignore[attr-defined]
        shape = (hidden.shape[0], self._model.hidden_size)
        return self._checked("draft_head", found, shape, meaning)

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits [N, vocab] of hidden states [N, hidden]."""
        shape = (hidden.shape[0], self._vocab_size)
        meaning = "a row for each row of its input, a value for each token id of the vocabulary"
        return self._checked("logits", self._model.logits(hidden), shape, meaning)

    def positions(self, token_ids: Sequence[int], media: Sequence[MediaSpan]) -> Tensor | None:
        """Returns M-RoPE positions [num_axes, tokens]; None where token i has position i."""
        by_tokens, count = getattr(self._model, "positions_of", None), len(token_ids)
        found = by_tokens(token_ids, media) if by_tokens else self._model.positions(count, media)
        if found is None:
            return None
        meaning = "time, height and width of each token, or the model's own axes; or None"
        return self._checked("positions", found, (self.num_axes, count), meaning)

    def _checked(self, method: str, found: Tensor, shape: tuple[int, int], meaning: str) -> Tensor:
        if isinstance(found, Tensor) and tuple(found.shape) == shape:
            return found
        given = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise PluginContractError(
            f"{method} of {self._name} returned {given}, must be {shape}: {meaning}"
        )
