"""BySequence: transformers' own forward for one sequence after the other, whose keys and values
lie in the engine's pages.

It is exact for any attention (biases, sinks, chunks, shared or chosen keys), and slower than
Together, which computes all sequences of a step at once. It serves what that one refuses.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.forward import ForwardInputs, SequenceAttention, SequenceRows

from . import limits, pages, rope, structure, trial
from .interface import refused
from .probe import Sizes
from .wrapped import Parts

STEPS = (4, 1, 2, 5)  # tokens of the trial's passes


class BySequence:
    """Runs the decoder on one sequence of a step after the other.

    because: why the engine cannot compute all tokens together, which is the error where this way is
    closed too.
    """

    def __init__(self, parts: Parts, because: ModelNotSupportedError) -> None:
        decoder = parts.decoder
        if hasattr(parts.inner, "get_image_features"):
            structure.check_decoder(parts.name, decoder)
            structure.check_masks(parts.name, parts.inner, decoder)
        self._parts = parts
        self._because = because
        self._limit = limits.of_decoder(parts.name, decoder)
        self._kept = pages.kept_by_layers(parts.name, decoder.config)
        self._places = pages.Places()
        self._accepted = frozenset(inspect.signature(decoder.forward).parameters)
        if "past_key_values" not in self._accepted:
            raise refused(parts.name, f"its decoder ({type(decoder).__name__})", "takes no cache")
        decoder.config._attn_implementation = "eager"

    def check_on_weights(self) -> Sizes:
        """Checks on a trial in several steps that transformers' cache is all that the model keeps
        of earlier tokens. Returns the sizes of the engine's cache."""
        rope.fix(self._parts.decoder)
        self._try()
        return Sizes(
            num_layers=len(self._places.index), num_kv_heads=1, head_dim=self._places.width
        )

    def forward(self, inputs: ForwardInputs) -> Tensor:
        """Returns the hidden states after the final norm, [T, hidden]."""
        self._limit.check(self._parts.name, inputs.positions)
        attn: Any = inputs.attn
        parts = self._parts
        is_text = inputs.media_rows is None and not parts.has_indicators
        embeds = None if is_text else parts.embed_inputs(inputs)
        hidden = [
            self._pass(attn, number, inputs.token_ids, inputs.positions, embeds, inputs)
            for number in range(len(attn.sequences))
        ]
        return torch.cat(hidden)

    def _try(self) -> None:
        parts = self._parts
        try:
            with torch.inference_mode():
                trial.check_equal(
                    parts.name,
                    parts.inner,
                    parts.decoder,
                    self._trial_logits,
                    num_tokens=sum(STEPS),
                    is_required=True,
                )
        except Exception as error:  # transformers' code: anything may come
            raise self._because from error

    def _pass(
        self,
        attn: SequenceAttention,
        number: int,
        token_ids: Tensor,
        positions: Tensor,
        embeds: Tensor | None = None,
        inputs: ForwardInputs | None = None,
    ) -> Tensor:
        """Runs the decoder on the rows of one sequence. Returns [n, hidden]."""
        rows: SequenceRows = attn.sequences[number]
        own = slice(rows.start, rows.end)
        given: dict[str, Any] = {
            "past_key_values": pages.sequence_cache(self._kept, self._places, attn, number),
            "position_ids": positions[..., own].unsqueeze(-2),
            "use_cache": True,
            "return_dict": True,
        }
        if inputs is not None:
            given |= self._parts.features(inputs, rows.start, rows.end)
        if embeds is None and "input_ids" in self._accepted:
            given["input_ids"] = token_ids[own].unsqueeze(0)
        else:
            if embeds is None:
                embeds = self._parts.embed(token_ids)
            given["inputs_embeds"] = embeds[own].unsqueeze(0)
        out = self._parts.decoder(**{key: x for key, x in given.items() if key in self._accepted})
        hidden: Tensor = out.last_hidden_state
        return hidden.squeeze(0)

    def _trial_logits(self, ids: Tensor) -> Tensor:
        """Returns the logits [N, vocab] of N tokens that come in STEPS."""
        parts, memory = self._parts, trial.Memory()
        found, end = [], 0
        for count in STEPS:
            start, end = end, end + count
            memory.begin(start, end)
            positions = parts.count_up(start, end, ids.device)
            found.append(self._pass(memory, 0, ids[start:end], positions))
        return parts.logits(torch.cat(found))
