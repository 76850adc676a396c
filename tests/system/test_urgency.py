"""Priority and timeout of prompts, from `generate` to the engine."""

import threading

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


class Observer:
    """Is called in every step, and records the order in which requests end."""

    def __init__(self):
        self.ended, self.num_steps, self.on_fourth_step = [], 0, None

    @hookimpl
    def on_step(self, stats):
        if self.on_fourth_step is not None:
            self.num_steps += 1
            if self.num_steps == 4:
                self.on_fourth_step()

    @hookimpl
    def on_request_finished(self, record):
        self.ended.append(record.num_prompt_tokens)


@pytest.fixture(scope="module")
def llm(tiny_folder):
    with LLM(str(tiny_folder("qwen2_5_vl")), max_num_seqs=1, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def observer(llm):
    observer = Observer()
    llm.plugins.register(observer, name="observer")
    return observer


@pytest.fixture
def seen(observer):
    observer.ended.clear()
    yield observer
    observer.on_fourth_step = None


@pytest.mark.full
def test_smaller_priorities_are_served_first(llm, seen):
    """One request runs at a time; the lengths of the prompts tell them apart."""
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    priorities = {5: 0, 6: 2, 7: -1, 8: 0, 9: -1}
    prompts = [
        {"prompt_token_ids": [20] * length, "priority": priority}
        for length, priority in priorities.items()
    ]
    begin_together(llm, len(prompts))
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [priorities[length] for length in seen.ended] == [-1, -1, 0, 0, 2]
    alone = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in prompts]
    assert [own.outputs.token_ids for own in outputs] == [own.outputs.token_ids for own in alone]


def test_a_request_ends_while_it_generates_and_while_it_waits(llm, seen, clock):
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    seen.on_fourth_step = lambda: clock.pass_by(300)
    prompts = [{"prompt": "hello", "timeout": 300}, {"prompt": "hello", "timeout": 300}, "hello"]
    begin_together(llm, len(prompts))
    short = SamplingParams(max_tokens=3, temperature=0)
    *both, third = llm.generate(prompts, [params, params, short], use_tqdm=False)
    second, first = sorted(both, key=lambda output: len(output.outputs.token_ids))
    assert (first.error_code, first.outputs.finish_reason) == (408, "error")
    num_tokens = len(first.outputs.token_ids)
    assert 0 < num_tokens < 60
    assert first.outputs.text
    assert first.error_msg == (
        f"the request was not finished within its timeout of 300 s: it had generated {num_tokens} "
        "tokens; raise timeout or leave it out"
    )
    assert second.error_code == 408
    assert "it waited to start" in second.error_msg
    assert third.is_ok
    (whole,) = llm.generate("hello", params, use_tqdm=False)
    assert whole.outputs.token_ids[:num_tokens] == first.outputs.token_ids


def test_a_request_ends_while_its_media_are_read(llm, clock):
    awake = threading.Event()

    class Pipe:
        def read(self, count):
            clock.pass_by(300)
            awake.wait(120)
            return b""

    prompt = {
        "prompt": "<|vision_start|><|image_pad|><|vision_end|>what?",
        "multimodal_data": {"image": Pipe()},
        "timeout": 300,
    }
    late, other = llm.generate([prompt, "hello"], SamplingParams(max_tokens=2), use_tqdm=False)
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
