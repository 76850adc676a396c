"""EncoderModel: an encoder as the engine sees it, with the classification head of its class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mmdeploy_llm.forward import ForwardInputs
from mmdeploy_llm.hooks import MediaSpan
from mmdeploy_llm.layers import LayerNorm, Linear
from mmdeploy_llm.weights.map import Replacement, Target, WeightMap

from .encoder import Encoder, EncoderConfig

Renames = Sequence[tuple[str, Replacement]]
# Buffers of old checkpoints, and heads of the pre-training.
IGNORED = (
    r"(^|\.)embeddings\.(position_ids|token_type_ids)$",
    r"inv_freq$",
    r"^(cls|lm_head|mlm_head|vocab_\w+|generator_\w+|discriminator_predictions)\.",
)
POOLER = r"(^|\.)pooler\."  # of a checkpoint without a classification head
CLASSIFIES = "ForSequenceClassification"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """A classification head: out(norm(activation(dense(x)))).

    has_norm: whether there is the norm. pooling: which state of the tokens is read.
    """

    num_labels: int
    activation: Callable[[Tensor], Tensor] = torch.tanh
    dense_bias: bool = True
    has_norm: bool = False
    pooling: Literal["cls", "mean"] = "cls"


class ClassificationHead(nn.Module):
    """Maps the state of a text to a logit for each label."""

    def __init__(self, config: EncoderConfig, head: HeadConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.dense = Linear(size, size, bias=head.dense_bias)
        self.activation = head.activation
        self.norm: LayerNorm | None = config.new_norm() if head.has_norm else None
        self.out = Linear(size, head.num_labels, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """[N, hidden] -> [N, labels]."""
        x = self.activation(self.dense(x))
        out: Tensor = self.out(x if self.norm is None else self.norm(x))
        return out


def head_of(config: Any, **options: Any) -> HeadConfig | None:
    """Returns the head of a checkpoint whose class classifies; None for others."""
    names = getattr(config, "architectures", None) or ()
    if not names or not names[0].endswith(CLASSIFIES):
        return None
    return HeadConfig(num_labels=config.num_labels, **options)


class EncoderModel(nn.Module):
    """An encoder that gives vectors, and scores if it has a head. It cannot generate text.

    A family gives its config, the names of its weights and its head. The vector of a text is the
    mean of its tokens where the checkpoint's folder does not say, as in sentence-transformers.
    """

    is_bidirectional = True
    is_embedder = True
    cache = ()  # nothing is kept between steps

    def __init__(
        self,
        config: EncoderConfig,
        renames: Renames,
        head: HeadConfig | None = None,
        *,
        ignored: Sequence[str] = (),
        new_encoder: Callable[[EncoderConfig], Encoder] = Encoder,
    ) -> None:
        """ignored: patterns of further keys that are not needed."""
        super().__init__()
        self.encoder = new_encoder(config)
        self.head = None if head is None else ClassificationHead(config, head)
        self.default_pooling = "mean" if head is None else head.pooling
        self.num_layers, self.hidden_size = config.num_layers, config.hidden_size
        self.num_kv_heads, self.head_dim = config.num_heads, config.head_dim
        self.vocab_size = config.vocab_size
        if config.max_positions is not None:
            self.max_positions = config.max_positions
        if head is not None:
            self.score = self._score
        unused = () if head is not None else (POOLER,)
        patterns = (*IGNORED, *unused, *ignored)
        self.weight_map = WeightMap(self, renames=renames, ignored=patterns)

    @property
    def text_layers(self) -> Sequence[nn.Module]:
        """See hooks.Model."""
        return tuple(self.encoder.layers)

    def weight_targets(self, key: str) -> Sequence[Target] | None:
        """See hooks.Model."""
        return self.weight_map.targets(key)

    def positions(self, num_tokens: int, media: Sequence[MediaSpan]) -> Tensor | None:
        """Returns None: token i is at position i."""
        return None

    def forward(self, inputs: ForwardInputs) -> Tensor:
        """Returns the last hidden states, [T, hidden]."""
        out: Tensor = self.encoder(inputs)
        return out

    def _score(self, pooled: Tensor) -> Tensor:
        """[N, hidden] -> the logits of the labels, [N, labels]."""
        assert self.head is not None
        out: Tensor = self.head(pooled)
        return out
