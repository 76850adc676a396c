"""data_parallel_size=2 on the CPU: the results of one engine, from two. Each is a local desk in a
process of its own."""

import itertools
import os
import random
import signal
import threading
import time

import pytest

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.engine.desk.ask import Ask
from mmdeploy_llm.engine.desk.remote import RemoteDesk
from mmdeploy_llm.errors import EngineError, RequestError, WorkerDiedError
from mmdeploy_llm.values.options.config import EngineConfig

pytestmark = pytest.mark.full  # two engines in processes of their own

OPTIONS = {
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": 512,
    "max_num_seqs": 4,
    "num_gpu_blocks_override": 64,
    "num_threads": 2,
    "num_intake_threads": 1,
}
DRAWN = SamplingParams(temperature=0.9, max_tokens=10, ignore_eos=True)
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture(scope="module")
def folder(tiny_folder):
    return tiny_folder("qwen2_5_vl")


@pytest.fixture(scope="module")
def one(folder):
    with LLM(str(folder), **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def two(folder):
    with LLM(str(folder), data_parallel_size=2, **OPTIONS) as llm:
        yield llm


def ids(outputs):
    return [completion.token_ids for output in outputs for completion in output.outputs]


def desks(llm):
    return llm._desk.desks


def is_idle(llm):
    return not any(desk._held for desk in (llm._desk, *desks(llm)))


def wait_until_idle(llm):
    deadline = time.monotonic() + 600
    while not is_idle(llm) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert is_idle(llm)


def test_results_are_those_of_one_engine_in_the_callers_order(one, two):
    """Drawn without a seed: each prompt's number gives it, whichever engine it comes to."""
    for llm in (one, two):
        llm._desk._numbers = itertools.count(1000)
    prompts = [f"prompt number {n}" for n in range(30)]
    found = two.generate(prompts, DRAWN, use_tqdm=False)
    assert [output.prompt for output in found] == prompts
    assert ids(found) == ids(one.generate(prompts, DRAWN, use_tqdm=False))


def test_images_samples_and_messages(one, two):
    from PIL import Image

    picture = Image.effect_noise((64, 48), 80).convert("RGB")
    prompt = {"prompt": IMAGE + "what?", "multimodal_data": {"image": picture}}
    params = SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=6)
    expected, found = (llm.generate(prompt, params, use_tqdm=False) for llm in (one, two))
    assert ids(found) == ids(expected)
    assert [completion.index for completion in found[0].outputs] == [0, 1, 2]
    assert found[0].item["prompt"] == prompt["prompt"]
    assert found[0].prompt == prompt["prompt"]
    content = [{"type": "text", "text": "hi"}, {"type": "image", "image": picture}]
    messages = [{"role": "user", "content": content}]
    greedy = SamplingParams(temperature=0, max_tokens=6)
    expected, found = (llm.chat(messages, greedy, use_tqdm=False) for llm in (one, two))
    assert ids(found) == ids(expected)
    assert two.count_tokens(prompt) == one.count_tokens(prompt)
    assert two.cache_stats()["processed"].num_misses >= 1


def test_prompts_are_texts_and_the_tokenizer_is_here(one, two):
    messages = [{"role": "user", "content": "hi"}]
    asked = ["a text", [70, 71], {"messages": messages}, "too long " * 900]
    expected, found = (llm.generate(asked, DRAWN, use_tqdm=False) for llm in (one, two))
    assert [output.prompt for output in found] == [output.prompt for output in expected]
    assert all(output.item is item for output, item in zip(found, asked, strict=True))
    assert [output.is_ok for output in found] == [True, True, True, False]
    assert found[3].prompt == asked[3]
    words = "The quick brown fox"
    assert two.get_tokenizer()(words)["input_ids"] == one.get_tokenizer()(words)["input_ids"]
    assert two.num_kv_blocks > 1


def test_n_completions_are_one_output(one, two):
    params = DRAWN.model_copy(update={"n": 2, "seed": 5})
    prompts = [f"prompt {n}" for n in range(12)]
    expected = ids(one.generate(prompts, params, use_tqdm=False))
    found = {output.item: output for output in two.generate_iter(prompts, params)}
    assert ids(found[prompt] for prompt in prompts) == expected
    assert {len(output.outputs) for output in found.values()} == {2}


def test_both_engines_work(two):
    """More prompts than one engine takes: both have some while the run goes on."""
    count, worked = 0, set()
    for _ in two.generate_iter((f"prompt {n}" for n in range(40)), DRAWN):
        count += 1
        worked |= {number for number, desk in enumerate(desks(two)) if desk._held}
    assert (count, worked) == (40, {0, 1})


def test_streams_come_in_pieces(two):
    pieces = list(two.stream("tell me", SamplingParams(temperature=0, max_tokens=60)))
    assert len(pieces) > 2
    assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_one_wrong_prompt_is_its_own_error(two):
    class NotSent:
        def __reduce__(self):
            raise TypeError("stays here")

    wrong = {"prompt": IMAGE, "multimodal_data": {"image": NotSent()}}
    outputs = two.generate(["good", wrong, [10**9]], DRAWN, use_tqdm=False)
    assert [output.is_ok for output in outputs] == [True, False, False]
    assert "cannot (TypeError: stays here)" in outputs[1].error_msg
    assert [output.error_code for output in outputs[1:]] == [400, 400]
    with pytest.raises(RequestError, match="allowed are 0 to"):
        two.generate([[10**9]], DRAWN, use_tqdm=False, on_error="raise")
    with pytest.raises(RequestError):
        two.count_tokens([10**9])


def test_closing_an_iterator_aborts(two):
    """More prompts than the engines take."""
    outputs = two.stream([f"prompt {n}" for n in range(40)], LONG)
    next(outputs)
    outputs.close()
    wait_until_idle(two)
    assert two.stats().num_running == 0


