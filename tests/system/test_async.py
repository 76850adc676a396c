"""AsyncLLM and Handle: requests from threads and tasks, their states, how they end, and that
nothing of a request that nobody waits for stays in the engine."""

import asyncio
import gc
import threading
import time
from contextlib import contextmanager

import pytest

from mmdeploy_llm import AsyncLLM, EngineError, QueueFullError, RequestError, SamplingParams
from mmdeploy_llm.hooks import hookimpl

GREEDY = SamplingParams(temperature=0, max_tokens=12)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
# For requests that are ended, by a thread that may have to wait for its core.
ENDLESS = SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True)
TEXTS = ["The quick brown fox", "a", "There are two of them; a red circle"]
STATES = ["init", "context_finished", "generating", "finished"]
OPTIONS = {"block_size": 16, "max_model_len": 2048, "use_warmup": False, "quiet": True}


@pytest.fixture(scope="module")
def llm(tiny_folder):
    with AsyncLLM(str(tiny_folder("mistral")), **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def narrow(tiny_folder):
    """Computes one request at a time and lets two wait."""
    with AsyncLLM(str(tiny_folder("mistral")), max_queued=2, max_num_seqs=1, **OPTIONS) as llm:
        yield llm


@pytest.fixture
def expected(reference_of):
    return [reference_of("mistral").generate(text) for text in TEXTS]


def tokens(output):
    return list(output.outputs.token_ids)


def joined(deltas):
    return [token for delta in deltas for token in delta.outputs.token_ids]


class Pause:
    """Stops the engine after its first step, until it may go on."""

    def __init__(self):
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()

    @hookimpl
    def on_step(self, stats):
        self.has_begun.set()
        assert self.may_go_on.wait(60)


@contextmanager
def paused(llm, **options):
    """The engine stands still after the first step of a request until `may_go_on`, or the end."""
    pause = Pause()
    llm.plugins.register(pause, name=f"pause {id(pause)}")
    first = llm.submit(TEXTS[0], GREEDY, **options)
    try:
        assert pause.has_begun.wait(60)
        yield pause, first
    finally:
        pause.may_go_on.set()


def drain(handle):
    """Reads what is there, and more than that."""
    while handle.get(timeout=0) is not None:
        pass


def until(is_true, seconds=20):
    """Waits until it is true."""
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.005)


def is_idle(llm):
    """Whether nothing is in the engine and all its blocks are free."""
    stats = llm.stats()
    return not stats.num_running and not stats.num_waiting


def free_blocks(llm):
    return llm.stats().num_free_blocks


