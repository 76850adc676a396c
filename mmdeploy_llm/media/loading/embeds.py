"""Media given as embeddings that the caller computed: checked, hashed, made a MediaInput.

{"image_embeds": [tokens, media_size], "grid": (time, rows, columns)}
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from mmdeploy_llm.errors import MediaError, UnsupportedMediaError
from mmdeploy_llm.hooks import MediaInput, MediaLimits

from .forms import Embeds

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = ("float64", "float32", "bfloat16", "float16")
Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedsReader:
    """Reads embeddings for one model.

    dtype: the name of the model's, to which they are converted. media_size: the width of the rows
    that the model's encoder returns; None: unknown, as without weights.
    """

    dtype: str = "float32"
    media_size: int | None = None

    def describe(
        self,
        kind: str,
        given: Embeds,
        limits: MediaLimits,
        embedded: Callable[[int, Grid | None], MediaInput],
    ) -> MediaInput:
        """Returns the item without its embeddings, whose shape and grid are checked.

        embedded: MediaProcessor.embedded with the item's options. Raises MediaError and its
        subclasses.
        """
        name = f"{kind}_embeds"
        values = _tensor(name, given.values)
        limits.check_bytes(values.nbytes, name)
        num_tokens, width = values.shape
        if self.media_size not in (None, width):
            raise MediaError(
                f"{name} has rows of {width} values, the encoder of this model returns rows of "
                f"{self.media_size}; give its whole output, features of inner layers included"
            )
        grid = _grid(name, given.grid)
        made = embedded(num_tokens, grid)
        if made.num_tokens != num_tokens:
            raise MediaError(
                f"{name} has {num_tokens} rows, but its grid {grid} has {made.num_tokens} tokens; "
                "'grid' counts patches in (time, rows, columns) before they are merged"
            )
        return made

    def read(self, given: Embeds, made: MediaInput) -> MediaInput:
        """Returns the item `made` by `describe` with its embeddings and their key. Raises
        MediaError for values that are not finite."""
        import torch  # not at import: reports read media without it

        values = _tensor(f"{made.kind}_embeds", given.values).detach().cpu().contiguous()
        # A copy: the caller may change its tensor, of which the key would then be wrong.
        embeds = values.to(getattr(torch, self.dtype), copy=True)
        if not bool(embeds.isfinite().all()):
            raise MediaError(
                f"{made.kind}_embeds has values that are not finite in {self.dtype}; check how "
                "they were computed"
            )
        extras = sorted((name, tensor.tolist()) for name, tensor in made.tensors.items())
        content = (made.kind, str(values.dtype), tuple(values.shape), made.grid_thw, extras)
        digest = blake2b(f"embeds\0{content!r}\0".encode(), digest_size=20)
        data: Any = values.view(torch.uint8).numpy()
        digest.update(data)
        return replace(made, embeds=embeds, key=digest.hexdigest())

    def adopt(self, made: MediaInput) -> MediaInput:
        """Returns an item whose processor has encoded it, in the model's dtype. Raises MediaError
        for embeddings that the model cannot take."""
        import torch

        values = _tensor(f"the embeds of the {made.kind}", made.embeds)
        wanted = (made.num_tokens, self.media_size or values.shape[1])
        if tuple(values.shape) != wanted:
            raise MediaError(
                f"the embeds of the {made.kind} must have the shape {list(wanted)} [tokens, "
                f"media_size], got {list(values.shape)}"
            )
        return replace(made, embeds=values.detach().cpu().to(getattr(torch, self.dtype)))


def _tensor(name: str, values: Any) -> Tensor:
    """Returns the values as a dense tensor [tokens, width]. Raises MediaError and its
    subclasses."""
    import numpy as np
    import torch
    from torch import Tensor

    if isinstance(values, np.ndarray) and values.dtype.kind == "f":
        values = torch.from_numpy(values)
    if not isinstance(values, Tensor):
        raise UnsupportedMediaError(
            f"{name} must be a tensor or an array of floating-point numbers, got "
            f"{type(values).__name__}"
        )
    if values.layout is not torch.strided or values.is_meta:
        raise UnsupportedMediaError(f"{name} must be a dense tensor with values")
    if values.dtype not in [getattr(torch, known) for known in DTYPES]:
        raise UnsupportedMediaError(
            f"{name} must have one of the dtypes {', '.join(DTYPES)}, got {values.dtype}"
        )
    if values.ndim != 2 or 0 in values.shape:
        raise MediaError(
            f"{name} must have the shape [tokens, media_size], got {list(values.shape)}; give a "
            "list with one dict for each item"
        )
    return values


def _grid(name: str, grid: Any) -> Grid | None:
    """Returns the grid as three positive whole numbers; None when there is none."""
    if grid is None:
        return None
    values = grid.tolist() if callable(getattr(grid, "tolist", None)) else grid
    try:
        time, rows, columns = map(operator.index, values)
    except (TypeError, ValueError):
        time = rows = columns = 0
    if min(time, rows, columns) < 1:
        raise MediaError(
            f"'grid' of {name} must be three whole numbers above 0, patches in (time, rows, "
            f"columns), got {values!r:.80}"
        )
    return time, rows, columns
