"""Memory of a card: the measurement at start, the size of the KV cache, and a step that runs out of
memory."""

import logging
import re

import pytest
import torch

from mmdeploy_llm import SamplingParams
from mmdeploy_llm.engine.runner.encoder_cache import EncoderCache
from mmdeploy_llm.request import MediaInput

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
PER_TOKEN = 2**24  # bytes that the model below allocates for each token of a pass
ROOM = 40 * PER_TOKEN


def test_the_kv_cache_takes_what_steps_leave(device, on_card, make_llm, prompts_of, caplog):
    caplog.set_level(logging.INFO)
    share = 0.5
    _, total = torch.cuda.mem_get_info()
    llm = make_llm(
        "qwen2_5_vl",
        device,
        kv_cache_memory=None,
        gpu_memory_utilization=share,
        max_num_batched_tokens=512,
    )
    assert "the largest step takes" in caplog.text
    blocks = int(re.search(r"total_block_num:(\d+)", caplog.text)[1])
    assert blocks >= llm.runtime.max_model_len // llm.runtime.block_size
    free, _ = torch.cuda.mem_get_info()
    assert total - free <= share * total
    outputs = llm.generate(prompts_of("qwen2_5_vl"), GREEDY, use_tqdm=False)
    assert all(output.is_ok for output in outputs)


def test_the_card_is_filled_to_its_share(device, on_card, make_llm):
    """Requests are so long that memory bounds the cache, not the longest requests."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    taken = (total - free) / total
    share = min(0.95, taken + 0.2)
    make_llm(
        "qwen2",
        device,
        kv_cache_memory=None,
        gpu_memory_utilization=share,
        max_num_seqs=256,
        max_model_len=2048,
        max_num_batched_tokens=512,
        enforce_eager=True,
    )
    free, _ = torch.cuda.mem_get_info()
    # Whole blocks only, and no more than all requests could use at most.
    assert total - free <= share * total + 2**28


@pytest.fixture
def small_room(device, monkeypatch):
    """Makes the passes of an LLM allocate PER_TOKEN bytes a token, of which the card has ROOM."""

    def shrink(llm):
        forward = llm.model.forward
        sizes = []

        def hungry(inputs):
            num_tokens = len(inputs.token_ids)
            sizes.append(num_tokens)
            if device == "cuda":
                activations = torch.empty(num_tokens * PER_TOKEN, dtype=torch.uint8, device=device)
                activations[::4096] = 1
            elif num_tokens * PER_TOKEN > ROOM:
                raise torch.OutOfMemoryError("out of memory")
            return forward(inputs)

        monkeypatch.setattr(llm.model, "forward", hungry)
        if device == "cuda":
            torch.cuda.empty_cache()
            _, total = torch.cuda.mem_get_info()
            allowed = torch.cuda.memory_reserved() + ROOM + PER_TOKEN
            torch.cuda.set_per_process_memory_fraction(allowed / total)
        return sizes

    yield shrink
    if device == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


def test_a_step_without_memory_is_retried_in_smaller_passes(
    device, make_llm, prompts_of, small_room
):
    prompts = [prompt for prompt in prompts_of("qwen2") if isinstance(prompt, list)]
    expected = make_llm("qwen2", "cpu").generate(prompts, GREEDY, use_tqdm=False)
    llm = make_llm("qwen2", device, enforce_eager=True)
    sizes = small_room(llm)
    for _ in range(2):  # and the engine lives
        found = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [output.error_msg for output in found if not output.is_ok] == []
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.outputs.token_ids == theirs.outputs.token_ids
    assert max(sizes) > ROOM // PER_TOKEN


class Sums:
    """Returns the sum of each row of pixels, and records on which device they were."""

    hidden_size = 1

    def __init__(self):
        self.devices = []

    def encode_media(self, items):
        self.devices += [one.tensors["pixels"].device.type for one in items]
        return [one.tensors["pixels"].double().sum(1, keepdim=True).float() for one in items]


def test_media_are_copied_whole_while_others_are_encoded(device):
    """The encoder is called several times, so that copies and computation overlap."""
    generator = torch.Generator().manual_seed(0)
    items = [
        MediaInput(
            kind="image",
            tensors={"pixels": torch.randn(rows, 1176, generator=generator)},
            num_tokens=rows,
            key=str(rows),
        )
        for rows in (9000, 9001, 20_000, 5, 12_000, 30_000)
    ]
    model = Sums()
    cache = EncoderCache(model, device=torch.device(device))
    for _ in range(3):
        cache.encode(items)
        for item in items:
            expected = item.tensors["pixels"].double().sum(1, keepdim=True).float()
            torch.testing.assert_close(cache.get(item.key).cpu(), expected, rtol=1e-5, atol=1e-4)
        cache.forget([item.key for item in items])
    assert set(model.devices) == {device}


def test_a_card_too_small_raises_before_loading(device, on_card, make_llm):
    with pytest.raises(Exception, match="the weights take") as caught:
        make_llm("qwen2", device, gpu_memory_utilization=1e-6)
    assert type(caught.value).__name__ == "ConfigError"
