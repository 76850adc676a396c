"""A forward pass over a batch of rows, its loss, and how many questions it answers."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
from data import Batch
from guide import Guide
from pixels import MERGE, PAIR
from targets import IGNORE
from torch import Tensor, nn
from transformers import Ernie4_5_VLMoeForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.ernie4_5_vl_moe.modeling_ernie4_5_vl_moe import load_balancing_loss_func
from transformers.utils.constants import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

BALANCE_WEIGHT = 0.005

# Legend for shapes: B rows, S positions, N labelled positions, P patches, H hidden size.


def normalise(patches: Tensor) -> Tensor:
    """Normalize uint8 [P, 3 * 14 * 14] as the image processor does."""
    mean = torch.tensor(OPENAI_CLIP_MEAN).repeat_interleave(patches.shape[1] // 3)
    std = torch.tensor(OPENAI_CLIP_STD).repeat_interleave(patches.shape[1] // 3)
    return (patches.float() / 255 - mean) / std


def attention_mask(branches: Tensor) -> Tensor:
    """Return the causal mask, bool [B, 1, S, S]: a branch attends to the prefix (0) and itself."""
    length = branches.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    same = branches[:, :, None] == branches[:, None, :]
    shared = (branches == 0)[:, None, :]
    return (causal & (same | shared))[:, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The model's outputs for a batch, and the labels."""

    logits: Tensor  # [N, vocabulary], at the labelled positions
    labels: Tensor  # [N]
    image_tokens: Tensor  # [image tokens, H], as they enter the text model
    halfway: Tensor  # [B, S, H], hidden states after half of the text model's layers
    is_image: Tensor  # bool [B, S]
    balance: Tensor  # loss that grows as the experts are used unevenly


def see(model: Ernie4_5_VLMoeForConditionalGeneration, batch: Batch) -> list[Tensor]:
    """Run vision tower and resampler; return one [tokens, H] per image or clip, in order."""
    patches = normalise(torch.from_numpy(batch.patches))
    grids = torch.from_numpy(batch.grids)
    features = model.model.vision_tower(patches, grids).last_hidden_state
    counts = batch.grids.prod(-1) // MERGE**2 // np.where(batch.grids[:, 0] > 1, PAIR, 1)
    return list(model.model.resampler_model(features, grids).split(counts.tolist()))


def predict(model: Ernie4_5_VLMoeForConditionalGeneration, batch: Batch) -> Prediction:
    """Run one forward pass through transformers' own class."""
    ids, branches = torch.from_numpy(batch.ids), torch.from_numpy(batch.branches)
    config = model.config
    media = [
        getattr(config, f"{kind}{part}_token_id")
        for kind in ("image", "video")
        for part in ("", "_start", "_end")
    ]
    seen = see(model, batch)
    is_clip = batch.grids[:, 0] > 1
    kinds = {
        "image": [tokens for tokens, clip in zip(seen, is_clip, strict=True) if not clip],
        "video": [tokens for tokens, clip in zip(seen, is_clip, strict=True) if clip],
    }
    outputs = {
        kind: BaseModelOutputWithPooling(pooler_output=tokens)
        for kind, tokens in kinds.items()
        if tokens
    }
    output = model.model(
        input_ids=ids,
        attention_mask=attention_mask(branches),
        position_ids=torch.from_numpy(batch.positions),
        moe_mm_token_type_ids=torch.isin(ids, torch.tensor(media)).int(),
        mm_encoder_outputs=outputs,
        output_router_logits=True,
        output_hidden_states=True,
        use_cache=False,
    )
    text = config.text_config
    balance = load_balancing_loss_func(
        output.router_logits, text.moe_num_experts, text.moe_k, (branches >= 0).int()
    )
    labels = torch.from_numpy(batch.labels)
    chosen = labels != IGNORE
    return Prediction(
        logits=model.lm_head(output.last_hidden_state[chosen]),
        labels=labels[chosen],
        image_tokens=torch.cat(seen),
        halfway=output.hidden_states[text.num_hidden_layers // 2],
        is_image=(ids == config.image_token_id) | (ids == config.video_token_id),
        balance=balance,
    )


def loss_of(
    model: Ernie4_5_VLMoeForConditionalGeneration, batch: Batch, guide: Guide | None = None
) -> Tensor:
    """Return the weighted cross-entropy of the answers plus small terms for balance and guide."""
    said = predict(model, batch)
    weights = torch.from_numpy(batch.weights[batch.labels != IGNORE])
    losses = nn.functional.cross_entropy(said.logits.float(), said.labels, reduction="none")
    loss = (losses * weights).sum() / weights.sum() + BALANCE_WEIGHT * said.balance
    if guide is None:
        return loss
    embeddings = model.get_input_embeddings().weight
    return loss + guide.seeing(said.image_tokens, embeddings, batch) + guide.reading(said, batch)


@torch.no_grad()
def accuracy(
    model: Ernie4_5_VLMoeForConditionalGeneration, held_out: list[Batch]
) -> dict[str, tuple[int, int]]:
    """Return (right, all) for each kind of question; right: all tokens, given the right prefix."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for batch in held_out:
        said = predict(model, batch)
        wrong = said.logits.argmax(-1) != said.labels
        chosen = torch.from_numpy(batch.labels) != IGNORE
        rows = chosen.nonzero()[:, 0]
        branches = torch.from_numpy(batch.branches)[chosen]
        missed = set(zip(rows[wrong].tolist(), branches[wrong].tolist(), strict=True))
        for row, kinds in enumerate(batch.kinds):
            for number, kind in enumerate(kinds, 1):
                counts[kind][0] += (row, number) not in missed
                counts[kind][1] += 1
    return {kind: (right, asked) for kind, (right, asked) in sorted(counts.items())}
