"""Wrapped: a transformers model inside a Model of this engine, with everything but its forward."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from mmdeploy_llm.errors import MMDeployLLMError, ModelNotSupportedError
from mmdeploy_llm.forward import ForwardInputs
from mmdeploy_llm.hooks import Checkpoint, MediaInput, MediaSpan
from mmdeploy_llm.weights.map import Target
from mmdeploy_llm_plugins.transformers_media import placeholders
from mmdeploy_llm_plugins.transformers_media.sound.encoding import encode_sound
from mmdeploy_llm_plugins.transformers_parts import buffers
from mmdeploy_llm_plugins.transformers_parts.adapter import merge_adapter
from mmdeploy_llm_plugins.transformers_parts.linear import use_engine_layers
from mmdeploy_llm_plugins.transformers_parts.mamba import check_mixers, use_engine_mixers
from mmdeploy_llm_plugins.transformers_parts.weights import WeightTable

from . import head, masks, media, structure
from .interface import refused

NUM_AXES = 3  # time, height, width; HunYuan-VL has four


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Holds the parts of a transformers model. inner: the whole. base: its child that is or
    contains the decoder. head: a view of the whole that computes logits of the decoder's output.
    first_position: see structure.positions_of. replaced: see
    transformers_media/placeholders.py; Wrapped writes it once. makers: see structure.makers."""

    name: str
    inner: Any
    base: Any
    decoder: Any
    head: Any
    hidden_size: int
    first_position: int = 0
    replaced: dict[int, int] = field(default_factory=dict)
    makers: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)

    @property
    def num_axes(self) -> int:
        """The number of axes of M-RoPE positions; 0 where token i has position i."""
        if not hasattr(self.base, "get_rope_index"):
            return 0
        rope = getattr(self.decoder.config, "rope_parameters", None) or {}
        return max(NUM_AXES, len(rope.get("mrope_section") or ()))

    @property
    def has_indicators(self) -> bool:
        """Whether the vision tower has embeddings of the tokens around images."""
        return bool(getattr(self.base, "visual_indicator_token_ids", ()))

    def embed(self, ids: Tensor) -> Tensor:
        """Returns the embeddings of token ids."""
        found: Tensor = self.inner.get_input_embeddings()(self.embedded_ids(ids))
        return found

    def embedded_ids(self, ids: Tensor) -> Tensor:
        """Returns the ids that transformers embeds for `ids`."""
        return placeholders.replace(ids, self.replaced)

    def embed_inputs(self, inputs: ForwardInputs) -> Tensor:
        """Returns the embeddings of a step, those of media in place of their tokens."""
        ids = inputs.token_ids
        if inputs.media_rows is not None:  # a placeholder's id may be outside the vocabulary
            ids = ids.index_fill(0, inputs.media_rows, 0)
        embeds = inputs.merge_media(self.embed(ids))
        if self.has_indicators and inputs.has_prompt:
            return media.indicate(self.base, inputs, embeds)
        return embeds

    def of_tokens(self, ids: Tensor, axis: int = 0) -> dict[str, Tensor]:
        """Returns the arguments [1, n, ...] that the decoder takes besides the embeddings of token
        ids [n], made of these ids. axis: 1: [n, 1, ...], of as many sequences."""
        return {name: make(ids.unsqueeze(axis)) for name, make in self.makers.items()}

    def features(self, inputs: ForwardInputs, start: int, end: int) -> dict[str, Any]:
        """Returns the arguments in which the decoder takes features of media, for the rows start ..
        end."""
        return media.features(self.inner.config, inputs, self.hidden_size, start, end)

    def logits(self, hidden: Tensor) -> Tensor:
        """Computes the logits: [N, hidden] -> [N, vocab]."""
        return head.logits(self.head, hidden)

    def count_up(self, start: int, end: int, device: torch.device) -> Tensor:
        """Returns the positions of text tokens, [n] or [axes, n]."""
        positions = torch.arange(start, end, device=device)
        return positions.expand(self.num_axes, -1) if self.num_axes else positions


