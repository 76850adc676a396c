"""The backend with flash-attn 3, for Hopper: its function for KV caches takes ragged queries and
pages of any size, and splits long contexts."""

from __future__ import annotations

from torch import Tensor

from . import libraries
from .varlen import Call, Options, VarlenBackend
from .writing import CacheWriter, write_plain


class FlashAttention3(VarlenBackend):
    """Calls flash-attn 3. Raises ConfigError when flash-attn 3 is not installed."""

    name = "flash-attn-3"

    def __init__(self, write: CacheWriter = write_plain) -> None:
        super().__init__(write)
        (self._with_cache,) = libraries.load(self.name)

    def compute(
        self, call: Call, q: Tensor, keys: Tensor, values: Tensor, options: Options
    ) -> Tensor:
        """Calls the library; see VarlenBackend. Pages may have any size; pages of 128 tokens or
        more fill its key tiles."""
        out: Tensor = self._with_cache(
            q,
            keys,
            values,
            cache_seqlens=call.context_lens,
            page_table=call.tables,
            cu_seqlens_q=call.starts,
            max_seqlen_q=call.max_query,
            softmax_scale=options.scale,
            causal=call.is_causal,
            window_size=options.window(call, -1),
            softcap=options.softcap or 0.0,
        )
        return out
