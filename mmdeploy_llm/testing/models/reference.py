"""Runs transformers' model of a folder as the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from mmdeploy_llm.request import MediaInput, MediaSpan
from mmdeploy_llm.testing.tiny import form_of, patch_size


class Reference:
    """transformers' model of `folder`, with attention in plain torch ("eager")."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        architecture = getattr(transformers, config.architectures[0])
        self.config = config
        self.form = form_of(config.architectures)
        self.model: Any = architecture.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager", trust_remote_code=False
        ).eval()
        rules = getattr(self.model, "generation_config", None)  # encoders have none
        for name in ("suppress_tokens", "begin_suppress_tokens"):  # of answers, not the model
            if rules is not None:
                setattr(rules, name, None)

    @torch.inference_mode()
    def logits(self, prompt: Sequence[int], media: Sequence[MediaSpan] = ()) -> Tensor:
        """Returns the logits [len(prompt), vocab]."""
        ids = torch.tensor([list(prompt)])
        logits: Tensor = self.model(**self._inputs(ids, media)).logits[0]
        return logits

    def reads(
        self, parameter: Tensor, prompts: Sequence[tuple[Sequence[int], Sequence[MediaSpan]]]
    ) -> bool:
        """Whether logits change with a parameter of the model: with those of a pooler they may
        not."""
        kept = parameter.detach().clone()
        before = [self.logits(*prompt) for prompt in prompts]
        with torch.no_grad():
            parameter.add_(torch.randn_like(parameter))
            after = [self.logits(*prompt) for prompt in prompts]
            parameter.copy_(kept)
        return not all(map(torch.equal, before, after))

    @torch.inference_mode()
    def generate(
        self, prompt: Sequence[int], num_tokens: int, media: Sequence[MediaSpan] = ()
    ) -> list[int]:
        """Generates exactly `num_tokens` greedy tokens, ignoring end-of-sequence."""
        ids = torch.tensor([list(prompt)])
        inputs = self._inputs(ids, media)
        if "input_ids" in inputs:
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        options = {"do_sample": False, "max_new_tokens": num_tokens, "eos_token_id": None}
        if self.form.generate is None:
            out = self.model.generate(**options, **inputs)
        else:
            out = self.form.generate(self.model, inputs, options)
        tokens: list[int] = out[0].tolist()
        # Of some families, generate returns the new tokens alone.
        return tokens[len(prompt) :] if tokens[: len(prompt)] == list(prompt) else tokens

    def positions(self, prompt: Sequence[int], media: Sequence[MediaSpan]) -> Tensor:
        """Returns the positions [3, len(prompt)] of an M-RoPE model."""
        ids = torch.tensor([list(prompt)])
        inputs = self._media_inputs(ids, media)
        positions, _ = self.model.model.get_rope_index(ids, **inputs)
        result: Tensor = positions[:, 0]
        return result

    def _inputs(self, ids: Tensor, media: Sequence[MediaSpan]) -> dict[str, Tensor]:
        """Returns the model's arguments; where a decoder gets the ids, the encoder gets its own."""
        found = self._media_inputs(ids, media)
        return _given(found if "decoder_input_ids" in found else {"input_ids": ids, **found})

    def _media_inputs(self, ids: Tensor, media: Sequence[MediaSpan]) -> dict[str, Tensor]:
        """Returns the media arguments of a multimodal model, as its processor would."""
        return self.form.inputs(self.config, ids, media) if media else {}


def _given(inputs: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Returns the arguments without those that the model has not: an encoder may read no ids."""
    return {name: value for name, value in inputs.items() if value is not None}


def random_media(
    config: Any, grid: tuple[int, int, int], *, merge: int, kind: str = "image", seed: int = 0
) -> MediaInput:
    """Returns random pixels of `grid` (frames, rows and columns of patches) for the vision tower
    that the config describes. merge: patches along a side of the block that becomes a token."""
    vision = config.vision_config
    channels = int(getattr(vision, "num_channels", 0) or getattr(vision, "in_channels", 3))
    patch_dim = channels * patch_size(config) ** 2
    patch_dim *= getattr(vision, "temporal_patch_size", 1)
    frames, height, width = grid
    num_patches = frames * height * width
    generator = torch.Generator().manual_seed(seed)
    merged = merge**2
    if kind == "video":
        merged *= getattr(vision, "temporal_merge_size", 1)
    return MediaInput(
        kind=kind,
        tensors={"pixels": torch.randn(num_patches, patch_dim, generator=generator)},
        num_tokens=num_patches // merged,
        key=f"{kind}-{grid}-{seed}",
        grid_thw=grid,
    )
