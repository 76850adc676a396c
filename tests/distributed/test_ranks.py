"""tensor_parallel_size=2 on the CPU, over gloo: token for token what one process gives."""

import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from PIL import Image

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.errors import ConfigError, EngineError, WorkerDiedError
from mmdeploy_llm.values.params import GuidedDecodingParams

# Head counts that two ranks can share; ERNIE's ranks hold the same key/value head.
FAMILIES = {
    "qwen2_5_vl": ({}, "<|vision_start|><|image_pad|><|vision_end|>"),
    "ernie4_5_vl_moe": (
        {"hidden_size": 128, "num_attention_heads": 4},
        "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
    ),
}
OPTIONS = {
    "dtype": "float32",  # sums in another order flip no token
    "device": "cpu",
    "max_model_len": 512,
    "reasoning_parser": "ernie-45-vl",
    "max_num_batched_tokens": 48,  # prompts come in chunks
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 128,
    "block_size": 16,
    "num_threads": 2,
    "limit_mm_per_prompt": {"image": 4},
    "encoder_cache_memory": 2**20,
}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def picture(seed, size=(64, 48)):
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (size[1], size[0], 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


@pytest.fixture(
    scope="module", params=[pytest.param("qwen2_5_vl", marks=pytest.mark.full), "ernie4_5_vl_moe"]
)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def folder(tiny_folder, family):
    return tiny_folder(family, **FAMILIES[family][0])


@pytest.fixture(scope="module")
def one(folder):
    with LLM(str(folder), **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def two(folder):
    llm = LLM(str(folder), tensor_parallel_size=2, **OPTIONS)
    workers = llm._desk.engine._runner._workers
    yield llm
    assert all(is_alive(worker.pid) for worker in workers)
    llm.close()
    assert not any(is_alive(worker.pid) for worker in workers)
    assert not any(was_killed(worker) for worker in workers)
    with pytest.raises(EngineError, match="closed"):
        llm.generate("hello", use_tqdm=False)


@pytest.fixture
def with_image(family):
    def prompt(text, *images):
        marks = FAMILIES[family][1] * len(images)
        return {"prompt": marks + text, "multimodal_data": {"image": list(images)}}

    return prompt


def answers(llm, prompts, params):
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.error_msg for output in outputs] == [None] * len(outputs)
    return outputs


def ids(outputs):
    return [completion.token_ids for output in outputs for completion in output.outputs]


def test_text_and_images_greedy_and_drawn(one, two, with_image):
    """Long enough for several chunks, images of two sizes, more requests than run at once."""
    prompts = ["a short one", "the same words again and again " * 3]
    prompts += [with_image("what is it?", picture(1)), with_image("both", picture(1), picture(2))]
    prompts += [with_image(f"number {n}", picture(n, (32 * n, 64))) for n in (2, 3)]
    drawn = SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=12, ignore_eos=True)
    penalised = SamplingParams(
        temperature=0.7, top_k=20, seed=1, max_tokens=12, repetition_penalty=1.3, min_tokens=4
    )
    params = [GREEDY, drawn, GREEDY, drawn, penalised, GREEDY]
    expected = answers(one, prompts, params)
    found = answers(two, prompts, params)
    assert ids(found) == ids(expected)
    assert [output.outputs.text for output in found] == [o.outputs.text for o in expected]


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        pytest.param("mistral", {"sliding_window": 20}, marks=pytest.mark.long),
        ("qwen3_5_text", {}),
    ],
)
def test_what_layers_keep_besides_the_plain_cache(tiny_folder, transformers_of, name, sizes):
    """Block tables of layers with a window, and rows of states, reach the ranks with each step."""
    folder = tiny_folder(name, **sizes)
    prompts = ["a short one", "the same words again and again " * 4]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with LLM(str(folder), tensor_parallel_size=2, **OPTIONS) as llm:
        for _ in range(2):  # the second time from the prefix cache
            outputs = answers(llm, prompts, params)
            reference = transformers_of(folder)
            wanted = [reference.generate(output.prompt_token_ids, 40) for output in outputs]
            assert ids(outputs) == wanted


@pytest.mark.full
def test_samples_and_logprobs(one, two):
    params = SamplingParams(
        n=3, temperature=1.0, seed=5, max_tokens=8, logprobs=3, prompt_logprobs=2
    )
    expected, found = (answers(llm, "once upon a time", params) for llm in (one, two))
    assert ids(found) == ids(expected)
    ((one_output,), (two_output,)) = expected, found
    for one_own, two_own in zip(one_output.outputs, two_output.outputs, strict=True):
        for a, b in zip(one_own.logprobs, two_own.logprobs, strict=True):
            assert a.keys() == b.keys()
            for token in a:
                assert a[token].logprob == pytest.approx(b[token].logprob, abs=1e-4)
    assert len(two_output.prompt_logprobs) == len(one_output.prompt_logprobs)


