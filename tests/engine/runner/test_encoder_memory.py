"""The size of the encoder cache: rows of embeddings, or what layers read of an encoder's items."""

from types import SimpleNamespace

import pytest

from mmdeploy_llm.caches import CrossKV
from mmdeploy_llm.engine.runner import encoder_cache
from mmdeploy_llm.engine.runner.encoder_cache import encoder_tokens

SIZE = 2 * 4 * 2 * 8  # values of a token: keys and values of four layers with two heads of eight
ITEM = 1500 * SIZE * 2  # bytes of an item in bfloat16


def tokens(free, *, asked=None, longest=1500, cross=True, tokens=100):
    kept = CrossKV(num_layers=4, num_kv_heads=2, head_dim=8, longest=longest)
    model = SimpleNamespace(hidden_size=16, cross=kept if cross else None)
    runtime = SimpleNamespace(
        encoder_cache_tokens=tokens,
        options=SimpleNamespace(encoder_cache_memory=asked),
        dtype="bfloat16",
        device="cpu",
        max_num_seqs=8,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder_cache, "free_ram", lambda: free)
        return encoder_tokens(runtime, model)


def test_an_encoder_has_room_for_an_item_of_each_request():
    assert tokens(100 * ITEM) == 8 * 1500


def test_in_a_quarter_of_the_free_memory():
    assert tokens(20 * ITEM) == 5 * 1500
    assert tokens(ITEM) == 1500, "one item always"


def test_the_users_size_and_larger_usual_ones_stay():
    assert tokens(100 * ITEM, asked=1) == 100 * 16 // SIZE
    assert tokens(ITEM, tokens=10**6) == 10**6 * 16 // SIZE
    assert tokens(100 * ITEM, longest=None) == 100 * 16 // SIZE


def test_rows_of_embeddings_are_as_wide_as_the_model():
    assert tokens(100 * ITEM, cross=False) == 100
    assert tokens(0, cross=False, tokens=0) == 1
