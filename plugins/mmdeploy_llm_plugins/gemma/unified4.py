"""Gemma 4 Unified (12B): the decoder of Gemma 4 without towers. Blocks of pixels and frames of
sound are projected into the decoder as they are.

image --> blocks of 48 x 48 pixels   the processor of Gemma 4, whose 3 x 3 patches are one block
block --> one embedding              PatchEmbedder, Projector
sound --> frames of 40 ms            transformers' processor
frame --> one embedding              Projector
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmdeploy_llm.errors import MediaError, ModelNotSupportedError
from mmdeploy_llm.hooks import MediaInput
from mmdeploy_llm.layers import Grid, LayerNorm, Linear, media_grid, to_device

from .model4 import Gemma4ForCausalLM, Projector

EPS = 1e-5  # of its LayerNorms, torch's default


class PatchEmbedder(nn.Module):
    """Turns blocks of pixels into vectors: a projection between norms, and a learned position for
    the column and the row of a block."""

    def __init__(self, vision: Any) -> None:
        """vision: transformers' config."""
        super().__init__()
        self.merge, self.patch = vision.pooling_kernel_size, vision.patch_size
        pixels, inner = 3 * (self.merge * self.patch) ** 2, vision.mm_embed_dim
        self.patch_ln1 = LayerNorm(pixels, EPS)
        self.patch_dense = Linear(pixels, inner, bias=True)
        self.patch_ln2 = LayerNorm(inner, EPS)
        self.pos_embedding = nn.Parameter(
            torch.empty(vision.mm_posemb_size, 2, inner), requires_grad=False
        )
        self.pos_norm = LayerNorm(inner, EPS)

    def forward(self, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Computes patches [P, 3 * patch ** 2], in blocks -> [M, size]. grids: patches of each item
        in (time, rows, columns)."""
        k, p = self.merge, self.patch
        blocks = pixels.view(-1, k, k, 3, p, p).permute(0, 1, 4, 2, 5, 3)  # lines, channels last
        x = self.patch_ln1(blocks.reshape(len(blocks), -1).to(self.pos_embedding.dtype))
        x = self.patch_ln2(self.patch_dense(x))
        columns, rows = self._places(grids, x.device)
        x = x + self.pos_embedding[columns, 0] + self.pos_embedding[rows, 1]
        out: Tensor = self.pos_norm(x)
        return out

    def _places(self, grids: Sequence[Grid], device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns the column and the row of each block, [M] each. Raises MediaError for more blocks
        in a line than there are positions."""
        found = []
        for frames, height, width in grids:
            num_rows, num_columns = height // self.merge, width // self.merge
            if max(num_rows, num_columns) > len(self.pos_embedding):
                raise MediaError(
                    f"an image of {num_columns} x {num_rows} tokens does not fit into the "
                    f"{len(self.pos_embedding)} positions of this model; make it smaller"
                )
            cells = torch.cartesian_prod(torch.arange(num_rows), torch.arange(num_columns))
            found.append(cells.view(-1, 2).repeat(frames, 1))
        places = to_device(torch.cat(found), device)
        return places[:, 1], places[:, 0]


class Gemma4UnifiedForConditionalGeneration(Gemma4ForCausalLM):
    """transformers' Gemma4UnifiedForConditionalGeneration. Raises ModelNotSupportedError for a
    config without images."""

    def __init__(self, config: Any) -> None:
        if config.vision_config is None:
            raise ModelNotSupportedError(
                "vision_config of this gemma4_unified model is empty; a model of text alone has "
                "the architecture Gemma4UnifiedForCausalLM"
            )
        super().__init__(config.text_config, is_tied=config.tie_word_embeddings)
        self.embedder = PatchEmbedder(config.vision_config)
        self.projector = Projector(config.vision_config, self.hidden_size)
        if config.audio_config is not None:
            self.audio_projector = Projector(config.audio_config, self.hidden_size)
        self.weight_map = self.map_of(config.text_config)

    def encode_media(self, items: Sequence[MediaInput]) -> Sequence[Tensor]:
        """Returns [num_tokens, hidden] for each item; all images and videos are embedded together,
        each sound by itself."""
        device = self.model.embed_tokens.weight.device
        seen = [item for item in items if item.kind != "audio"]
        found = {id(item): self._heard(item, device) for item in items if item.kind == "audio"}
        if seen:
            pixels = torch.cat([to_device(item.tensors["pixels"], device) for item in seen])
            rows = self.projector(self.embedder(pixels, [media_grid(item) for item in seen]))
            split = torch.split(rows, [item.num_tokens for item in seen])
            found |= {id(item): own for item, own in zip(seen, split, strict=True)}
        return [found[id(item)] for item in items]

    def _heard(self, item: MediaInput, device: torch.device) -> Tensor:
        """Returns the embeddings of a sound's frames. Raises MediaError for a model without any."""
        if not hasattr(self, "audio_projector"):
            raise MediaError("this Gemma 4 Unified takes no sounds: its audio_config is empty")
        frames = item.tensors["input_features"].to(device, self.audio_projector.linear.weight.dtype)
        rows: Tensor = self.audio_projector(frames[item.tensors["input_features_mask"].to(device)])
        return rows