class Wrapped(nn.Module):
    """Holds transformers' modules as `inner`, for AnyModel to run.

    config: transformers' config of an architecture with a head that returns logits. Raises
    ModelNotSupportedError for any other.
    """

    parts: Parts

    def __init__(self, config: Any) -> None:
        super().__init__()
        architecture = _architecture(config)
        self.inner: Any = _build(architecture, copy.deepcopy(config))
        use_engine_mixers(self.inner)
        use_engine_layers(self.inner)
        decoder = structure.decoder_of(self.inner)
        # Not a submodule: `inner` holds its parameters already.
        self.__dict__["parts"] = Parts(
            name=architecture.__name__,
            inner=self.inner,
            base=getattr(self.inner, str(structure.child_with(self.inner, decoder)), None),
            decoder=decoder,
            head=head.head_of(self.inner, decoder),
            makers=structure.makers(decoder),
            first_position=structure.positions_of(decoder)[0],
            hidden_size=int(decoder.config.get_text_config().hidden_size),
        )
        self.hidden_size = self.parts.hidden_size
        self.media_size = self.hidden_size * (1 + len(media.feature_layers(config)))

    def _prepare_weights(self) -> None:
        """Brings parameters and buffers into the form that the loader fills."""
        self._ties = buffers.untie(self.inner)
        buffers.prepare(self.inner)
        self._weights = WeightTable(self.inner, "inner.", self._ties)

    def _complete_weights(self, device: torch.device) -> None:
        """Completes loaded weights, restores tied ones and computes buffers."""
        self._weights.complete(self.inner)
        config = self.inner.config
        if getattr(config, "has_lora_adapter", False) and config.name_or_path:
            checkpoint = Checkpoint(folder=Path(config.name_or_path), config=config)
            merge_adapter(self, checkpoint, self.weight_targets)
        buffers.retie(self.inner, self._ties)
        buffers.compute(self.inner, device, self.inner.get_input_embeddings().weight.dtype)
        check_mixers(self.inner)
        with torch.inference_mode():
            self.parts.replaced.update(placeholders.replaced_ids(self.inner))

    def logits(self, hidden: Tensor) -> Tensor:
        """Computes the logits: [N, hidden] -> [N, vocab]."""
        return self.parts.logits(hidden)

    def encode_media(self, items: Sequence[MediaInput]) -> Sequence[Tensor]:
        """Returns one [num_tokens, hidden] per item."""
        return [self._heard(item) if item.kind == "audio" else self._seen(item) for item in items]

    def _seen(self, item: MediaInput) -> Tensor:
        parts = self.parts
        rows = media.encode(parts.name, parts.inner, parts.base, item)
        if parts.name not in masks.ADDED:
            return rows
        placeholder = torch.tensor([parts.inner.config.image_token_id], device=rows.device)
        return rows + parts.embed(placeholder)

    def _heard(self, item: MediaInput) -> Tensor:
        """Returns the embeddings of a sound, with zeros for layers that get features of images."""
        rows = encode_sound(self.parts.inner, self.parts.decoder, item)
        return nn.functional.pad(rows, (0, self.media_size - rows.shape[1]))

    def positions(self, num_tokens: int, spans: Sequence[MediaSpan]) -> Tensor | None:
        """Returns [axes, num_tokens] by the model's get_rope_index; None without M-RoPE."""
        parts = self.parts
        if not parts.num_axes:
            return None
        if all(span.item.kind == "audio" for span in spans):  # they count up as text does
            return parts.count_up(0, num_tokens, torch.device("cpu"))
        return media.positions(parts.base, num_tokens, spans)

    def positions_of(self, token_ids: Sequence[int], spans: Sequence[MediaSpan]) -> Tensor | None:
        """Returns [axes, tokens], by the tokens where get_rope_index reads these."""
        base = self.parts.base
        if self.parts.num_axes and media.counts_from_tokens(base):
            return media.positions_of(base, token_ids, spans)
        return self.positions(len(token_ids), spans)

    def weight_targets(self, key: str) -> Sequence[Target] | None:
        """See weights.map."""
        return self._weights.targets(key)


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
    architecture: Any = found
    if "bbox" in inspect.signature(architecture.forward).parameters:  # UDOP
        why = "reads words with their boxes on the page (bbox), for which prompts have no place"
        raise refused(name, "its encoder", why)
    if config.is_encoder_decoder:
        raise refused(name, "its decoder", "attends to an encoder (cross attention)")
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
