"""Many threads and many tasks at once, with aborts, time limits and slow readers at random: every
request that is not given up has the reference's tokens, and nothing stays in the engine."""

import asyncio
import random
import threading
import time

import pytest

from mmdeploy_llm import AsyncLLM, SamplingParams

TEXTS = ["The quick brown fox", "a", "There are two of them; a red circle", "x" * 40]
OPTIONS = {"block_size": 16, "max_model_len": 256, "use_warmup": False, "quiet": True}


@pytest.fixture(scope="module")
def llm(tiny_folder):
    options = {**OPTIONS, "max_num_seqs": 16, "num_gpu_blocks_override": 60}
    with AsyncLLM(str(tiny_folder("mistral")), **options) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(reference_of):
    """(text, number of tokens) -> tokens."""
    reference = reference_of("mistral")
    return {text: reference.generate(text, max_tokens=24) for text in TEXTS}


def drawn(choose):
    """A text, its parameters and their number of tokens."""
    count = choose.randrange(1, 24)
    return choose.choice(TEXTS), SamplingParams(temperature=0, max_tokens=count)


def check(ids, text, params, expected, is_whole):
    """The tokens are those of the reference, or their beginning."""
    whole = expected[text][: params.max_tokens]
    assert ids == (whole if is_whole else whole[: len(ids)]), (text, params.max_tokens)


def read_in_a_thread(llm, choose, expected):
    """One request, read in one of the ways."""
    text, params = drawn(choose)
    handle = llm.submit(text, params, priority=choose.randrange(3))
    way = choose.choice(["result", "deltas", "slow", "abort", "drop", "timeout"])
    if way == "drop":
        return
    if way == "abort":
        handle.get()
        handle.abort()
        output = handle.result(60)
        check(list(output.outputs.token_ids), text, params, expected, output.is_ok)
        return
    if way == "timeout":
        try:
            output = handle.result(choose.random() / 20)
        except TimeoutError:
            output = handle.result(60)
        check(list(output.outputs.token_ids), text, params, expected, True)
        return
    ids = []
    if way != "result":
        for delta in handle:
            ids += delta.outputs.token_ids
            if way == "slow":
                time.sleep(choose.random() / 20)
        check(ids, text, params, expected, True)
    check(list(handle.result(60).outputs.token_ids), text, params, expected, True)


async def read_in_a_task(llm, choose, expected):
    text, params = drawn(choose)
    await asyncio.sleep(choose.random())
    handle = llm.submit(text, params)
    way = choose.choice(["await", "deltas", "slow", "cancel", "wait_for"])
    if way == "wait_for":
        try:
            output = await asyncio.wait_for(handle, choose.random() / 10)
            check(list(output.outputs.token_ids), text, params, expected, True)
        except TimeoutError:
            output = await handle  # it was aborted
            check(list(output.outputs.token_ids), text, params, expected, output.is_ok)
        return
    if way == "cancel":
        task = asyncio.ensure_future(handle)
        await asyncio.sleep(choose.random() / 10)
        task.cancel()
        await asyncio.wait([task])
        return
    ids = []
    if way != "await":
        async for delta in handle:
            ids += delta.outputs.token_ids
            if way == "slow":
                await asyncio.sleep(choose.random() / 20)
        check(ids, text, params, expected, True)
    check(list((await handle).outputs.token_ids), text, params, expected, True)


@pytest.mark.full
@pytest.mark.parametrize("share", [0.1, pytest.param(1, marks=pytest.mark.long)])
def test_threads_and_tasks(llm, expected, share):
    failures = []

    def work(seed):
        choose = random.Random(seed)
        try:
            for _ in range(max(2, round(10 * share))):
                read_in_a_thread(llm, choose, expected)
        except BaseException as error:
            failures.append(error)

    async def main():
        tasks = (
            read_in_a_task(llm, random.Random(1000 + number), expected)
            for number in range(round(1000 * share))
        )
        await asyncio.gather(*tasks)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(round(64 * share))]
    for thread in threads:
        thread.start()
    asyncio.run(main())
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    assert failures == []
    end = time.monotonic() + 60
    while llm.stats().num_running or llm.stats().num_waiting:
        assert time.monotonic() < end
        time.sleep(0.01)
    again = llm.submit(TEXTS[0], SamplingParams(temperature=0, max_tokens=24)).result(60)
    assert list(again.outputs.token_ids) == expected[TEXTS[0]]