def test_prefix_cache(one, two, with_image):
    prompt = with_image("a beginning that comes again " * 4, picture(9))
    expected = ids(answers(one, prompt, GREEDY))
    assert ids(answers(two, prompt, GREEDY)) == expected
    again = answers(two, prompt, GREEDY)
    assert again[0].num_cached_tokens > 0
    assert ids(again) == expected


@pytest.mark.full
def test_embeddings_reach_every_rank(one, two, with_image):
    """Ranks take embeddings among images; a wrong width is refused before any rank sees it."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(6, one.model.hidden_size, generator=generator)
    given = {"image_embeds": rows, "grid": (1, 4, 6)}
    prompts = [with_image("what is it?", given), with_image("both", picture(1), given)]
    expected = ids(answers(one, prompts, GREEDY))
    assert ids(answers(two, prompts, GREEDY)) == expected
    wrong = with_image("what?", {**given, "image_embeds": rows[:, 1:]})
    (output,) = two.generate(wrong, GREEDY, use_tqdm=False)
    assert output.error_code == 400
    assert "the encoder of this model returns rows of" in output.error_msg


@pytest.mark.full
def test_guided_decoding(one, two):
    pytest.importorskip("llguidance", reason="needs llguidance: the extra 'guided'")
    guided = GuidedDecodingParams(choice=['{"a": 1}', '{"a": 2}'])
    params = SamplingParams(
        temperature=0.8, seed=2, max_tokens=60, reasoning_max_tokens=9, guided_decoding=guided
    )
    for prompt in ("json please", "json please <think>"):
        expected, found = (answers(llm, prompt, params) for llm in (one, two))
        assert ids(found) == ids(expected)
        assert found[0].outputs.text in guided.choice
    assert found[0].outputs.reasoning_content


def test_logits_processors_and_early_stops(one, two):
    args = {"repetition_window": 3, "repetition_window_penalty": 50}
    params = SamplingParams(
        temperature=0.8,
        seed=2,
        max_tokens=24,
        ignore_eos=True,
        logits_processors="repetition-window",
        logits_processors_args=args,
        early_stop={"window_size": 9, "threshold": 0.0},
    )
    expected, found = (answers(llm, "again and again", params) for llm in (one, two))
    assert ids(found) == ids(expected)
    assert found[0].outputs.finish_reason == "repetition"


def test_abort_leaves_the_ranks_in_step(one, two, with_image):
    stream = two.stream(with_image("go on", picture(4)), GREEDY)
    next(stream)
    stream.close()
    assert ids(answers(two, "afterwards", GREEDY)) == ids(answers(one, "afterwards", GREEDY))


def test_a_request_that_fails_on_all_ranks_fails_alone(one, two, with_image):
    """Pixels of a wrong width reach the model on every rank, which raises on each of them."""
    good = with_image("fine", picture(5))
    expected = ids(answers(one, good, GREEDY))
    request, *_ = two._desk.intake.accept(with_image("broken", picture(6)), GREEDY)
    item = request.media[0].item
    item.tensors["pixels"] = item.tensors["pixels"][:, :-1].clone()
    two._desk.engine.add(request)
    outputs = []
    while two._desk.engine.has_work:
        outputs += two._desk.engine.step()
    assert outputs[-1].error_code == 500
    assert "could not be encoded" in outputs[-1].error_msg
    two._desk.intake.media._processed.clear()
    assert ids(answers(two, good, GREEDY)) == expected


def test_the_model_is_in_other_processes(two):
    assert two.model is None
    assert two.runtime.device == "cpu"
    assert two.runtime.num_threads == 1


@pytest.mark.full
class TestDeath:
    """Interrupted calls leave the ranks in step; requests and processes end when a rank dies."""

    @pytest.fixture
    @classmethod
    def llm(cls, tiny_folder):
        with LLM(str(tiny_folder("llama")), tensor_parallel_size=2, **OPTIONS) as llm:
            yield llm

    def test_killed_in_the_middle_of_a_run(self, llm):
        workers = llm._desk.engine._runner._workers
        pids = [worker.pid for worker in workers]
        prompts = [f"prompt {n}" for n in range(40)]
        params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)

        def kill():
            while llm.stats().num_generated_tokens < 100:
                time.sleep(0.01)
            os.kill(pids[1], signal.SIGKILL)

        thread = threading.Thread(target=kill)
        thread.start()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        thread.join()
        assert len(outputs) == len(prompts)
        lost = [output for output in outputs if not output.is_ok]
        assert lost
        assert all(output.error_code == 500 for output in lost)
        assert all("died with signal SIGKILL" in output.error_msg for output in lost)
        assert not any(is_alive(pid) for pid in pids)
        with pytest.raises(WorkerDiedError, match="rank 1"):
            llm.generate("and now", params, use_tqdm=False)
        with pytest.raises(WorkerDiedError, match="rank 1"):
            list(llm.generate_iter(iter(["and now"])))

    def test_ctrl_c_at_any_time_and_then_the_end_of_an_endless_iterable(self, llm):
        """Signals from a thread leave the ranks in step; a rank that dies ends an iterable."""
        wanted = ids(answers(llm, ["a", "b", "c"], GREEDY))
        params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
        num_interrupted, main = 0, threading.main_thread().ident
        for seed in range(12):
            delay = random.Random(seed).uniform(0.0, 0.2)
            timer = threading.Timer(delay, signal.pthread_kill, (main, signal.SIGINT))
            try:
                timer.start()
                llm.generate([f"prompt {n}" for n in range(20)], params, use_tqdm=False)
                timer.join()
                time.sleep(0.01)
            except KeyboardInterrupt:
                num_interrupted += 1
            assert ids(answers(llm, ["a", "b", "c"], GREEDY)) == wanted
        assert num_interrupted > 8

        outputs = llm.generate_iter((f"prompt {n}" for n in range(10**9)), GREEDY)
        next(outputs)
        workers = llm._desk.engine._runner._workers
        os.kill(workers[1].pid, signal.SIGSEGV)
        with pytest.raises(WorkerDiedError, match=r"rank 1 .* died with signal SIGSEGV"):
            for _ in outputs:
                pass
        llm.close()  # the other rank may have waited for the dead one
        assert not any(is_alive(worker.pid) for worker in workers)


def was_killed(worker):
    """Whether it had not ended by itself when it was closed."""
    return worker._process.returncode == -signal.SIGKILL


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_what_is_wrong_at_the_start_is_raised_as_it_is(tiny_folder):
    """It is raised before a process is started."""
    with pytest.raises(ConfigError, match=r"does not divide 4 heads of attention.*use 1, 2, 4"):
        LLM(str(tiny_folder("llama")), tensor_parallel_size=3, **OPTIONS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a card")
@pytest.mark.parametrize(
    ("several", "starts"),
    [
        ("tensor_parallel_size", "engine.runner.distributed"),
        ("data_parallel_size", "engine.desk.remote"),
    ],
)
def test_cards_that_are_not_there_are_told_before_processes_start(
    tiny_folder, monkeypatch, several, starts
):
    monkeypatch.setattr(f"mmdeploy_llm.{starts}.Worker", None)
    with pytest.raises(ConfigError, match=r"device = 'cuda', but .*use device='cpu'"):
        LLM(str(tiny_folder("llama")), **{**OPTIONS, "device": "cuda", several: 2})


ENDLESS = """
import sys
from mmdeploy_llm import LLM, SamplingParams

