"""The promises of LLM hold for LLM and AsyncLLM alike: exact tokens, the order of results,
errors of one prompt alone, seeds, stop texts, n completions, media, chat, counts."""

import asyncio

import pytest

from mmdeploy_llm import LLM, AsyncLLM, EngineError, SamplingParams
from mmdeploy_llm.hooks import hookimpl

GREEDY = SamplingParams(temperature=0, max_tokens=12)
TEXTS = ["The quick brown fox", "a", "There are two of them; a red circle"]
LIMIT = {"image": 2}
OPTIONS = {"block_size": 16, "use_warmup": False, "quiet": True, "limit_mm_per_prompt": LIMIT}


class Lists:
    """LLM, through its lists."""

    kind = LLM

    def __init__(self, llm):
        self.llm = llm

    def ask(self, prompts, params=GREEDY):
        """Returns the whole outputs, in the order of the prompts."""
        return self.llm.generate(prompts, params, use_tqdm=False)


class Threads(Lists):
    """AsyncLLM without asyncio."""

    kind = AsyncLLM

    def ask(self, prompts, params=GREEDY):
        each = params if isinstance(params, list) else [params] * len(prompts)
        handles = [self.llm.submit(*pair) for pair in zip(prompts, each, strict=True)]
        return [handle.result(timeout=60) for handle in handles]


class Tasks(Threads):
    """AsyncLLM with tasks that read vLLM's generator."""

    def ask(self, prompts, params=GREEDY):
        each = params if isinstance(params, list) else [params] * len(prompts)

        async def one(prompt, own):
            async for output in self.llm.generate(prompt, own):
                last = output
            return last

        async def main():
            return await asyncio.gather(*map(one, prompts, each))

        return asyncio.run(main())


DOORS = (Lists, Threads, Tasks)


@pytest.fixture(scope="module", params=DOORS, ids=lambda door: door.__name__.lower())
def door(request, tiny_folder):
    with request.param.kind(str(tiny_folder("qwen2_5_vl")), **OPTIONS) as llm:
        yield request.param(llm)


@pytest.fixture
def image_text(reference_of):
    return reference_of("qwen2_5_vl").image_text()


def tokens(outputs):
    return [list(output.outputs.token_ids) for output in outputs]


@pytest.mark.full
def test_exact_tokens_in_the_order_of_the_prompts(door, reference_of, make_picture, image_text):
    reference = reference_of("qwen2_5_vl")
    pictures = [make_picture(seed, 70 + 20 * seed, 90) for seed in range(2)]
    prompts, expected = list(TEXTS), [reference.generate(text) for text in TEXTS]
    for picture in pictures:
        text = f"A {image_text} B"
        prompts.append({"prompt": text, "multimodal_data": {"image": picture}})
        expected.append(reference.generate(text, [picture]))
    outputs = door.ask(prompts)
    assert tokens(outputs) == expected
    assert [output.error_code for output in outputs] == [200] * 5
    assert all(output.item is text for output, text in zip(outputs, TEXTS, strict=False))
    assert [output.item["prompt"] for output in outputs[3:]] == [text] * 2  # without its picture
    assert [output.num_input_image_tokens > 0 for output in outputs] == [False] * 3 + [True] * 2
    assert len({output.request_id for output in outputs}) == 5


def test_one_bad_prompt_harms_no_other(door, reference_of, image_text):
    good = reference_of("qwen2_5_vl").generate(TEXTS[0])
    bad = [
        {"prompt": f"A {image_text} B", "multimodal_data": {"image": b"no image"}},
        {"prompt": f"A {image_text} B"},
        {"prompt_token_ids": [10**9]},
        {"messages": [{"role": "nobody"}]},
    ]
    outputs = door.ask([TEXTS[0], *bad, TEXTS[0]])
    assert [output.error_code for output in outputs] == [200, 415, 400, 400, 400, 200]
    assert [output.outputs.finish_reason for output in outputs[1:-1]] == ["error"] * 4
    assert all(output.error_msg and output.finished for output in outputs[1:-1])
    assert tokens(outputs[:1]) == tokens(outputs[-1:]) == [good]


