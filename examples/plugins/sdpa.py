"""An attention backend in plain torch: gathers the keys of each sequence, then torch's SDPA.

llm = LLM(model, plugins=["./sdpa.py"], attention_backend="sdpa")
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.hooks import AttentionBackend, AttentionBackendSpec, hookimpl, without_spans
from mmdeploy_llm.layers.attention.layouts import positions_of, visible_ranges
from mmdeploy_llm.layers.attention.writing import write_plain

DTYPES = ("bfloat16", "float16", "float32")


@hookimpl
def provide_attention_backends():
    return [
        AttentionBackendSpec(
            name="sdpa",
            factory=f"{__name__}:new_backend",
            devices=("cpu", "cuda"),
            dtypes=DTYPES,
            cache_dtypes=DTYPES,
            windows=True,
            media_spans=True,
        )
    ]


def new_backend(setup):
    return SdpaAttention()


class SdpaAttention(AttentionBackend):
    name = "sdpa"

    def begin(self, layout, cache):
        return Step(self, layout, cache)


class Step:
    """The attention of one step."""

    def __init__(self, backend, layout, cache):
        self.backend, self.layout, self.cache = backend, layout, cache
        self.starts, self.positions = positions_of(layout)
        sizes = [-(-length // cache.block_size) for length in layout.context_lens]
        self.tables = [table[:n] for table, n in zip(layout.block_tables, sizes, strict=True)]
        self.masks = {}  # by window, for all layers

    def attend(self, layer, q, k, v, *, scale=None, window=None, softcap=None, sinks=None):
        if softcap is not None or sinks is not None:
            raise ModelNotSupportedError("sdpa computes neither softcaps nor attention sinks")
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        if k is not None:
            write_plain(k, v, keys, values, self.layout)
        out = q.new_empty(*q.shape[:-1], values.shape[-1])
        if window not in self.masks:
            self.masks[window] = self.new_masks(window)
        for number, mask in enumerate(self.masks[window]):
            rows = slice(int(self.starts[number]), int(self.starts[number + 1]))
            known = [self.gathered(pages, number).to(q.dtype) for pages in (keys, values)]
            query, key, value = (x.transpose(0, 1) for x in (q[rows], *known))
            found = scaled_dot_product_attention(
                query, key, value, attn_mask=mask, scale=scale, enable_gqa=True
            )
            out[rows] = found.transpose(0, 1)
        return out

    def causal(self):
        return without_spans(self, self.backend, self.layout, self.cache)

    def gathered(self, pages, number):
        """Returns the keys or values of all tokens of a sequence, [tokens, heads, size]."""
        return pages[self.tables[number]].flatten(0, 1)[: self.layout.context_lens[number]]

    def new_masks(self, window):
        """Returns for each sequence which keys each of its rows sees."""
        first, end = visible_ranges(self.layout, self.starts, self.positions, window)
        first, end = (torch.from_numpy(x).to(self.layout.slots.device) for x in (first, end))
        masks = []
        for number, length in enumerate(self.layout.context_lens):
            rows = slice(int(self.starts[number]), int(self.starts[number + 1]))
            keys = torch.arange(length, device=first.device)
            masks.append((keys >= first[rows, None]) & (keys < end[rows, None]))
        return masks
