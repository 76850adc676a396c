"""The sizes that start-up computes: blocks that fit, and free memory."""

import pytest
import torch

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.runner.kv_cache import KVCacheShape
from mmdeploy_llm.startup import sizes

SHAPE = KVCacheShape.uniform(
    num_layers=3, num_kv_heads=2, head_dim=8, block_size=16, dtype=torch.bfloat16
)


def test_memory_decides():
    assert sizes.count_blocks(SHAPE, 10 * SHAPE.bytes_per_block + 5, 100) == 10


def test_no_more_than_can_be_used():
    assert sizes.count_blocks(SHAPE, 10**9, 7) == 7


def test_too_little_memory_raises_with_the_numbers():
    with pytest.raises(ConfigError, match="hold 1 blocks of 16 tokens"):
        sizes.count_blocks(SHAPE, SHAPE.bytes_per_block, 100)


def test_cpu_memory_is_a_bounded_share(monkeypatch):
    monkeypatch.setattr(sizes, "free_ram", lambda: 10**9)
    share = sizes.CPU_SHARE_OF_FREE_RAM
    assert sizes.available_memory(torch.device("cpu"), 0.9) == int(share * 10**9)
    monkeypatch.setattr(sizes, "free_ram", lambda: 10**15)
    assert sizes.available_memory(torch.device("cpu"), 0.9) == sizes.CPU_MAX_BYTES


def test_free_ram_is_plausible():
    assert 10**8 < sizes.free_ram() < 10**14
