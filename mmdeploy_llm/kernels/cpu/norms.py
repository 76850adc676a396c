"""Norms: those of rows and of heads."""

from __future__ import annotations

from torch import Tensor

from .library import Library


class Norms(Library):
    """Computes norms with the C++ library."""

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        residual: Tensor | None = None,
        centre: float | None = None,
    ) -> Tensor:
        if not self.takes_rows(x, residual, weight):
            return super().rms_norm(x, weight, eps, residual, centre)
        rows = x.view(-1, x.shape[-1])
        out = self._empty(x.shape, dtype=x.dtype)
        self._library.rms_norm(
            dtype=x.dtype,
            x=x,
            x_stride=rows.stride(0),
            residual=residual,
            weight=weight,
            out=out,
            rows=rows.shape[0],
            size=rows.shape[1],
            eps=eps,
            centre=_centre(centre),
        )
        return out

    def layer_norm(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        residual: Tensor | None = None,
        *,
        is_centred: bool = False,
    ) -> Tensor:
        if not self.takes_rows(x, residual, weight, bias):
            return super().layer_norm(x, weight, bias, eps, residual, is_centred=is_centred)
        rows = x.view(-1, x.shape[-1])
        out = self._empty(x.shape, dtype=x.dtype)
        self._library.layer_norm(
            dtype=x.dtype,
            x=x,
            x_stride=rows.stride(0),
            residual=residual,
            weight=weight,
            bias=bias,
            out=out,
            rows=rows.shape[0],
            size=rows.shape[1],
            eps=eps,
            is_centred=is_centred,
        )
        return out

    def norm_heads(
        self, x: Tensor, weight: Tensor, eps: float, centre: float | None = None
    ) -> Tensor:
        if not self.takes(x, weight):
            return super().norm_heads(x, weight, eps, centre)
        self._norm_heads(x, weight, x, eps, centre)
        return x

    def normed_heads(self, x: Tensor, eps: float) -> Tensor:
        if not self.takes(x):
            return super().normed_heads(x, eps)
        heads = x if x.dim() == 3 else x.reshape(-1, 1, x.shape[-1])
        out = self._empty(heads.shape, dtype=x.dtype)
        self._norm_heads(heads, None, out, eps, None)
        return out.view(x.shape)

    def _norm_heads(
        self, x: Tensor, weight: Tensor | None, out: Tensor, eps: float, centre: float | None
    ) -> None:
        self._library.norm_heads(
            dtype=x.dtype,
            x=x,
            row_stride=x.stride(0),
            heads=x.shape[1],
            head_stride=x.stride(1),
            weight=weight,
            out=out,
            out_row_stride=out.stride(0),
            out_head_stride=out.stride(1),
            rows=x.shape[0],
            size=x.shape[2],
            eps=eps,
            centre=_centre(centre),
        )

    def add_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        to: Tensor,
        factor: Tensor | None = None,
        centre: float | None = None,
    ) -> Tensor:
        if not self.takes_whole(to, x, weight, factor):
            return super().add_norm(x, weight, eps, to, factor, centre)
        self._library.add_norm(
            dtype=x.dtype,
            x=x,
            x_stride=x.stride(0),
            weight=weight,
            factor=factor,
            sum=to,
            rows=x.shape[0],
            size=x.shape[1],
            eps=eps,
            centre=_centre(centre),
        )
        return to


def _centre(centre: float | None) -> float:
    """Returns the centre of a norm as calls.h has it."""
    return -1.0 if centre is None else centre
