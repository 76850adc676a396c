"""The libraries' functions by their documented contracts, in plain torch: their requirements on
shapes, dtypes and pages, and dense attention over the gathered pages. Signatures are those of
flash-attn 2.8, of its hopper folder, of flash-attn-4 4.0.0b36 and of torch 2.13."""

import itertools
import sys
import types

import torch


class Fakes:
    """Replacements for the libraries. dense: the function of cases.py. calls: names of the
    functions in the order of their calls."""

    def __init__(self, dense):
        self.dense = dense
        self.calls = []

    def install(self, monkeypatch, libraries, name):
        """Replaces a library with its fake."""
        library = libraries.LIBRARIES[name]
        module = types.ModuleType(library.module)
        for function in library.functions:
            setattr(module, function, self._recorded(function, name))
        monkeypatch.setitem(sys.modules, library.module, module)

    def _recorded(self, function, name):
        fake = getattr(self, f"{function}_{name[-1]}" if name[-1] in "34" else function)
        signature = fake.__signature__ if hasattr(fake, "__signature__") else None

        def call(*args, **kwargs):
            self.calls.append(function)
            return fake(*args, **kwargs)

        import inspect

        call.__signature__ = signature or inspect.signature(fake)
        return call

    def flash_attn_varlen_func(
        self,
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        block_table=None,
    ):
        """flash-attn 2."""
        assert k.shape[1] % 256 == 0
        lengths = cu_seqlens_k.diff()
        return self._ragged(
            q, k, v, cu_seqlens_q, lengths, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
            window_size, softcap, block_table, -1,
        )  # fmt: skip

    def flash_attn_with_kvcache(
        self,
        q,
        k_cache,
        v_cache,
        k=None,
        v=None,
        *,
        cache_seqlens,
        block_table,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        num_splits=0,
    ):
        """flash-attn 2: q [B, n, H, D]."""
        assert k_cache.shape[1] % 256 == 0
        assert cache_seqlens.dtype == torch.int32
        batch, count = q.shape[:2]
        starts = torch.arange(batch + 1, dtype=torch.int32) * count
        out = self._ragged(
            q.flatten(0, 1), k_cache, v_cache, starts, cache_seqlens, count, None, softmax_scale,
            causal, window_size, softcap, block_table, -1,
        )  # fmt: skip
        return out.view(q.shape)

    def flash_attn_with_kvcache_3(
        self,
        q,
        k_cache,
        v_cache,
        k=None,
        v=None,
        qv=None,
        rotary_cos=None,
        rotary_sin=None,
        cache_seqlens=None,
        cache_batch_idx=None,
        cache_leftpad=None,
        page_table=None,
        cu_seqlens_q=None,
        cu_seqlens_k_new=None,
        max_seqlen_q=None,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        attention_chunk=0,
        softcap=0.0,
        num_splits=0,
    ):
        """flash-attn 3, ragged queries [T, H, D]; pages of any size."""
        return self._ragged(
            q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, max_seqlen_q, None, softmax_scale,
            causal, window_size, softcap, page_table, -1,
        )  # fmt: skip

    def flash_attn_varlen_func_4(
        self,
        q,
        k,
        v,
        qv=None,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        min_seqlen_k=None,
        seqused_q=None,
        seqused_k=None,
        gather_kv_indices=None,
        page_table=None,
        softmax_scale=None,
        causal=False,
        window_size=(None, None),
        learnable_sink=None,
        softcap=0.0,
        num_splits=1,
    ):
        """flash-attn 4: returns (out, lse); page_table excludes cu_seqlens_k."""
        assert cu_seqlens_k is None
        assert page_table.stride(-1) == 1
        assert seqused_k.stride(0) == 1
        assert learnable_sink is None or learnable_sink.dtype == torch.bfloat16
        out = self._ragged(
            q, k, v, cu_seqlens_q, seqused_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
            window_size, softcap, page_table, None, learnable_sink,
        )  # fmt: skip
        return out, None

    def varlen_attn(
        self,
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        *,
        return_aux=None,
        scale=None,
        window_size=(-1, -1),
        enable_gqa=False,
        seqused_k=None,
        block_table=None,
        num_splits=None,
    ):
        """The function of torch, which uses flash-attn 2; causal is a window of (-1, 0). Without
        block_table keys and values are [T, K, D]."""
        if block_table is None:
            return self._dense_each(query, key, value, cu_seq_q, cu_seq_k, max_q, scale)
        assert key.shape[1] % 256 == 0
        assert enable_gqa or query.shape[1] == key.shape[2]
        assert torch.equal(cu_seq_k.diff(), seqused_k)
        assert cu_seq_k.dtype == torch.int32
        causal = window_size[1] == 0
        return self._ragged(
            query, key, value, cu_seq_q, seqused_k, max_q, max_k, scale, causal, window_size, 0.0,
            block_table, -1,
        )  # fmt: skip

    def _dense_each(self, q, k, v, starts, key_starts, longest, scale):
        """Returns full attention between each of the starts and the next."""
        assert starts.dtype == torch.int32
        assert torch.equal(starts, key_starts)
        assert int(starts.diff().max()) <= longest
        assert int(starts[-1]) == len(q)
        return torch.cat(
            [
                self.dense(q[a:b], k[a:b], v[a:b], is_causal=False, scale=scale).to(q.dtype)
                for a, b in itertools.pairwise(starts.tolist())
            ]
        )

    def _ragged(
        self, q, keys, values, starts, lengths, max_query, max_context, scale, causal, window_size,
        softcap, tables, unbounded, sinks=None,
    ):  # fmt: skip
        """Computes what all of the functions have in common. unbounded: the value that means a
        window without an end."""
        num_seqs = len(lengths)
        assert {starts.dtype, lengths.dtype, tables.dtype} == {torch.int32}
        assert starts.shape == (num_seqs + 1,)
        assert tables.shape[0] == num_seqs
        assert q.stride(-1) == keys.stride(-1) == values.stride(-1) == 1
        assert q.dtype == keys.dtype == values.dtype
        assert int(starts[0]) == 0
        assert int(starts[-1]) == len(q)
        left, right = window_size
        assert right == (0 if causal else unbounded)
        window = None if left == unbounded else left + 1
        out = []
        for row in range(num_seqs):
            own, length = q[starts[row] : starts[row + 1]], int(lengths[row])
            assert len(own) <= min(max_query, length)
            assert max_context is None or length <= max_context
            k, v = (x[tables[row].long()].flatten(0, 1)[:length] for x in (keys, values))
            options = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
            out.append(self.dense(own, k, v, is_causal=causal, **options).to(q.dtype))
        return torch.cat(out)
