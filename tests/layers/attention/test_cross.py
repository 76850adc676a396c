"""Cross attention over the items of a step: plain torch and kernels against one request alone."""

import pytest
import torch

from mmdeploy_llm.hooks import MediaInput, MediaSpan, MediaView
from mmdeploy_llm.layers.attention.cross import CrossItems, CrossRequest, JoinedItems, by_heads

LAYERS, HEADS, SIZE = 2, 4, 16
ITEMS = {"a": 5, "b": 33, "c": 1, "d": 70}
REQUESTS = [(1, ["a"]), (1, ["b"]), (3, ["b"]), (2, ["d"]), (1, ["a", "c"])]


def asked(count, keys, first=0, views=None):
    """Returns a request with these items; views: of each (first, end, num_tokens)."""
    media = []
    for key, view in zip(keys, views or [None] * len(keys), strict=True):
        item = MediaInput(kind="image", tensors={}, num_tokens=ITEMS[key], key=key)
        own = view and MediaView(first=view[0], end=view[1], num_tokens=view[2])
        media.append(MediaSpan(offset=0, item=item, rows=(), view=own))
    return CrossRequest(first=first, count=count, media=media)


def make(num_kv_heads=HEADS, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    kept = {
        key: torch.randn(LAYERS, 2, count, num_kv_heads, SIZE, generator=generator).to(dtype)
        for key, count in ITEMS.items()
    }
    rows = sum(count for count, _ in REQUESTS) + 2
    return kept, torch.randn(rows, HEADS, SIZE, generator=generator).to(dtype)


def alone(q, kept, layer, scale):
    """Attention of one row, written out."""
    keys, values = (
        x.repeat_interleave(HEADS // x.shape[1], 1).double() for x in kept[layer].unbind()
    )
    weights = (torch.einsum("hd,khd->hk", q.double(), keys) * scale).softmax(-1)
    return torch.einsum("hk,khd->hd", weights, values)


@pytest.mark.parametrize("num_kv_heads", [HEADS, 2])
@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("uses_kernels", [False, True])
@pytest.mark.parametrize("are_by_heads", [False, True])
def test_each_row_sees_all_of_its_items_and_nothing_else(
    num_kv_heads, scale, uses_kernels, are_by_heads, request
):
    kernels = request.getfixturevalue("kernels") if uses_kernels else None
    kept, q = make(num_kv_heads)
    if are_by_heads:
        kept = {key: by_heads(own) for key, own in kept.items()}
    requests = [asked(*one) for one in [*REQUESTS, (2, [])]]
    context = CrossItems(requests, kept.__getitem__, kernels=kernels and kernels.attention)
    found, row = context.attend(1, q, scale=scale), 0
    for count, keys in REQUESTS:
        own = torch.cat([kept[key] for key in keys], 2)
        for _ in range(count):
            expected = alone(q[row], own, 1, scale or SIZE**-0.5)
            assert (found[row] - expected).abs().max() < 1e-5
            row += 1
    assert not found[row:].any()  # of a request without an item
    assert context.blind_rows.tolist() == [row, row + 1]
    assert context.has_items


def test_a_token_sees_what_is_meant_for_it():
    """Tokens 5 .. 11 of a sequence: `a` is meant for 7 and 8, `b` from 9 on, both in part."""
    kept, q = make()
    request = asked(6, "ab", first=5, views=[(7, 9, 3), (9, None, 20)])
    a, b = kept["a"][:, :, :3], kept["b"][:, :, :20]
    everything = torch.cat([kept["a"], kept["b"]], 2)
    seen = [everything] * 2 + [a] * 2 + [b] * 2
    context = CrossItems([request], kept.__getitem__)
    found = context.attend(1, q[:6])
    for row, own in enumerate(seen):
        assert (found[row] - alone(q[row], own, 1, SIZE**-0.5)).abs().max() < 1e-5
    assert context.blind_rows.tolist() == [0, 1]
    later = CrossItems([asked(1, "ab", first=40, views=[(7, 9, 3), (9, None, 20)])], kept.get)
    assert (later.attend(1, q[5:6]) - found[5:]).abs().max() < 1e-5
    assert later.blind_rows is None
    assert not CrossItems([asked(3, [])], kept.get).has_items


def test_requests_with_one_item_share_a_call(monkeypatch):
    kept, q = make()
    calls = []
    monkeypatch.setattr(
        "mmdeploy_llm.layers.attention.cross._attend", lambda q, *rest: calls.append(len(q)) or q
    )
    CrossItems([asked(*one) for one in REQUESTS], kept.__getitem__).attend(0, q[:8])
    assert calls == [1, 4, 2, 1]
    CrossItems([asked(1, ["b"])] * 8, kept.__getitem__).attend(0, q[:8])
    assert calls[4:] == [8]


@pytest.mark.parametrize("num_kv_heads", [HEADS, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_that_lie_apart_give_the_same_bits(kernels, num_kv_heads, dtype):
    """Of whole items, of the first tokens of one, and of several side by side."""
    kept, q = make(num_kv_heads, dtype)
    views = [(0, None, 21)]
    requests = [asked(*one) for one in REQUESTS] + [asked(2, "d", views=views)]
    apart = {key: by_heads(own) for key, own in kept.items()}
    assert all(torch.equal(apart[key], kept[key]) for key in kept)
    found, expected = (
        CrossItems(requests, own.__getitem__, kernels=kernels.attention).attend(0, q)
        for own in (apart, kept)
    )
    assert torch.equal(found, expected)


def test_items_side_by_side_are_copied_once_for_the_steps_that_see_them(monkeypatch):
    """The second step reads the first one's copy; after a step without them nothing is kept."""
    kept, q = make()
    joined, copies = JoinedItems(), []
    cat = torch.cat
    monkeypatch.setattr(torch, "cat", lambda own, *rest: copies.append(len(own)) or cat(own, *rest))

    def step(*keys):
        context = CrossItems([asked(1, own) for own in keys], kept.__getitem__, joined)
        context.of(0, 1)
        return context.attend(1, q[: len(keys)])

    first = step("ab", "c", "bd")
    assert copies == [2, 2]
    assert torch.equal(step("ab", "c", "bd"), first)
    assert torch.equal(step("ab"), first[:1])
    assert copies == [2, 2]
    step("bd")
    assert copies == [2, 2, 2]
    step("c")
    step("bd")
    assert copies == [2, 2, 2, 2]
