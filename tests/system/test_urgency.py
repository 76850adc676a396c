"""Priority and timeout of prompts, from `generate` to the engine."""

import threading
import time

import pytest

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.hooks import hookimpl
from tests.together import begin_together

OPTIONS = {
    "dtype": "float32",
    "use_warmup": False,
    "block_size": 16,
    "num_threads": 1,
    "num_intake_threads": 8,  # all prompts of a call are prepared at once
}


class Slow:
    """Waits in every step, and records the order in which requests end."""

    def __init__(self):
        self.ended, self.seconds = [], 0.0

    @hookimpl
    def on_step(self, stats):
        time.sleep(self.seconds)

    @hookimpl
    def on_request_finished(self, record):
        self.ended.append(record.num_prompt_tokens)


@pytest.fixture(scope="module")
def llm(tiny_folder):
    with LLM(str(tiny_folder("qwen2_5_vl")), max_num_seqs=1, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def observer(llm):
    observer = Slow()
    llm.plugins.register(observer, name="slow")
    return observer


@pytest.fixture
def slow(observer):
    observer.ended.clear()
    yield observer
    observer.seconds = 0.0


@pytest.mark.full
def test_smaller_priorities_are_served_first(llm, slow):
    """One request runs at a time; the lengths of the prompts tell them apart."""
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    priorities = {5: 0, 6: 2, 7: -1, 8: 0, 9: -1}
    prompts = [
        {"prompt_token_ids": [20] * length, "priority": priority}
        for length, priority in priorities.items()
    ]
    begin_together(llm, len(prompts))
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [priorities[length] for length in slow.ended] == [-1, -1, 0, 0, 2]
    alone = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in prompts]
    assert [own.outputs.token_ids for own in outputs] == [own.outputs.token_ids for own in alone]


def test_a_request_ends_while_it_generates_and_while_it_waits(llm, slow):
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    slow.seconds = 0.05
    prompts = [{"prompt": "hello", "timeout": 1}, {"prompt": "hello", "timeout": 1}, "hello"]
    short = SamplingParams(max_tokens=3, temperature=0)
    *both, third = llm.generate(prompts, [params, params, short], use_tqdm=False)
    second, first = sorted(both, key=lambda output: len(output.outputs.token_ids))
    assert (first.error_code, first.outputs.finish_reason) == (408, "error")
    num_tokens = len(first.outputs.token_ids)
    assert 0 < num_tokens < 60
    assert first.outputs.text
    assert first.error_msg == (
        f"the request was not finished within its timeout of 1 s: it had generated {num_tokens} "
        "tokens; raise timeout or leave it out"
    )
    assert second.error_code == 408
    # On a slow machine the first one may end before this one's time is over.
    assert "it waited to start" in second.error_msg or "it had generated" in second.error_msg
    assert third.is_ok
    slow.seconds = 0.0
    (whole,) = llm.generate("hello", params, use_tqdm=False)
    assert whole.outputs.token_ids[:num_tokens] == first.outputs.token_ids


def test_a_request_ends_while_its_media_are_read(llm):
    awake = threading.Event()

    class Pipe:
        def read(self, count):
            awake.wait(50)
            return b""

    prompt = {
        "prompt": "<|vision_start|><|image_pad|><|vision_end|>what?",
        "multimodal_data": {"image": Pipe()},
        "timeout": 0.3,
    }
    begin = time.monotonic()
    late, other = llm.generate([prompt, "hello"], SamplingParams(max_tokens=2), use_tqdm=False)
    assert time.monotonic() - begin < 30
    awake.set()
    assert late.error_code == 408
    # The reader of the image and the engine's thread both watch the time; either may say it.
    assert "was being prepared" in late.error_msg
    assert other.is_ok


def test_wrong_values_are_the_errors_of_their_prompts(llm):
    wrong = [{"prompt": "hello", "timeout": 0}, {"prompt": "hello", "priority": "high"}]
    outputs = llm.generate([*wrong, "hello"], SamplingParams(max_tokens=2), use_tqdm=False)
    assert [output.error_code for output in outputs] == [400, 400, 200]
    assert "timeout must be a number of seconds above 0 and at most" in outputs[0].error_msg
    assert "priority must be a whole number of 64 bits, got 'high'" in outputs[1].error_msg
