"""AnyModel: transformers' own modules as a Model of this engine (see hooks.Model).

token ids, media --> embeddings --> transformers' decoder --> transformers' head --> logits
                                        attention: interface.py
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from mmdeploy_llm.errors import MMDeployLLMError, ModelNotSupportedError
from mmdeploy_llm.forward import AttentionContext, ForwardInputs
from mmdeploy_llm.hooks import MediaInput, MediaSpan
from mmdeploy_llm.weights.map import Target

from . import ATOMIC, buffers, head, interface, media, mixing, probe, rope, structure, trial
from .interface import Step, refused
from .linear import use_engine_layers
from .weights import WeightTable

WITHOUT_VALUES = "batched_mm"  # runs experts without counting their tokens, so it works on meta


class AnyModel(nn.Module):
    """A transformers model with the methods of hooks.Model.

    config: transformers' config of an architecture with a head that returns logits. Raises
    ModelNotSupportedError with the layer and the reason when the engine cannot run it.
    """

    _decoder: Any
    _head: Any
    _base: Any

    def __init__(self, config: Any) -> None:
        super().__init__()
        interface.register()
        architecture = _architecture(config)
        self.name = architecture.__name__
        self.inner: Any = _build(architecture, copy.deepcopy(config))
        use_engine_layers(self.inner)
        decoder = structure.decoder_of(self.inner)
        structure.check_decoder(self.name, decoder)
        if self.name not in ATOMIC:
            structure.check_masks(self.name, self.inner, decoder)
        text = decoder.config.get_text_config()
        self.hidden_size = int(text.hidden_size)
        self._set("_decoder", decoder)
        self._set("_head", head.head_of(self.inner, decoder))
        base = getattr(self.inner, str(structure.child_with(self.inner, decoder)))
        self._set("_base", base)
        self._step = Step()
        interface.connect(decoder, self._step)
        decoder.config._attn_implementation = interface.NAME
        self._has_mrope = hasattr(base, "get_rope_index")
        self._max_position = rope.check(self.name, decoder)
        self._ties = buffers.untie(self.inner)
        buffers.prepare(self.inner)
        self._weights = WeightTable(self.inner, "inner.", self._ties)
        sizes = self._observed_on_meta()
        self._is_observed = sizes is not None
        self._set_sizes(sizes or probe.Sizes(num_layers=1, num_kv_heads=1, head_dim=1))

    def init_buffers(self, device: torch.device) -> None:
        """Restores tied weights, computes buffers, and runs the checks that need weights."""
        buffers.retie(self.inner, self._ties)
        buffers.compute(self.inner, device)
        rope.fix(self._decoder)
        self.eval()
        with torch.inference_mode():
            if not self._is_observed:
                self._set_sizes(self._observed_on_weights())
            mixing.check_mixing(self.name, self._decoder, self.hidden_size, self._silent_pass)
            trial.check_equal(self.name, self.inner, self._decoder, self._trial_logits)

    def forward(self, inputs: ForwardInputs) -> Tensor:
        """Returns the hidden states after the final norm, [T, hidden]."""
        if self._max_position is not None:
            rope.check_positions(self.name, inputs.positions, self._max_position)
        ids = inputs.token_ids
        if inputs.media_rows is not None:  # a placeholder's id may be outside the vocabulary
            ids = ids.index_fill(0, inputs.media_rows, 0)
        embeds = inputs.merge_media(self.inner.get_input_embeddings()(ids))
        return self._decode(embeds, inputs.positions, inputs.attn)

    def logits(self, hidden: Tensor) -> Tensor:
        """Computes the logits: [N, hidden] -> [N, vocab]."""
        return head.logits(self._head, hidden)

    def encode_media(self, items: Sequence[MediaInput]) -> Sequence[Tensor]:
        """Returns one [num_tokens, hidden] per item."""
        return [media.encode(self.name, self.inner, item) for item in items]

    def positions(self, num_tokens: int, spans: Sequence[MediaSpan]) -> Tensor | None:
        """Returns [3, num_tokens] by the model's get_rope_index; None without M-RoPE."""
        return media.positions(self._base, num_tokens, spans) if self._has_mrope else None

    def weight_targets(self, key: str) -> Sequence[Target] | None:
        """See weights.map."""
        return self._weights.targets(key)

    def _decode(self, embeds: Tensor, positions: Tensor, attn: AttentionContext) -> Tensor:
        self._step.attn = attn
        try:
            out = self._pass(embeds, positions)
        finally:
            self._step.attn = None
        return out

    def _pass(self, embeds: Tensor, positions: Tensor, **kwargs: Any) -> Tensor:
        """Runs the decoder on [T, hidden] at positions [T] or [3, T]."""
        out = self._decoder(
            inputs_embeds=embeds.unsqueeze(0),
            position_ids=positions.unsqueeze(-2),
            use_cache=False,
            return_dict=True,
            **kwargs,
        )
        hidden: Tensor = out.last_hidden_state
        return hidden.squeeze(0)

    def _silent_pass(self, embeds: Tensor) -> Tensor:
        return self._decode(embeds, self._first_positions(embeds.device), mixing.Silence())

    def _trial_logits(self, ids: Tensor) -> Tensor:
        embeds = self.inner.get_input_embeddings()(ids)
        return self.logits(self._decode(embeds, self._first_positions(ids.device), trial.Whole()))

    def _first_positions(self, device: torch.device) -> Tensor:
        """Returns the positions of NUM_TOKENS tokens, [T] or [3, T]."""
        positions = torch.arange(probe.NUM_TOKENS, device=device)
        return positions.expand(3, -1) if self._has_mrope else positions

    def _observed(self) -> probe.Sizes:
        """Runs the decoder once on the device of its weights; returns the sizes of its cache."""
        weight = next(self._decoder.parameters())
        embeds = torch.zeros(
            probe.NUM_TOKENS, self.hidden_size, dtype=weight.dtype, device=weight.device
        )
        mask = torch.ones(1, probe.NUM_TOKENS, dtype=torch.int64, device=weight.device)
        positions = self._first_positions(weight.device)
        with rope.fixed(self._decoder):
            return probe.observe(
                self.name, self._decoder, lambda: self._pass(embeds, positions, attention_mask=mask)
            )

    def _observed_on_meta(self) -> probe.Sizes | None:
        """Returns None when the decoder reads values, which meta tensors do not have: it is then
        observed after its weights are loaded."""
        config = self._decoder.config
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
                f"transformers_any cannot run {self.name}: {error}; use a plugin made for this "
                "model"
            ) from error

    def _set_sizes(self, sizes: probe.Sizes) -> None:
        self.num_layers = sizes.num_layers
        self.num_kv_heads = sizes.num_kv_heads
        self.head_dim = sizes.head_dim

    def _set(self, name: str, value: Any) -> None:
        """Sets an attribute that is not a submodule: `inner` holds its parameters already."""
        self.__dict__[name] = value


