"""The sizes that start-up computes: blocks that fit, and free memory."""

from types import SimpleNamespace

import pytest
import torch

from mmdeploy_llm.caches import PagedKV
from mmdeploy_llm.engine.startup import memory, sizes
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.layers.attention.cache_memory import KVCacheShape

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


class TestWindows:
    def windowed(self, *windows):
        layers = tuple(PagedKV(num_kv_heads=2, head_dim=8, window=window) for window in windows)
        return KVCacheShape(layers=layers, block_size=16, dtype=torch.bfloat16)

    def test_blocks_without_bytes_are_as_many_as_can_be_used(self):
        shape = self.windowed(7, 7)
        assert shape.bytes_per_block == 0
        assert sizes.count_blocks(shape, 0, 128) == 128

    def test_too_little_memory_for_one_sequence_raises_with_the_numbers(self):
        shape = self.windowed(None, 7)
        options = SimpleNamespace(
            block_size=16,
            max_num_seqs=4,
            max_model_len=512,
            max_num_batched_tokens=64,
            num_blocks_override=None,
        )
        with pytest.raises(ConfigError, match=r"a window of 7 tokens need 0\.0 MiB"):
            sizes.count_window_blocks(shape, shape.bytes_per_window_block, options)
        assert sizes.count_window_blocks(shape, 2**20, options) > 4


def test_cpu_memory_is_a_bounded_share(monkeypatch):
    monkeypatch.setattr(sizes, "free_ram", lambda: 10**9)
    share = sizes.CPU_SHARE_OF_FREE_RAM
    assert sizes.available_memory(torch.device("cpu"), 0.9) == int(share * 10**9)
    monkeypatch.setattr(sizes, "free_ram", lambda: 10**15)
    assert sizes.available_memory(torch.device("cpu"), 0.9) == sizes.CPU_MAX_BYTES


def test_pages_of_weights_leave_the_cache_a_share_where_they_fill_the_memory(monkeypatch):
    monkeypatch.setattr(memory, "free_ram", lambda: 160 * 10**6)
    group = SimpleNamespace(size=1)
    for mapped, left in ((0, 160), (100, 60), (160, 10), (1000, 10)):
        loaded = SimpleNamespace(mapped_bytes=mapped * 10**6, group=group)
        assert memory._cpu_memory(loaded) == sizes.cpu_cache_memory(left * 10**6)


def test_free_ram_is_plausible():
    assert 10**8 < sizes.free_ram() < 10**14


class TestModelLength:
    """The most tokens that a model computes bounds max_model_len."""

    def lowered(self, most, asked=None):
        model = SimpleNamespace() if most is None else SimpleNamespace(max_positions=most)
        options = SimpleNamespace(max_model_len=asked)
        runtime = SimpleNamespace(max_model_len=asked or 4096, options=options)
        return sizes.model_length(model, runtime)

    def test_it_is_lowered_where_the_engine_chose_it(self):
        assert self.lowered(512) == 512
        assert self.lowered(8192) == self.lowered(None) == 4096

    def test_a_user_who_asked_for_more_is_told(self):
        assert self.lowered(512, asked=512) == 512
        with pytest.raises(ConfigError, match=r"max_model_len = 513.* at most 512 tokens"):
            self.lowered(512, asked=513)
