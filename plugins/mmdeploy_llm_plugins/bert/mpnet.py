"""MPNet: BERT with a learned number for each distance of two tokens, added to their scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.forward import ForwardInputs
from mmdeploy_llm.layers import Embedding

from .encoder import Encoder, EncoderConfig, SelfAttention, Step
from .families import BERT_NAMES, HEAD_NAMES, IN_ENCODER, encoder_config
from .model import EncoderModel, head_of

NUM_BUCKETS, FAR = 32, 128  # transformers' class has them fixed
PADDING_ID = 1  # by which it counts positions, whatever the config says
RENAMES = (
    (r"^mpnet\.", ""),
    (r"^encoder\.relative_attention_bias\.", "encoder.bias."),
    (r"^(encoder\.layer\.\d+)\.attention\.attn\.([qkv])\.", r"\1.self_attn.\2_proj."),
    (r"^(encoder\.layer\.\d+)\.attention\.attn\.o\.", r"\1.self_attn.o_proj."),
    (r"^(encoder\.layer\.\d+)\.attention\.LayerNorm\.", r"\1.attention_norm."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BiasedStep(Step):
    """texts: the rows of each text. bias: [H, L, L], added to the scores, where L is the length of
    the longest text."""

    texts: Sequence[slice]
    bias: Tensor


class BiasedAttention(SelfAttention):
    """Attention whose scores have a number added, text by text in plain torch."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """See SelfAttention."""
        assert isinstance(step, BiasedStep)
        out = torch.empty_like(q)
        for rows in step.texts:
            size = rows.stop - rows.start
            own_q, own_k, own_v = (x[rows].transpose(0, 1) for x in (q, k, v))
            bias = step.bias[:, :size, :size]
            attended = F.scaled_dot_product_attention(own_q, own_k, own_v, attn_mask=bias)
            out[rows] = attended.transpose(0, 1)
        return out


class MPNetEncoder(Encoder):
    """The encoder with its table of numbers, which all layers share."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config, BiasedAttention)
        self.bias = Embedding(NUM_BUCKETS, config.num_heads)

    def begin(self, inputs: ForwardInputs, starts: Tensor) -> Step:
        """See Encoder."""
        firsts = [*sorted(set(starts.tolist())), len(starts)]
        texts = [slice(first, end) for first, end in pairwise(firsts)]
        longest = max(text.stop - text.start for text in texts)
        table = self.bias(buckets(longest).flatten().to(starts.device))
        bias = table.view(longest, longest, -1).permute(2, 0, 1).contiguous()
        return BiasedStep(attn=inputs.attn, starts=starts, texts=texts, bias=bias)


def buckets(size: int) -> Tensor:
    """Returns the row of the table for each two of `size` tokens, [query, key] int64: one row for
    each short distance, then rows for longer and longer ranges, for keys after and before."""
    tokens, half = torch.arange(size), NUM_BUCKETS // 2
    distance = tokens[:, None] - tokens
    away, exact = distance.abs(), half // 2
    spread = torch.log(away.float() / exact) / math.log(FAR / exact) * (half - exact)
    far = (exact + spread.clamp(min=0).long()).clamp(max=half - 1)
    return (distance < 0) * half + torch.where(away < exact, away, far)


class MPNetModel(EncoderModel):
    """transformers' MPNetModel and MPNetForSequenceClassification."""

    def __init__(self, config: Any) -> None:
        if config.relative_attention_num_buckets != NUM_BUCKETS:
            raise ModelNotSupportedError(
                f"relative_attention_num_buckets {config.relative_attention_num_buckets} of this "
                f"mpnet model is not supported, only {NUM_BUCKETS}"
            )
        own = encoder_config(
            config,
            num_positions=config.max_position_embeddings,
            padding_id=PADDING_ID,
            num_types=0,
        )
        super().__init__(
            own,
            (*RENAMES, *BERT_NAMES, *HEAD_NAMES, *IN_ENCODER),
            head_of(config),
            new_encoder=MPNetEncoder,
        )
