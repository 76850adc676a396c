"""The tower of Pix2Struct and Kosmos-2.5, which reads patches with their rows and columns.

    x = projection of the pixels + embedding of the row + embedding of the column
    x = x + attention(norm(x))        to all patches of the picture
    x = x + mlp(norm(x))

Shapes: P patches of all pictures, n of one, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmdeploy_llm.layers import GatedMLP, KernelLayer, Linear, MergedLinear, RMSNorm, Segments
from mmdeploy_llm.weights.map import Replacement

from .decoder import activation_of

LAYER = r"\.encoder\.layer\.(\d+)\."
# From transformers' names, after those that lead to the tower, to those of the layers here.
RENAMES: Sequence[tuple[str, Replacement]] = (
    (r"\.embeddings\.(row|column)_embedder\.weight$", r".\1s"),
    (r"\.embeddings\.patch_projection\.", ".projection."),
    (rf"{LAYER}attention\.output\.", r".layers.\1.out_proj."),
    (rf"{LAYER}attention\.", r".layers.\1."),
    (rf"{LAYER}pre_attention_layer_norm\.", r".layers.\1.norm."),
    (rf"{LAYER}pre_mlp_layer_norm\.", r".layers.\1.mlp_norm."),
    (rf"{LAYER}mlp\.wi_0\.", r".layers.\1.mlp.gate_proj."),
    (rf"{LAYER}mlp\.wi_1\.", r".layers.\1.mlp.up_proj."),
    (rf"{LAYER}mlp\.wo\.", r".layers.\1.mlp.down_proj."),
    (r"\.layernorm\.", ".norm."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchTowerConfig:
    """Sizes and options of a PatchTower. patch_size: values of a patch. num_places: rows of the
    tables of rows and columns, the first of which is of none. scale: factor of the scores."""

    patch_size: int
    num_places: int
    size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    activation: str
    norm_eps: float
    scale: float


def filled(patches: Tensor) -> Tensor:
    """Returns the patches of a picture without the rows of zeros after them."""
    return patches[patches.sum(-1) != 0]


class PatchLayer(KernelLayer):
    """Attention and MLP, each after its norm."""

    def __init__(self, config: PatchTowerConfig) -> None:
        super().__init__()
        size, inner = config.size, config.num_heads * config.head_dim
        self.shape = -1, config.num_heads, config.head_dim
        # Kernels scale by D ** -0.5.
        self.factor = config.scale * config.head_dim**0.5
        self.qkv = MergedLinear(size, {"query": inner, "key": inner, "value": inner})
        self.out_proj = Linear(inner, size)
        self.mlp = GatedMLP(
            size, config.intermediate_size, activation=activation_of(config.activation)
        )
        self.norm, self.mlp_norm = (RMSNorm(size, config.norm_eps) for _ in range(2))

    def forward(
        self, x: Tensor, residual: Tensor | None, segments: Segments, ends: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Returns (output, residual stream), not yet added. x: of the patches, and of one more for
        each picture where the tower adds them, which no other sees. ends: of the pictures."""
        x, residual = self.norm.add(x, residual)
        q, k, v = (part.reshape(self.shape) for part in self.qkv(x).chunk(3, -1))
        if self.factor != 1:
            q = q * self.factor
        count = ends[-1]
        found = [segments.attend(q[:count], k[:count], v[:count], self.kernels)]
        if len(x) > count:
            for number, (start, end) in enumerate(pairwise((0, *ends))):
                own = q[count + number][None], k[start:end], v[start:end]
                heads, keys, values = (part.transpose(0, 1)[None] for part in own)
                out = F.scaled_dot_product_attention(heads, keys, values)
                found.append(out[0].transpose(0, 1))
        attended = found[0] if len(found) == 1 else torch.cat(found)
        x, residual = self.mlp_norm.add(self.out_proj(attended.flatten(1)), residual)
        return self.mlp(x), residual


class PatchTower(nn.Module):
    """Maps the patches of pictures to their states."""

    def __init__(self, config: PatchTowerConfig) -> None:
        super().__init__()
        self.projection = Linear(config.patch_size, config.size, bias=True)
        shape = config.num_places, config.size
        self.rows, self.columns = (
            nn.Parameter(torch.empty(shape), requires_grad=False) for _ in range(2)
        )
        self.layers = nn.ModuleList(PatchLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.size, config.norm_eps)

    def forward(self, pictures: Sequence[Tensor], *, adds_empty: bool = False) -> list[Tensor]:
        """Returns the states of each picture, [n, size]; with adds_empty of one patch more, a row
        of zeros, which sees the picture. pictures: [n, 2 + patch size] float32: row, column, pixels
        of each patch."""
        device = self.rows.device
        empty = [pictures[0].new_zeros(len(pictures), pictures[0].shape[1])] if adds_empty else []
        patches = torch.cat([*pictures, *empty]).to(device)
        rows, columns = patches[:, :2].long().unbind(1)
        x: Tensor = self.projection(patches[:, 2:].to(self.rows.dtype))
        x = x + self.rows[rows] + self.columns[columns]
        ends = [*accumulate(len(one) for one in pictures)]
        segments, residual = Segments([len(one) for one in pictures], device), None
        for layer in self.layers:
            x, residual = layer(x, residual, segments, ends)
        x, _ = self.norm.add(x, residual)
        found = [x[start:end] for start, end in pairwise((0, *ends))]
        if not adds_empty:
            return found
        return [torch.cat(pair) for pair in zip(found, x[ends[-1] :, None], strict=True)]