def _architecture(config: Any) -> Any:
    """Returns transformers' class of the config. Raises ModelNotSupportedError when there is none,
    or when it has an encoder or no language-model head."""
    name = next(iter(config.architectures or ()), "")
    found: Any = getattr(transformers, name, None)
    if not isinstance(found, type) or not issubclass(found, transformers.PreTrainedModel):
        raise ModelNotSupportedError(
            f"transformers {transformers.__version__} has no model class {name!r}; use a plugin "
            "made for this model"
        )
    if config.is_encoder_decoder:
        raise refused(name, "its decoder", "attends to an encoder (cross attention)")
    architecture: Any = found
    if not architecture.can_generate():
        raise refused(name, "the model", "has no head that gives logits for the next token")
    return architecture


def _build(architecture: Any, config: Any) -> Any:
    """Builds the module on the device of the context. Vision towers keep transformers' attention.

    Raises ModelNotSupportedError for a config that transformers cannot use.
    """
    try:
        return architecture._from_config(config, dtype=buffers.MARK).eval()
    except MMDeployLLMError:
        raise
    except Exception as error:  # transformers' code: anything may come
        raise ModelNotSupportedError(
            f"transformers cannot make {architecture.__name__} from this config.json: "
            f"{type(error).__name__}: {error}"
        ) from error
