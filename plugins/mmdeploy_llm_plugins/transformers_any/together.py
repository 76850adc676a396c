"""Together: transformers' decoder on all tokens of a step, with the engine's attention.

token ids, media --> embeddings --> transformers' decoder --> transformers' head --> logits
                                        attention: interface.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.forward import AttentionContext, ForwardInputs

from . import ATOMIC, interface, limits, mixing, probe, rope, structure, trial
from .interface import Step
from .wrapped import Parts

WITHOUT_VALUES = "batched_mm"  # runs experts without counting their tokens, so it works on meta


class Together:
    """Runs the decoder on all tokens of a step at once.

    Raises ModelNotSupportedError with the layer and the reason when the engine cannot run it so.
    """

    def __init__(self, parts: Parts) -> None:
        interface.register()
        decoder = parts.decoder
        structure.check_decoder(parts.name, decoder)
        if parts.name not in ATOMIC:
            structure.check_masks(parts.name, parts.inner, decoder)
        self._parts = parts
        self._step = Step()
        interface.connect(decoder, self._step)
        decoder.config._attn_implementation = interface.NAME
        self._limit = limits.of_decoder(parts.name, decoder)
        self.long_after: int | None = None

    def check_on_meta(self) -> probe.Sizes | None:
        """Returns the sizes of the cache; None when only the weights show them."""
        return self._observed_on_meta()

    def check_on_weights(self) -> probe.Sizes:
        """Runs the checks that need weights. Returns the sizes of the cache."""
        parts = self._parts
        self.long_after = rope.follow(parts.name, parts.decoder, self._step)
        if self.long_after is not None:
            self._limit = limits.of_decoder(parts.name, parts.decoder, follows_length=True)
        rope.fix(parts.decoder)
        with torch.inference_mode():
            sizes = self._observed_on_weights()
            windows = {i: layer.window for i, layer in enumerate(sizes.layers)}
            own = limits.of_windows(parts.decoder.config, windows)
            self._limit = self._limit.and_also(own)
            mixing.check_mixing(parts.name, parts.decoder, parts.hidden_size, self._silent_pass)
            trial.check_equal(parts.name, parts.inner, parts.decoder, self._trial_logits)
        return sizes

    def forward(self, inputs: ForwardInputs) -> Tensor:
        """Returns the hidden states after the final norm, [T, hidden]."""
        self._limit.check(self._parts.name, inputs.positions)
        embeds = self._parts.embed_inputs(inputs)
        given = self._parts.features(inputs, 0, len(embeds))
        given |= self._parts.of_tokens(inputs.token_ids)
        self._step.is_long = inputs.is_long
        try:
            return self._decode(embeds, inputs.positions, inputs.attn, **given)
        finally:
            self._step.is_long = None

    def connect(self, layer: nn.Module) -> None:
        """Gives a layer outside the decoder the engine's attention."""
        interface.connect(layer, self._step)

    def embedded(self, inputs: ForwardInputs) -> Tensor:
        """Returns the embeddings of a step, those of media in place of their tokens."""
        return self._parts.embed_inputs(inputs)

    def run_layer(self, layer: nn.Module, x: Tensor, inputs: ForwardInputs) -> Tensor:
        """Runs a layer that `connect` was given on [T, hidden]; returns [T, hidden]."""
        positions = inputs.positions.unsqueeze(-2) + self._parts.first_position
        x = x.unsqueeze(0)
        self._step.attn, self._step.is_long = inputs.attn, inputs.is_long
        try:
            rope = self._parts.decoder.rotary_emb(x, position_ids=positions)
            out: Tensor = layer(x, position_embeddings=rope, position_ids=positions)
        finally:
            self._step.attn = self._step.is_long = None
        return out.squeeze(0)

    def _decode(
        self, embeds: Tensor, positions: Tensor, attn: AttentionContext, **kwargs: Any
    ) -> Tensor:
        self._step.attn = attn
        try:
            out = self._pass(embeds, positions, **kwargs)
        finally:
            self._step.attn = None
        return out

    def _pass(self, embeds: Tensor, positions: Tensor, **kwargs: Any) -> Tensor:
        """Runs the decoder on [T, hidden] at positions [T] or [3, T]."""
        out = self._parts.decoder(
            inputs_embeds=embeds.unsqueeze(0),
            position_ids=positions.unsqueeze(-2) + self._parts.first_position,
            use_cache=False,
            return_dict=True,
            **kwargs,
        )
        hidden: Tensor = out.last_hidden_state
        return hidden.squeeze(0)

    def _silent_pass(self, embeds: Tensor) -> Tensor:
        return self._decode(embeds, self._first_positions(embeds.device), mixing.Silence())

    def _trial_logits(self, ids: Tensor) -> Tensor:
        embeds = self._parts.embed(ids)
        return self._parts.logits(
            self._decode(
                embeds,
                self._first_positions(ids.device),
                trial.Whole(),
                **self._parts.of_tokens(ids),
            )
        )

    def _first_positions(self, device: torch.device) -> Tensor:
        return self._parts.count_up(0, probe.NUM_TOKENS, device)

    def _observed(self) -> probe.Sizes:
        """Runs the decoder once on the device of its weights; returns the sizes of its cache."""
        weight = next(self._parts.decoder.parameters())
        embeds = torch.zeros(
            probe.NUM_TOKENS, self._parts.hidden_size, dtype=weight.dtype, device=weight.device
        )
        mask = torch.ones(1, probe.NUM_TOKENS, dtype=torch.int64, device=weight.device)
        positions = self._first_positions(weight.device)
        with rope.fixed(self._parts.decoder):
            return probe.observe(
                self._parts.name,
                self._parts.decoder,
                lambda: self._pass(embeds, positions, attention_mask=mask),
            )

    def _observed_on_meta(self) -> probe.Sizes | None:
        """Returns None when the decoder reads values, which meta tensors do not have: it is then
        observed after its weights are loaded."""
        config = self._parts.decoder.config
        before = config._experts_implementation
        try:
            config._experts_implementation = WITHOUT_VALUES
            with torch.inference_mode():
                return self._observed()
        except probe.TrialFailed:
            return None
        finally:
            config._experts_implementation = before

    def _observed_on_weights(self) -> probe.Sizes:
        try:
            return self._observed()
        except probe.TrialFailed as error:
            raise ModelNotSupportedError(
                f"transformers_any cannot run {self._parts.name}: {error}; use a plugin made for "
                "this model"
            ) from error