options = eval(sys.argv[2])
llm = LLM(sys.argv[1], tensor_parallel_size=2, **options)
print(*[worker.pid for worker in llm._desk.engine._runner._workers], flush=True)
params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
try:
    for output in llm.generate_iter((f"prompt {n}" for n in range(10**9)), params):
        print("one", flush=True)
except KeyboardInterrupt:
    (output,) = llm.generate("and then", SamplingParams(max_tokens=3), use_tqdm=False)
    print("interrupted", output.is_ok, flush=True)
    raise
"""


@pytest.mark.long
def test_ctrl_c_reaches_the_caller_alone(tiny_folder):
    """As in a terminal the signal goes to all processes; the ranks leave it to their parent, which
    can go on with them or end, and then they end."""
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS, str(tiny_folder("llama")), repr(OPTIONS)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert process.stdout.readline() == "one\n"
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert "interrupted True" in out
    assert err.rstrip().endswith("KeyboardInterrupt")
    deadline = time.monotonic() + 600
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_alive(pid) for pid in pids)


@pytest.mark.full
def test_decode_steps_on_packed_weights(tiny_folder):
    """bf16 and the CPU kernels, whose recorded decode steps must not leave out the sums. The same
    token is forced in every step, so that the distributions are of the same text."""
    folder = tiny_folder("llama", hidden_size=128, intermediate_size=256)
    forced = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, logit_bias={77: 1000.0}, logprobs=5
    )
    options = {**OPTIONS, "dtype": "bfloat16"}
    scores = []
    for size in (1, 2):
        with LLM(str(folder), tensor_parallel_size=size, **options) as llm:
            (output,) = answers(llm, "some words to begin with", forced)
            assert output.outputs.token_ids == [77] * 12
            scores.append([step[77].logprob for step in output.outputs.logprobs])
    difference = torch.tensor(scores[0]) - torch.tensor(scores[1])
    assert difference.abs().max() < 0.1, scores
    assert torch.tensor(scores[0]).std() > 0