def test_two_threads_get_their_own(two):
    results = {}

    def work(name):
        prompts = [f"{name} {n}" for n in range(12)]
        outputs = two.generate(prompts, DRAWN, use_tqdm=False)
        results[name] = [output.prompt for output in outputs] == prompts

    threads = [threading.Thread(target=work, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {"one": True, "two": True}


def test_the_prompts_of_a_dead_engine_are_tried_again(folder, one):
    """Then the other one dies too: what was in work ends in error, and later calls raise."""
    prompts = [f"prompt {n}" for n in range(24)]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    expected = ids(one.generate(prompts, params, use_tqdm=False))
    with LLM(str(folder), data_parallel_size=2, **OPTIONS) as llm:
        first, second = (desk.pid for desk in desks(llm))
        found = {}
        for number, output in enumerate(llm.generate_iter(iter(prompts), params)):
            if number == 0:
                os.kill(first, signal.SIGKILL)
            found[output.prompt] = output
        assert [found[prompt].error_msg for prompt in prompts] == [None] * len(prompts)
        assert [found[prompt].outputs.token_ids for prompt in prompts] == expected

        timer = threading.Timer(0.3, os.kill, (second, signal.SIGKILL))
        timer.start()
        outputs = llm.generate([f"again {n}" for n in range(24)], LONG, use_tqdm=False)
        timer.join()
        lost = [output for output in outputs if not output.is_ok]
        assert len(outputs) == 24
        assert lost
        assert all("died with signal SIGKILL" in output.error_msg for output in lost)
        with pytest.raises(WorkerDiedError, match="no engine is left"):
            llm.generate("more", DRAWN, use_tqdm=False)


def interrupts(seed):
    """A thread that sends Ctrl-C to this one, at a moment that the seed chooses."""
    delay = random.Random(seed).uniform(0.0, 0.15)
    main = threading.main_thread().ident
    timer = threading.Timer(delay, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    return timer


def test_ctrl_c_at_any_time(two, one):
    """Whatever was being sent or received: the engines are in step, and answer the next call."""
    wanted = ids(one.generate(["a", "b", "c"], GREEDY, use_tqdm=False))
    texts = [f"prompt {n}" for n in range(12)]
    num_interrupted = 0
    for seed in range(15):
        try:
            timer = interrupts(seed)  # which may come at once, on a busy machine
            if seed % 3:
                two.generate(texts, LONG, use_tqdm=False)
            for text in texts * 20:
                two.count_tokens(text)
            timer.join()
            time.sleep(0.01)  # for the signal to arrive
        except KeyboardInterrupt:
            num_interrupted += 1
        assert ids(two.generate(["a", "b", "c"], GREEDY, use_tqdm=False)) == wanted
    assert num_interrupted > 9
    assert not any(desk.death for desk in desks(two))
    wait_until_idle(two)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_counters_are_sums(two):
    before = two.stats()
    outputs = two.stream([f"prompt {n}" for n in range(30)], LONG)
    deadline = time.monotonic() + 600
    while two.stats().num_running < 8 and time.monotonic() < deadline:
        time.sleep(0.01)
    during = two.stats()
    assert (during.num_running, during.num_waiting) == (8, 22 - 30 + two._desk.max_begun)
    outputs.close()
    wait_until_idle(two)
    after = two.stats()
    assert (after.num_running, after.num_waiting) == (0, 0)
    assert after.num_free_blocks == before.num_free_blocks == after.num_blocks == 128
    assert after.num_generated_tokens > before.num_generated_tokens


def test_deadlines_and_priorities_reach_the_engines(two):
    ask = Ask(prompt="late", params=LONG, timeout=0.05)
    ticket = two._desk.submit(ask)
    assert ticket.get(60).error_code == 408
    assert two._desk.submit(Ask(prompt="a", params=GREEDY, priority=-1)).get(60).is_ok


def test_one_desk_in_another_process(folder, one):
    """A remote desk works alone too: it begins what it has room for, and keeps the rest."""
    desk = RemoteDesk(EngineConfig.from_options(str(folder), OPTIONS))
    desk.open()
    try:
        prompts = [f"prompt {n}" for n in range(20)]
        tickets = [desk.submit(Ask(prompt=prompt, params=GREEDY)) for prompt in prompts]
        assert desk.stats().num_waiting > 20 - desk.max_begun
        assert ids(ticket.get(60) for ticket in tickets) == ids(
            one.generate(prompts, GREEDY, use_tqdm=False)
        )
        stream = desk.submit(Ask(prompt="a", params=LONG, stream=True))
        assert stream.get(60).outputs.token_ids
        os.kill(desk.pid, signal.SIGKILL)
        while not stream.is_over:
            output = stream.get(60)
        assert "died with signal SIGKILL" in output.error_msg
        assert isinstance(stream.error, WorkerDiedError)
        with pytest.raises(WorkerDiedError):
            desk.submit(Ask(prompt="a", params=GREEDY))
        with pytest.raises(WorkerDiedError):
            desk.count_tokens("a")
    finally:
        desk.close()


@pytest.mark.long
def test_engines_may_have_ranks(folder, one):
    expected = ids(one.generate(["a", "b"], GREEDY, use_tqdm=False))
    with LLM(str(folder), data_parallel_size=2, tensor_parallel_size=2, **OPTIONS) as llm:
        assert ids(llm.generate(["a", "b"], GREEDY, use_tqdm=False)) == expected
        pids = [desk.pid for desk in desks(llm)]
    with pytest.raises(EngineError, match="closed"):
        llm.generate("a", DRAWN, use_tqdm=False)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