class TestReading:
    def test_a_handle_shows_its_state(self, llm):
        handle = llm.submit(TEXTS[0], GREEDY, request_id="mine")
        handle.result()
        assert repr(handle).startswith("Handle('mine', finished, 12 tokens")

    def test_a_method_of_LLM_is_pointed_to_its_counterpart(self, llm):
        for name, place in (("chat", "submit"), ("stream", "async for")):
            with pytest.raises(AttributeError, match=f"no attribute '{name}'; use .*{place}"):
                getattr(llm, name)

    def test_a_handle_can_be_awaited(self, llm, expected):
        async def main():
            handles = [llm.submit(text, GREEDY) for text in TEXTS]
            return [await handle for handle in handles]

        outputs = asyncio.run(main())
        assert [tokens(output) for output in outputs] == expected
        assert all(output.finished for output in outputs)

    def test_without_asyncio(self, llm, expected):
        handles = [llm.submit(text, GREEDY) for text in TEXTS]
        assert [tokens(handle.result(timeout=60)) for handle in handles] == expected

    def test_deltas_add_up(self, llm, expected):
        handles = [llm.submit(text, GREEDY) for text in TEXTS]
        assert [joined(handle) for handle in handles] == expected

        async def main():
            handles = [llm.submit(text, GREEDY) for text in TEXTS]
            return [joined([delta async for delta in handle]) for handle in handles]

        assert asyncio.run(main()) == expected

    def test_the_whole_output_is_there_after_and_before_the_deltas(self, llm, expected):
        handle = llm.submit(TEXTS[0], GREEDY)
        whole = handle.result()
        (delta,) = handle  # all that was not read, as one
        assert tokens(delta) == tokens(whole) == expected[0]
        assert delta.outputs.text == whole.outputs.text
        assert handle.get() is None
        assert handle.result() == whole

    def test_nobody_needs_to_read(self, llm, expected):
        handle = llm.submit(TEXTS[0], GREEDY)
        until(lambda: handle.is_finished)
        assert handle.generated_length == len(expected[0])
        assert tokens(handle.get_nowait()) == expected[0]

    def test_states_and_lengths(self, llm):
        handle = llm.submit(TEXTS[0], LONG)
        seen, lengths = [handle.status], [handle.generated_length]
        while handle.get() is not None:
            seen.append(handle.status)
            lengths.append(handle.generated_length)
        assert sorted(seen, key=STATES.index) == seen
        assert seen[-1] == "finished"
        assert sorted(lengths) == lengths
        assert lengths[-1] == LONG.max_tokens

    def test_stats(self, llm):
        handle = llm.submit(TEXTS[0], LONG)
        before = time.time()
        output = handle.result()
        stats = handle.stats
        assert stats.context_token_length == len(output.prompt_token_ids)
        assert stats.generated_token_length == LONG.max_tokens
        assert stats.context_cached_length == output.num_cached_tokens
        assert before - 5 < stats.arrival_time <= stats.first_token_time
        assert stats.first_token_time < stats.last_token_time == stats.finished_time
        assert stats.finished_time <= time.time()
        assert stats.time_to_first_token >= stats.time_in_queue >= 0
        seconds = stats.last_token_time - stats.first_token_time
        assert stats.generate_tps == pytest.approx((LONG.max_tokens - 1) / seconds)

    def test_waiting_has_a_limit(self, llm):
        handle = llm.submit(TEXTS[0], ENDLESS)
        with pytest.raises(TimeoutError, match="has not ended within 0 s"):
            handle.result(timeout=0)
        with pytest.raises(TimeoutError, match="nothing new"):
            drain(handle)
        handle.abort()

    def test_two_readers_are_refused(self, narrow):
        """Nothing of the request is there to be read before the engine goes on."""
        with paused(narrow) as (pause, _):
            handle = narrow.submit(TEXTS[0], LONG)

            async def main():
                first = asyncio.create_task(anext(handle))
                await asyncio.sleep(0)
                with pytest.raises(RuntimeError, match="is being read by another thread or task"):
                    await anext(handle)
                with pytest.raises(RuntimeError, match="give each handle one reader"):
                    handle.get_nowait()
                pause.may_go_on.set()
                await first

            asyncio.run(main())
        assert handle.result().is_ok  # waiting for the whole output is no reading

    def test_n_completions(self, llm):
        params = SamplingParams(n=3, seed=5, temperature=1, top_p=1, max_tokens=8)
        handle = llm.submit(TEXTS[0], params)
        by_index = {0: [], 1: [], 2: []}
        for delta in handle:
            for completion in delta.outputs:
                by_index[completion.index] += completion.token_ids
        output = handle.result()
        assert [list(each.token_ids) for each in output.outputs] == list(by_index.values())
        assert len({tuple(ids) for ids in by_index.values()}) == 3
        assert output.finished

    def test_a_released_handle_holds_nothing(self, llm):
        handle = llm.submit(TEXTS[0], GREEDY)
        handle.result()
        handle.release()
        assert handle.get_nowait() is None
        with pytest.raises(RuntimeError, match="was released"):
            handle.result()

    def test_reasoning_and_media(self, tiny_folder, reference_of, make_picture):
        reference = reference_of("qwen2_5_vl")
        picture = make_picture(1, 70, 90)
        text = f"A {reference.image_text()} B"
        with AsyncLLM(str(tiny_folder("qwen2_5_vl")), **OPTIONS) as llm:
            prompt = {"prompt": text, "multimodal_data": {"image": picture}}
            output = llm.submit(prompt, GREEDY).result()
            assert tokens(output) == reference.generate(text, [picture])
            assert output.num_input_image_tokens > 0


