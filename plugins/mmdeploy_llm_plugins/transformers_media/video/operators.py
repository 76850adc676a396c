"""Computes by torch what transformers' video processors take from torchvision, as torchvision does.

transformers' image processors have a variant for Pillow, its video processors have none. They call
four functions of torchvision, which only pass tensors on to torch; these are here, so that videos
need no torchvision, whose build must match torch's, and the pixels are the same.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

PILLOW_MODES = ("nearest-exact", "lanczos", "bilinear", "bicubic", "box", "hamming")
SMOOTH = ("bilinear", "bicubic", "lanczos")
HAS_LANCZOS = torch.__version__ >= "2.12"  # of tensors, as torchvision of the same time has


class Mode(enum.Enum):
    """torchvision's names for ways to resize."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    LANCZOS = "lanczos"
    BOX = "box"
    HAMMING = "hamming"


class Torchvision:
    """Takes the place of torchvision and of its modules of functions."""

    InterpolationMode = Mode
    transforms: Any
    v2: Any
    functional: Any

    @staticmethod
    def resize(
        image: Tensor,
        size: Sequence[int],
        interpolation: Mode = Mode.BILINEAR,
        antialias: bool | None = True,
    ) -> Tensor:
        """Resizes [..., channels, height, width]. Bytes are interpolated as bytes where torch has a
        kernel for these, else as float32 and rounded.

        Source: torchvision.transforms.v2.functional.resize_image.
        """
        if tuple(image.shape[-2:]) == tuple(size):
            return image
        is_smooth = interpolation.value in SMOOTH
        values = image.reshape(-1, *image.shape[-3:])
        if is_smooth and image.dtype == torch.uint8 and not _has_bytes(interpolation):
            values = values.float()
        made = F.interpolate(
            values,
            size=list(size),
            mode=interpolation.value,
            align_corners=False if is_smooth else None,
            antialias=bool(antialias) and is_smooth,
        )
        if made.dtype != image.dtype:
            made = made.clamp_(0, 255).round_().to(image.dtype)
        return made.reshape(*image.shape[:-2], *size)

    @staticmethod
    def normalize(image: Tensor, mean: Any, std: Any, inplace: bool = False) -> Tensor:
        """Subtracts the mean of each channel and divides by its deviation."""
        mean, std = (
            torch.as_tensor(value, dtype=image.dtype, device=image.device) for value in (mean, std)
        )
        mean, std = (value.view(-1, 1, 1) if value.ndim == 1 else value for value in (mean, std))
        return (image.sub_(mean) if inplace else image.sub(mean)).div_(std)

    @staticmethod
    def pad(image: Tensor, padding: Sequence[int], fill: float = 0, **_: Any) -> Tensor:
        """Adds (left, top, right, bottom) pixels of one value."""
        left, top, right, bottom = padding
        return F.pad(image, [left, right, top, bottom], value=float(fill or 0))

    @staticmethod
    def crop(image: Tensor, top: int, left: int, height: int, width: int) -> Tensor:
        """Returns a part of the image; it must lie inside."""
        return image[..., top : top + height, left : left + width]


Torchvision.transforms = Torchvision.v2 = Torchvision.functional = Torchvision


def _has_bytes(mode: Mode) -> bool:
    """Whether torch resizes bytes in this way on this CPU, as torchvision asks."""
    return mode is not Mode.BILINEAR or (
        torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Source:
    """Reads frames only when they are resized, so that only small ones are kept.

    shape: (frames, 3, height, width). read: yields the frames, uint8 [3, height, width]; None: they
    are black.
    """

    shape: tuple[int, ...]
    read: Callable[[], Iterator[Tensor]] | None


def reading(backend: Any) -> Any:
    """Returns a subclass of transformers' TorchvisionBackend for videos whose pixels are not read
    yet (tensors on the meta device). Where it would resize such a video, it reads the frames of
    `source` one by one and resizes these. The one thread that uses the processor sets `source`."""

    def resize(self: Any, image: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Resizes [..., channels, height, width]."""
        source: Source | None = self.source
        own: Callable[..., Tensor] = super(subclass, self).resize
        if source is None or not image.is_meta or image.dtype != torch.uint8:
            return own(image, *args, **kwargs)
        if image.shape[-4:] != source.shape:
            return own(image, *args, **kwargs)
        if source.read is None:
            black = torch.zeros(source.shape[1:], dtype=torch.uint8)
            small = own(black, *args, **kwargs).expand(source.shape[0], -1, -1, -1)
        else:
            small = torch.stack([own(frame, *args, **kwargs) for frame in source.read()])
        return small.reshape(*image.shape[:-3], *small.shape[1:])

    subclass: Any = type(backend.__name__, (backend,), {"source": None, "resize": resize})
    return subclass
