"""Masks of models in which all media of a prompt see each other, across the text between them. The
model's own `create_masks_for_generate` makes them, for one sequence after the other.

    prompt     t t [ image A ] t [ image B ] t     whole, in one step
    types      0 0   1 1 1     0   1 1 1     0     of its tokens, after those in the cache
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmdeploy_llm_plugins.transformers_parts.cache.pages import REFERENCE, PagedLayer

from .probe import attention_of

# Class -> fields of its config with the ids of tokens that are part of media: the markers around
# patches, and the patches, which a separator may follow.
MARKERS = {
    "Molmo2ForConditionalGeneration": (
        "image_start_token_id",
        "low_res_image_start_token_id",
        "image_end_token_id",
        "frame_start_token_id",
        "frame_end_token_id",
    )
}
# Classes all of whose tokens see the whole prompt, and the last ones of the answer: an attention of
# reference windows.
REFERENCES = ("UnlimitedOcrForConditionalGeneration",)
KNOWN = (*MARKERS, *REFERENCES)
# Their forward adds the embeddings of media to those of their placeholder.
ADDED = ("Molmo2ForConditionalGeneration",)


def types_of(name: str, config: Any, ids: Tensor, in_prompt: Tensor) -> Tensor:
    """Returns transformers' mm_token_type_ids [n] of a prompt's tokens: 1 where they are part of
    media. ids, in_prompt: [n]."""
    patch = config.image_token_id
    markers = [getattr(config, field) for field in MARKERS[name]]
    is_marker = torch.isin(ids, torch.tensor([patch, *markers], device=ids.device))
    follows = (ids == patch).roll(1)
    follows[:1] = False
    found: Tensor = (is_marker | follows) & in_prompt
    return found.long()


def make(inner: Any, cache: Any, embeds: Tensor, positions: Tensor, types: Tensor) -> Any:
    """Returns what the decoder takes as attention_mask.

    inner: the model. cache: transformers', before this step. embeds [1, n, hidden] and positions
    [1, n] of the step's tokens. types: [n].
    """
    types = torch.nn.functional.pad(types, (int(cache.get_seq_length()), 0))
    with attention_of(inner.config.get_text_config(), "eager"):
        return inner.create_masks_for_generate(
            config=inner.config,
            inputs_embeds=embeds,
            attention_mask=None,
            cache=cache,
            position_ids=positions,
            mm_token_type_ids=types.unsqueeze(0),
        )


def of_reference(cache: Any, decoder: Any, in_prompt: Tensor) -> dict[str, Tensor]:
    """Returns kind of layer -> mask [1, 1, n, L] of reference windows. Whether a token is of the
    prompt is kept in the pages as keys are, so that it outlives steps.

    cache: of the sequence, before this step. in_prompt: [n], of its new tokens.
    """
    layer: PagedLayer = cache.layers[0]
    dtype = next(decoder.parameters()).dtype
    rows = in_prompt.to(dtype).unsqueeze(1)
    found, _ = layer.extend("in prompt", rows, rows[:, :0])
    keys = torch.arange(len(found), device=rows.device)
    queries = keys[len(found) - len(rows) :].unsqueeze(1)
    is_near = queries - keys < decoder.config.sliding_window
    is_before = keys <= queries
    sees = {"full_attention": is_before, REFERENCE: is_before & (is_near | (found[:, 0] > 0.5))}
    least = torch.finfo(dtype).min
    return {
        kind: rows.new_zeros(seen.shape).masked_fill(~seen, least)[None, None]
        for kind, seen in sees.items()
    }