class TestGenerate:
    @pytest.mark.parametrize("kind", ["cumulative", "delta", "final_only"])
    def test_what_it_yields(self, llm, expected, kind):
        params = SamplingParams(temperature=0, max_tokens=12, output_kind=kind)

        async def main():
            return [output async for output in llm.generate(TEXTS[0], params, request_id="a")]

        outputs = asyncio.run(main())
        assert {output.request_id for output in outputs} == {"a"}
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        if kind == "delta":
            assert joined(outputs) == expected[0]
        else:
            assert tokens(outputs[-1]) == expected[0]
            assert all(expected[0][: len(tokens(each))] == tokens(each) for each in outputs)
        if kind == "final_only":
            assert len(outputs) == 1

    def test_abort_by_name(self, llm):
        async def main():
            found = []
            async for output in llm.generate(TEXTS[0], ENDLESS, "mine"):
                found.append(output)
                await llm.abort("mine")
            return found[-1]

        last = asyncio.run(main())
        assert last.outputs.finish_reason == "abort"
        assert 0 < len(tokens(last)) < ENDLESS.max_tokens

    def test_a_name_in_use_is_refused(self, llm):
        handle = llm.submit(TEXTS[0], ENDLESS, request_id="twin")
        with pytest.raises(RequestError, match="'twin'"):
            llm.submit(TEXTS[0], GREEDY, request_id="twin")
        handle.abort()
        handle.result()
        assert llm.submit(TEXTS[0], GREEDY, request_id="twin").result().is_ok

    def test_wrong_arguments_raise_at_once(self, llm):
        with pytest.raises(TypeError, match="must be SamplingParams"):
            llm.submit("a", {"temperature": 0})
        with pytest.raises(TypeError, match="Invalid type for 'prompt'"):
            llm.submit(5)

    def test_a_wrong_prompt_is_an_output(self, llm):
        output = llm.submit("x" * 5000, GREEDY).result()
        assert output.error_code == 400
        assert output.outputs.finish_reason == "error"
        handle = llm.submit({"prompt_token_ids": [10**9]}, GREEDY)
        assert [delta.error_code for delta in handle] == [400]
        assert handle.status == "interrupted"


class TestNothingStays:
    """Blocks are free again, and the engine has nothing to do."""

    def test_after_an_abort(self, llm):
        until(lambda: is_idle(llm))
        before = free_blocks(llm)
        handle = llm.submit(TEXTS[0], ENDLESS)
        handle.get()
        handle.abort()
        output = handle.result(timeout=60)
        assert output.outputs.finish_reason == "abort"
        assert handle.status == "interrupted"
        assert 0 < len(tokens(output)) < ENDLESS.max_tokens
        until(lambda: is_idle(llm) and free_blocks(llm) == before)

    @pytest.mark.full
    def test_after_a_dropped_handle(self, llm):
        before = free_blocks(llm)
        handle = llm.submit(TEXTS[0], ENDLESS)
        handle.get()
        del handle
        gc.collect()
        until(lambda: is_idle(llm) and free_blocks(llm) == before)

    def test_after_a_cancelled_task(self, llm):
        before = free_blocks(llm)

        async def wait():
            await llm.submit(TEXTS[0], ENDLESS)

        async def read():
            async for _ in llm.submit(TEXTS[0], ENDLESS):
                pass

        async def main():
            tasks = [asyncio.create_task(each()) for each in (wait, read)]
            await asyncio.sleep(0.05)
            for task in tasks:
                task.cancel()
            done = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(each) for each in done] == [asyncio.CancelledError] * 2
            until(lambda: is_idle(llm) and free_blocks(llm) == before)

        asyncio.run(main())

    def test_after_a_closed_generator(self, llm):
        before = free_blocks(llm)

        async def main():
            outputs = llm.generate(TEXTS[0], ENDLESS)
            await anext(outputs)
            await outputs.aclose()
            until(lambda: is_idle(llm) and free_blocks(llm) == before)

        asyncio.run(main())

    def test_after_a_time_limit_of_the_caller(self, llm):
        async def main():
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(llm.submit(TEXTS[0], ENDLESS), 0.02)
            until(lambda: is_idle(llm))

        asyncio.run(main())

    def test_a_reader_that_is_slow_stalls_nobody(self, llm, expected):
        slow = llm.submit(TEXTS[1], LONG)
        assert slow.get() is not None
        assert tokens(llm.submit(TEXTS[0], GREEDY).result(timeout=60)) == expected[0]
        until(lambda: slow.is_finished)
        rest = slow.get()
        assert len(tokens(rest)) > 1
        assert tokens(slow.result())[-len(tokens(rest)) :] == tokens(rest)