@pytest.mark.one_is_quick
def test_a_seed_gives_the_same_text_in_any_batch(door):
    params = SamplingParams(seed=7, temperature=1.0, max_tokens=12, ignore_eos=True)
    (alone,) = door.ask([TEXTS[0]], params)
    among = door.ask([TEXTS[1], TEXTS[0], TEXTS[2]], params)
    assert tokens([alone]) == tokens(among[1:2])


def test_each_prompt_has_its_own_params(door):
    counts = [1, 5, 9]
    each = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in counts]
    outputs = door.ask(TEXTS, each)
    assert [len(ids) for ids in tokens(outputs)] == counts
    assert {output.outputs.finish_reason for output in outputs} == {"length"}


def test_a_stop_text_ends_the_text(door):
    (whole,) = door.ask([TEXTS[0]])
    stop = whole.outputs.text[3:5]
    (cut,) = door.ask([TEXTS[0]], SamplingParams(temperature=0, max_tokens=12, stop=stop))
    assert cut.outputs.finish_reason == "stop"
    assert cut.outputs.text == whole.outputs.text[: whole.outputs.text.index(stop)]


def test_n_completions_of_one_output(door):
    params = SamplingParams(
        n=3, seed=3, temperature=1, top_p=1, max_tokens=8, ignore_eos=True, logprobs=1
    )
    (output,) = door.ask([TEXTS[0]], params)
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
    assert [len(completion.logprobs) for completion in output.outputs] == [8] * 3
    assert output.finished


def test_an_output_has_the_same_facts(door):
    (output,) = door.ask([TEXTS[0]])
    assert output.prompt == TEXTS[0]
    assert output.finished
    assert output.metrics.first_token_time > 0
    assert output.outputs.finish_reason in ("stop", "length")
    (again,) = door.ask([TEXTS[0] * 9])
    (cached,) = door.ask([TEXTS[0] * 9])
    assert cached.num_cached_tokens > 0
    assert tokens([again]) == tokens([cached])


def test_counts_and_tokenizer(door, make_picture, image_text):
    prompt = {"prompt": f"A {image_text} B", "multimodal_data": {"image": make_picture(0, 70, 90)}}
    count = door.llm.count_tokens(prompt)
    (output,) = door.ask([prompt])
    assert count.num_prompt_tokens == len(output.prompt_token_ids)
    assert door.llm.get_tokenizer() is door.llm.get_tokenizer()
    assert "processed" in door.llm.cache_stats()


class Broken:
    """Raises whenever it is told something."""

    @hookimpl
    def on_step(self, stats):
        raise RuntimeError("no")

    @hookimpl
    def on_request_finished(self, record):
        raise RuntimeError("no")


@pytest.mark.one_is_quick
@pytest.mark.parametrize("door_kind", [Lists, Threads])
def test_an_observer_that_raises_harms_nobody(door_kind, tiny_folder, reference_of):
    with door_kind.kind(str(tiny_folder("mistral")), **OPTIONS) as llm:
        llm.plugins.register(Broken(), name="broken")
        outputs = door_kind(llm).ask(TEXTS)
    assert tokens(outputs) == [reference_of("mistral").generate(text) for text in TEXTS]


@pytest.mark.one_is_quick
@pytest.mark.parametrize("door_kind", [Lists, Threads])
def test_after_close_every_call_raises(door_kind, tiny_folder):
    llm = door_kind.kind(str(tiny_folder("mistral")), **OPTIONS)
    llm.close()
    llm.close()
    with pytest.raises(EngineError, match="closed"):
        door_kind(llm).ask(["a"])
    with pytest.raises(EngineError, match="closed"):
        llm.count_tokens("a")
