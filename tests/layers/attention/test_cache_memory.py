"""Allocation of the KV cache."""

from dataclasses import replace

import pytest
import torch

from mmdeploy_llm.caches import PagedKV
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.layers.attention import cache_memory as kv_cache
from mmdeploy_llm.layers.attention.cache_memory import KVCacheShape, allocate

SHAPE = KVCacheShape.uniform(
    num_layers=3, num_kv_heads=2, head_dim=8, block_size=16, dtype=torch.bfloat16
)


def test_num_bytes_of_a_block():
    assert SHAPE.bytes_per_block == 2 * 3 * 2 * 8 * 16 * 2


def test_the_cache_has_the_shape_and_is_finite():
    cache = allocate(SHAPE, 5, torch.device("cpu"))
    assert len(cache.keys) == len(cache.values) == 3
    assert cache.keys[0].shape == (5, 16, 2, 8)
    assert cache.keys[0].dtype == torch.bfloat16
    assert not cache.values[2].any()
    assert cache.block_size == 16


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_8_bits_have_a_scale_for_each_token_and_head(dtype):
    shape = replace(SHAPE, dtype=dtype)
    cache = allocate(shape, 5, torch.device("cpu"))
    assert cache.keys[0].dtype == dtype
    assert cache.key_scales[2].shape == cache.value_scales[0].shape == (5, 16, 2)
    tensors = (*cache.keys, *cache.values, *cache.key_scales, *cache.value_scales)
    assert sum(x.numel() * x.itemsize for x in tensors) == 5 * shape.bytes_per_block
    assert allocate(SHAPE, 5, torch.device("cpu")).key_scales is None


@pytest.mark.parametrize(("head_dim", "groups"), [(80, 1), (192, 6)])
def test_4_bits_have_a_scale_and_a_lowest_value_for_each_group(head_dim, groups):
    layer = PagedKV(num_kv_heads=2, head_dim=head_dim, value_dim=8)
    shape = KVCacheShape(layers=(layer,), block_size=16, dtype=torch.int4)
    cache = allocate(shape, 5, torch.device("cpu"))
    assert cache.keys[0].shape == (5, 16, 2, head_dim // 2)
    assert cache.key_scales[0].shape == (5, 16, 2, groups, 2)
    assert cache.value_scales[0].shape == (5, 16, 2, 1, 2)
    tensors = (*cache.keys, *cache.values, *cache.key_scales, *cache.value_scales)
    assert sum(x.numel() * x.itemsize for x in tensors) == 5 * shape.bytes_per_block
    assert shape.bytes_per_block == 16 * 2 * (head_dim // 2 + 4 * groups + 8)


def test_heads_that_do_not_fill_bytes_are_refused():
    shape = KVCacheShape.uniform(
        num_layers=1, num_kv_heads=1, head_dim=7, block_size=16, dtype=torch.int4
    )
    with pytest.raises(ConfigError, match="heads of 7; use 'int8'"):
        shape.bytes_per_block  # noqa: B018 - reading it raises


def test_a_cache_that_does_not_fit_raises_with_both_sizes(monkeypatch):
    def full(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(kv_cache, "_zeros", full)
    with pytest.raises(ConfigError, match=r"9 KV cache blocks take 0\.00 GiB, more than cpu has"):
        allocate(SHAPE, 9, torch.device("cpu"))
