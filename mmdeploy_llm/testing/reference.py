"""Runs transformers' model of a folder as the reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from mmdeploy_llm.request import MediaInput, MediaSpan


class Reference:
    """transformers' model of `folder`, with attention in plain torch ("eager")."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        architecture = getattr(transformers, config.architectures[0])
        self.config = config
        self.model: Any = architecture.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager", trust_remote_code=False
        ).eval()

    @torch.inference_mode()
    def logits(self, prompt: Sequence[int], media: Sequence[MediaSpan] = ()) -> Tensor:
        """Returns the logits [len(prompt), vocab]."""
        ids = torch.tensor([list(prompt)])
        logits: Tensor = self.model(input_ids=ids, **self._media_inputs(ids, media)).logits[0]
        return logits

    @torch.inference_mode()
    def generate(
        self, prompt: Sequence[int], num_tokens: int, media: Sequence[MediaSpan] = ()
    ) -> list[int]:
        """Generates exactly `num_tokens` greedy tokens, ignoring end-of-sequence."""
        ids = torch.tensor([list(prompt)])
        out = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=num_tokens,
            eos_token_id=None,
            **self._media_inputs(ids, media),
        )
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens

    def positions(self, prompt: Sequence[int], media: Sequence[MediaSpan]) -> Tensor:
        """Returns the positions [3, len(prompt)] of an M-RoPE model."""
        ids = torch.tensor([list(prompt)])
        inputs = self._media_inputs(ids, media)
        positions, _ = self.model.model.get_rope_index(ids, **inputs)
        result: Tensor = positions[:, 0]
        return result

    def _media_inputs(self, ids: Tensor, media: Sequence[MediaSpan]) -> dict[str, Tensor]:
        """Returns the media arguments of a multimodal model, as its processor would."""
        if not media:
            return {}
        if self.config.model_type == "internvl":
            return {"pixel_values": torch.cat([self._tiles(span.item) for span in media])}
        if self.config.model_type == "gemma3":
            tiles = torch.cat([self._tiles(span.item) for span in media])
            return {"pixel_values": tiles, "token_type_ids": _kinds(ids, media)}
        if self.config.model_type == "lfm2_vl":
            return self._masked(media)
        if self.config.model_type == "minicpmv4_6":
            return self._strips(media)
        if self.config.model_type == "gemma4":
            return {**self._padded(media), "mm_token_type_ids": _kinds(ids, media)}
        inputs = {"mm_token_type_ids": _kinds(ids, media)}
        if self.config.model_type == "ernie4_5_vl_moe":
            inputs["moe_mm_token_type_ids"] = self._modalities(ids)
        for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
            items = [span.item for span in media if span.item.kind == kind]
            if items:
                inputs[pixels] = torch.cat([self._pixels(item) for item in items])
                inputs[f"{kind}_grid_thw"] = torch.tensor([item.grid_thw for item in items])
        return inputs

    def _pixels(self, item: MediaInput) -> Tensor:
        """Returns the item's pixels in transformers' layout."""
        pixels = item.tensors["pixels"]
        if self.config.model_type != "paddleocr_vl":
            return pixels
        # Patches row by row instead of block by block of merged patches.
        _, height, width = item.grid_thw or (1, 1, 1)
        vision = self.config.vision_config
        merge, patch = vision.spatial_merge_size, vision.patch_size
        blocks = pixels.view(height // merge, width // merge, merge, merge, -1)
        return blocks.transpose(1, 2).reshape(height * width, -1, patch, patch)

    def _padded(self, media: Sequence[MediaSpan]) -> dict[str, Tensor]:
        """Returns images and frames of Gemma 4, all padded to the largest: line by line, channels
        last."""
        inputs: dict[str, Tensor] = {}
        merge = merge_size(self.config)
        longest = max(len(lines) for span in media for lines in _lines(span.item, merge)[0])
        names = {"image": ("pixel_values", "image"), "video": ("pixel_values_videos", "video")}
        for kind, (pixels_name, prefix) in names.items():
            items = [_lines(span.item, merge) for span in media if span.item.kind == kind]
            frames = [frame for lines, _ in items for frame in lines]
            if frames:
                pad = [(0, 0, 0, longest - len(frame)) for frame in frames]
                places = [places for lines, places in items for _ in lines]
                inputs[pixels_name] = torch.stack(list(map(F.pad, frames, pad)))
                padded = [F.pad(own, by, value=-1) for own, by in zip(places, pad, strict=True)]
                inputs[f"{prefix}_position_ids"] = torch.stack(padded)
            if kind == "video" and items:
                inputs["num_frames_per_video"] = torch.tensor([len(lines) for lines, _ in items])
        return inputs

    def _masked(self, media: Sequence[MediaSpan]) -> dict[str, Tensor]:
        """Returns the tiles of LFM2-VL, all padded to the largest: line by line, channels last."""
        merge = merge_size(self.config)
        patches: list[Tensor] = []
        sizes: list[list[int]] = []
        for item in (span.item for span in media):
            pixels = item.tensors["pixels"]
            grids = [item.grid_thw or (1, 1, 1)]
            if "thumbnail" in item.tensors:
                grids.append((1, *item.tensors["thumbnail"].tolist()))
            for frames, height, width in grids:
                count = frames * height * width
                own, pixels = pixels[:count], pixels[count:]
                part = replace(item, tensors={"pixels": own}, grid_thw=(frames, height, width))
                patches += _lines(part, merge)[0]
                sizes += [[height, width]] * frames
        longest = max(map(len, patches))
        counts = torch.tensor([len(tile) for tile in patches])
        return {
            "pixel_values": torch.stack([F.pad(x, (0, 0, 0, longest - len(x))) for x in patches]),
            "pixel_attention_mask": (torch.arange(longest) < counts[:, None]).int(),
            "spatial_shapes": torch.tensor(sizes),
        }

    def _strips(self, media: Sequence[MediaSpan]) -> dict[str, Tensor]:
        """Returns the slices of MiniCPM-V, each line by line, their patches side by side."""
        tiles = [tile for span in media for tile in self._tiles(span.item)]
        patch = patch_size(self.config)
        strips = [F.unfold(tile[None], patch, stride=patch)[0] for tile in tiles]
        pixels = torch.cat(strips, 1).view(-1, patch, patch, sum(x.shape[1] for x in strips))
        return {
            "pixel_values": pixels.transpose(2, 3).flatten(2)[None],
            "target_sizes": torch.tensor([[side // patch for side in x.shape[1:]] for x in tiles]),
        }

    def _tiles(self, item: MediaInput) -> Tensor:
        """Returns the tiles of an image, [tiles, channels, height, width]."""
        num_tiles, height, width = item.grid_thw or (1, 1, 1)
        merge, patch = merge_size(self.config), patch_size(self.config)
        rows = item.tensors["pixels"].view(
            num_tiles, height // merge, width // merge, merge, merge, -1, patch, patch
        )  # blocks of patches, which a tile has line by line
        lines = rows.permute(0, 5, 1, 3, 6, 2, 4, 7)
        return lines.reshape(num_tiles, -1, height * patch, width * patch)

    def _modalities(self, ids: Tensor) -> Tensor:
        """Returns 1 for tokens of an image, 2 of a video, markers included, and 0 for text."""
        kinds = torch.zeros_like(ids)
        for number, kind in ((1, "image"), (2, "video")):
            for suffix in ("", "_start", "_end"):
                kinds[ids == getattr(self.config, f"{kind}{suffix}_token_id")] = number
        return kinds


def _kinds(ids: Tensor, media: Sequence[MediaSpan]) -> Tensor:
    """Returns 1 for tokens of an image, 2 of a video, without markers, and 0 for text."""
    kinds = torch.zeros_like(ids)
    for span in media:
        for start, end in span.runs:
            kinds[0, start:end] = 1 if span.item.kind == "image" else 2
    return kinds


def _lines(item: MediaInput, merge: int) -> tuple[Sequence[Tensor], Tensor]:
    """Returns the patches of each frame [rows * columns, values] line by line, channels last, and
    their (column, row)."""
    frames, height, width = item.grid_thw or (1, 1, 1)
    blocks = item.tensors["pixels"].view(
        frames, height // merge, width // merge, merge, merge, 3, -1
    )
    lines = blocks.permute(0, 1, 3, 2, 4, 6, 5).reshape(frames, height * width, -1)
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return lines.unbind(), torch.stack([columns, rows], -1).view(-1, 2)


def random_media(
    config: Any, grid: tuple[int, int, int], *, kind: str = "image", seed: int = 0
) -> MediaInput:
    """Returns random pixels of `grid` (frames, rows and columns of patches) for the vision tower
    that the config describes."""
    vision = config.vision_config
    channels = int(getattr(vision, "num_channels", 0) or getattr(vision, "in_channels", 3))
    patch_dim = channels * patch_size(config) ** 2
    patch_dim *= getattr(vision, "temporal_patch_size", 1)
    frames, height, width = grid
    num_patches = frames * height * width
    generator = torch.Generator().manual_seed(seed)
    merged = merge_size(config) ** 2
    if kind == "video":
        merged *= getattr(vision, "temporal_merge_size", 1)
    return MediaInput(
        kind=kind,
        tensors={"pixels": torch.randn(num_patches, patch_dim, generator=generator)},
        num_tokens=num_patches // merged,
        key=f"{kind}-{grid}-{seed}",
        grid_thw=grid,
    )


def patch_size(config: Any) -> int:
    """Returns the pixels along a side of a patch; some configs give both sides."""
    size = config.vision_config.patch_size
    return int(size[0] if isinstance(size, (list, tuple)) else size)


def merge_size(config: Any) -> int:
    """Returns the patches along a side of the block that becomes a token."""
    ratio, vision = getattr(config, "downsample_ratio", None), config.vision_config
    if config.model_type == "gemma3":
        return int(vision.image_size // vision.patch_size // math.isqrt(config.mm_tokens_per_image))
    if config.model_type == "minicpmv4_6":
        return 2 if config.downsample_mode == "4x" else 4
    if ratio is not None:
        return int(round(1 / ratio))  # noqa: RUF046 - a config's number may be any type
    own = getattr(vision, "spatial_merge_size", getattr(config, "downsample_factor", None))
    return int(vision.pooling_kernel_size if own is None else own)