class TestQueue:
    def test_a_full_queue_raises(self, narrow):
        with paused(narrow) as (_, running):
            waiting = [narrow.submit(TEXTS[0], GREEDY) for _ in range(2)]
            with pytest.raises(QueueFullError, match="max_queued allows 3"):
                narrow.submit(TEXTS[0], GREEDY, wait=False)
            assert not any(each.is_finished for each in (running, *waiting))
        assert running.result(timeout=60).is_ok
        assert all(each.result(timeout=60).is_ok for each in waiting)
        assert narrow.submit(TEXTS[0], GREEDY, wait=False).result().is_ok

    def test_or_waits(self, narrow, expected):
        handles = [narrow.submit(TEXTS[n % 3], GREEDY) for n in range(12)]
        assert [tokens(handle.result(timeout=60)) for handle in handles] == expected * 4

    def test_smaller_priorities_come_first(self, tiny_folder):
        options = {**OPTIONS, "max_num_seqs": 1, "num_intake_threads": 2}  # as many as are begun
        with AsyncLLM(str(tiny_folder("mistral")), **options) as llm:
            with paused(llm):
                priorities = [5, 0, 6, -1]
                handles = [llm.submit(TEXTS[0], GREEDY, priority=number) for number in priorities]
                until(lambda: llm._desk._inbox.qsize() == len(handles))  # all are prepared
            begins = [handle.result(60) and handle.stats.first_token_time for handle in handles]
        assert sorted(range(4), key=begins.__getitem__) == [3, 1, 0, 2]

    def test_a_request_has_a_deadline_wherever_it_is(self, narrow, clock):
        with paused(narrow, timeout=300) as (_, running):
            queued = narrow.submit(TEXTS[1], LONG, timeout=200)
            clock.pass_by(300)
        assert queued.result(60).error_code == 408
        assert running.result(60).error_code == 408
        assert queued.status == running.status == "interrupted"
        assert running.generated_length > 0
        assert queued.generated_length == 0

    def test_tasks_wait_without_stopping_their_loop(self, narrow, expected):
        params = SamplingParams(temperature=0, max_tokens=12, output_kind="final_only")

        async def one(number):
            async for output in narrow.generate(TEXTS[number % 3], params):
                return tokens(output)

        async def main():
            tasks = [asyncio.create_task(one(number)) for number in range(12)]
            await asyncio.sleep(0)
            tasks[-1].cancel()
            return await asyncio.gather(*tasks, return_exceptions=True)

        found = asyncio.run(main())
        assert found[:-1] == (expected * 4)[:-1]
        assert isinstance(found[-1], asyncio.CancelledError)
        assert narrow.submit(TEXTS[0], GREEDY, wait=False).result().is_ok


class TestEnd:
    def test_finish_ends_what_runs_and_refuses_more(self, tiny_folder):
        with AsyncLLM(str(tiny_folder("mistral")), **OPTIONS) as llm:
            handles = [llm.submit(TEXTS[0], LONG) for _ in range(3)]
            llm.finish()
            assert all(handle.result(timeout=0).is_ok for handle in handles)
            with pytest.raises(EngineError, match="no more requests"):
                llm.submit(TEXTS[0], GREEDY)

    def test_close_ends_handles(self, tiny_folder):
        llm = AsyncLLM(str(tiny_folder("mistral")), **OPTIONS)
        handle = llm.submit(TEXTS[0], ENDLESS)
        handle.get()
        waiter = threading.Thread(target=handle.result)
        waiter.start()
        llm.close()
        waiter.join(60)
        assert not waiter.is_alive()
        assert handle.status == "interrupted"
        assert not handle.result().is_ok
        with pytest.raises(EngineError, match="closed"):
            llm.submit(TEXTS[0], GREEDY)
        llm.close()

    def test_async_with(self, tiny_folder):
        async def main():
            async with AsyncLLM(str(tiny_folder("mistral")), **OPTIONS) as llm:
                return await llm.submit(TEXTS[0], GREEDY)

        assert asyncio.run(main()).is_ok
