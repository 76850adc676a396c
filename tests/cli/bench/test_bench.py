"""`mmdeploy-llm bench` on the bundled model: figures agree with each other and the workload."""

import io
import json
import random
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

from mmdeploy_llm import cli
from mmdeploy_llm.cli.bench import machine as machines
from mmdeploy_llm.cli.bench.cost import MediaFlops, kv_block_bytes, model_cost
from mmdeploy_llm.cli.bench.machine import Machine, measure_machine
from mmdeploy_llm.cli.bench.profile import PHASES, Clock, Profiler
from mmdeploy_llm.cli.bench.report import _memory, result_table
from mmdeploy_llm.cli.bench.results import Alone, BenchResult, Limit, Memory, Round
from mmdeploy_llm.cli.bench.works import Workload
from mmdeploy_llm.client.llm import LLM
from mmdeploy_llm.kernels import cpu as native
from mmdeploy_llm.layers import CausalLM, DecoderConfig, RotaryConfig
from mmdeploy_llm.values.outputs.metrics import StepStats
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.weights.folder import read_checkpoint, resolve_model

SLOW = Machine(precision="bfloat16", flops=1e6, bandwidth=1e12)  # arithmetic dominates


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(machines, "SECONDS_EACH", 0.01)
    monkeypatch.setattr(machines, "READ_BYTES", 2**22)


def run(*args):
    result = CliRunner().invoke(cli.app, ["bench", *args])
    assert result.exit_code == 0, result.output
    return result.stdout


def measured(*args):
    options = ("--rounds", "1", "--num-threads", "1", "--engine", "kv_cache_memory=16777216")
    return json.loads(run(*args, *options, "--json"))


def step(num_tokens, num_sampled):
    zeros = dict.fromkeys(StepStats.__dataclass_fields__, 0)
    return StepStats(
        **{**zeros, "num_scheduled_tokens": num_tokens, "num_sampled_tokens": num_sampled}
    )


@pytest.mark.full
def test_text_counts_what_was_asked_and_times_agree():
    found = measured("text", "--requests", "3", "--max-num-seqs", "2", "--profile")
    (done,) = found["rounds"]
    rng, num_in, num_out = random.Random(0), 0, 0
    for _ in range(3):
        length = rng.randint(64, 192)
        num_in += length
        for _ in range(length):
            rng.choice(range(20, 672))  # usable ids of the bundled model's vocabulary
        num_out += rng.randint(32, 96)
    assert (done["num_prompt_tokens"], done["num_output_tokens"]) == (num_in, num_out)
    assert found["output_tokens_per_second"] == pytest.approx(num_out / done["seconds"])
    assert found["images_per_second"] == 0
    assert (found["max_num_seqs"], found["num_threads"]) == (2, 1)
    assert found["alone"]["num_prompt_tokens"] == found["alone"]["num_output_tokens"] == 128
    assert min(found["alone"]["per_output_token"], found["alone"]["first_token"]) > 0
    assert found["load_to_first_token"] > 0
    # A machine that is busy while its limit is measured may do more afterwards.
    limit, seconds = found["limit"]["seconds"], done["seconds"]
    assert found["limit"]["share"] == pytest.approx(limit / seconds)
    assert found["memory"]["peak"] > found["memory"]["weights"] > 2**20
    # Two concurrent requests of at least 64 + 1 tokens need more than two blocks of 64.
    assert found["memory"]["kv_cache"] > 0


@pytest.mark.full
def test_photos_are_decoded_and_encoded_and_the_profile_adds_up():
    found = measured("photo", "--requests", "2", "--profile")
    (done,) = found["rounds"]
    assert done["num_images"] == 2
    assert found["images_per_second"] == pytest.approx(2 / done["seconds"])
    profile = found["profile"]
    whole = {row["phase"]: row["seconds"] for row in profile["rows"] if not row["kind"]}
    assert set(whole) == {*PHASES, "between steps", "intake"}
    beside = whole.pop("intake")
    assert sum(whole.values()) == pytest.approx(profile["seconds"])
    assert beside > 0.05  # two JPEG files of 12 megapixels
    for phase in ("encode", "forward"):
        kinds = {
            row["kind"]: row["seconds"]
            for row in profile["rows"]
            if row["kind"] and row["phase"] == phase
        }
        assert sum(kinds.values()) == pytest.approx(whole[phase])
        wanted = {"linear", "attention", "norm", "rotary", "activation"}
        assert wanted <= kinds.keys() - {kind for kind in kinds if not kinds[kind]}
    assert whole["encode"] > 0
    assert whole["sample"] > 0


@pytest.mark.full
@pytest.mark.parametrize(("quantization", "name"), [("int8", "int8"), ("wint4", "int4wo")])
def test_quantization_and_tables(quantization, name):
    text = run(
        "vl", "--requests", "2", "--rounds", "1", "--num-threads", "1",
        "--quantization", quantization, "--kv-cache-dtype", "int8", "--profile", "--dummy",
        "--engine", "kv_cache_memory=16777216",
    )  # fmt: skip
    kinds = f"{name}, KV cache int8"
    for words in ("images/s", kinds, "share of the limit", "attention", "intake"):
        assert words in text


@pytest.mark.parametrize(
    ("machine", "num_requests", "words"),
    [
        (Machine(precision="bfloat16", flops=1e11, bandwidth=1e10, level="avx2"), 32, "--profile"),
        (Machine(precision="float32", flops=1e11, bandwidth=1e10, level="avx2"), 32, "half the"),
        (Machine(precision="bfloat16", flops=1e11, bandwidth=1e10), 32, "mmdeploy-llm doctor"),
        (Machine(precision="bfloat16", flops=1e11, bandwidth=1e10, level="avx2"), 1, "--requests"),
    ],
)
def test_a_small_share_of_the_limit_comes_with_what_to_try(machine, num_requests, words):
    result = BenchResult(
        work="text",
        model="m",
        device="cpu",
        dtype=machine.precision,
        quantization=None,
        kv_cache_dtype=machine.precision,
        max_num_seqs=32,
        num_requests=num_requests,
        num_threads=2,
        rounds=(Round(seconds=2, num_prompt_tokens=9, num_output_tokens=9, num_images=0),),
        load_to_first_token=1,
        alone=Alone(first_token=1, per_output_token=1, num_prompt_tokens=1, num_output_tokens=2),
        memory=Memory(peak=2**20, kv_cache=0, weights=None),
        limit=Limit(machine=machine, seconds=0.8, share=0.4),
        profile=None,
    )
    assert words in shown(result)
    assert ("kernels for avx2" if machine.level else "plain torch") in shown(result)
    enough = replace(result, limit=Limit(machine=machine, seconds=1.8, share=0.9))
    assert "what to try" not in shown(enough)
    assert "60 % of the time goes elsewhere, see what to try" in shown(result)
    assert "90 %  near the limit of this machine" in shown(enough)
    usual = replace(result, limit=Limit(machine=machine, seconds=1.2, share=0.6))
    assert "60 %  as it should be" in shown(usual)


@pytest.mark.parametrize(
    ("weights", "kv_cache", "peak", "words"),
    [
        (10, 4, 365, "all else 351 MiB: mostly the program with torch"),
        (900, 4, 1200, "all else 296 MiB: mostly weights"),
        (10, 900, 1200, "all else 290 MiB: mostly the KV cache"),
    ],
)
def test_memory_comes_with_what_takes_most_of_it(weights, kv_cache, peak, words):
    sizes = (2**20 * size for size in (peak, kv_cache, weights))
    peak, kv_cache, weights = sizes
    assert words in _memory(Memory(peak=peak, kv_cache=kv_cache, weights=weights))


def shown(result):
    console = Console(width=400, record=True, file=io.StringIO())
    console.print(result_table(result))
    return console.export_text()


@pytest.mark.full
def test_a_request_that_fails_is_an_error(monkeypatch):
    monkeypatch.setattr("mmdeploy_llm.cli.bench.works.ALONE_TOKENS", 400)
    args = ["bench", "text", "--requests", "1", "--engine", "max_model_len=256"]
    result = CliRunner().invoke(cli.app, args)
    assert result.exit_code == 2
    assert "a request of the workload failed" in result.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "work", "words"),
    [
        ("whisper", "text", "no workload has sounds"),
        ("vision_encoder_decoder", "text", "the workloads vl and photo have a picture"),
        ("qwen2", "vl", "the workload text has no pictures"),
    ],
)
def test_what_a_model_does_not_read_is_told_with_what_it_reads(tiny_folder, family, work, words):
    options = ["--requests", "1", "--rounds", "1", "-m", str(tiny_folder(family))]
    result = CliRunner().invoke(cli.app, ["bench", work, *options])
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())


@pytest.mark.parametrize("name", ["text", "vl", pytest.param("photo", marks=pytest.mark.full)])
def test_workloads_are_the_same_again_and_differ_by_seed(tmp_path, name):
    work = Workload(name=name, num_requests=2, vocab_size=100, folder=tmp_path)

    def contents(seed):
        found = []
        for request in work.round(seed):
            prompt = request.prompt
            if isinstance(prompt, dict):
                image = prompt["messages"][0]["content"][0]["image"]
                prompt = Path(image).read_bytes() if name == "photo" else image.tobytes()
            found.append(prompt)
        return found

    first = contents(1)
    assert first == contents(1)
    assert first[0] != first[1]
    assert not any(prompt in contents(2) for prompt in first)


def test_prompts_hold_no_special_tokens(tmp_path):
    special = frozenset(range(20, 90))
    work = Workload(
        name="text", num_requests=4, vocab_size=100, folder=tmp_path, special_ids=special
    )
    used = {token for request in work.round(0) for token in request.prompt}
    assert used
    assert used <= set(range(90, 100))


def tiny(is_tied):
    config = DecoderConfig(
        vocab_size=50,
        hidden_size=8,
        intermediate_size=12,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        rotary=RotaryConfig(head_dim=4),
        norm_eps=1e-6,
        is_tied=is_tied,
    )
    with torch.device("meta"):
        return CausalLM(config)


@pytest.mark.parametrize("is_tied", [True, False])
def test_cost_of_a_decoder(is_tied):
    cost = model_cost(tiny(is_tied))
    each = 8 * (8 + 4 + 4) + 8 * 8 + 3 * 8 * 12  # qkv, o, gate, up and down
    assert (cost.dense, cost.head) == (2 * each, 50 * 8)
    assert cost.total == 2 * each + (1 if is_tied else 2) * 400 + 5 * 8  # with norms
    copied = 400 * 2 if is_tied else 0
    assert cost.weight_bytes("bfloat16", "int8") == cost.total + copied
    # One step of ten tokens, three of them sampled, and 5 seconds of arithmetic for media.
    seconds = cost.seconds([step(10, 3)], 5e6, SLOW)
    assert seconds == pytest.approx(2 * (10 * 2 * each + 3 * 400) / 1e6 + 5)
    # With few rows, reading the weights takes longer than the arithmetic.
    reading = Machine(precision="bfloat16", flops=1e12, bandwidth=1e3)
    assert cost.seconds([step(1, 0)], 0, reading) == pytest.approx(2 * 2 * each / 1e3)


def test_cost_of_another_model_is_not_guessed():
    assert model_cost(nn.Linear(2, 2)) is None


@pytest.mark.full
def test_sparse_layers_cost_what_a_token_uses_and_media_what_the_encoder_gets():
    with LLM("shapes-vl", num_threads=1, kv_cache_memory=2**24) as llm:
        checkpoint = read_checkpoint(resolve_model("shapes-vl"))
        spec = llm.plugins.model_for(checkpoint.config.architectures)
        with torch.device("meta"):
            shapes = llm.plugins.build(spec, checkpoint.config)
        cost = model_cost(shapes)
        # Three sparse layers; of text (64) and media (48) experts the smaller ones are counted.
        assert [part.num_values for part in cost.experts] == [4 * 3 * 192 * 48] * 3
        assert {part.share for part in cost.experts} == {2 / 4}
        counter = MediaFlops(llm.model, shapes)
        work = Workload(name="vl", num_requests=1, vocab_size=672, folder=None)
        params = SamplingParams(max_tokens=1)
        with counter.counting():
            llm.generate([5, 6, 7], params, use_tqdm=False)
            assert counter.flops == 0
            (output,) = llm.generate(work.alone(0).prompt, params, use_tqdm=False)
        num_patches = output.num_input_image_tokens * 4
        layers = 4 * (128 * 128 * 4 + 2 * 128 * 512)
        assert counter.flops > 2 * num_patches * layers
        assert counter.flops < 2 * num_patches * layers * 2  # with patch embedding and projection
        before = counter.flops
        llm.generate(work.alone(1).prompt, params, use_tqdm=False)
        assert counter.flops == before  # it counts only inside the block
        block = kv_block_bytes(llm.model, "bfloat16", 64)
        assert block == 2 * 4 * 2 * 32 * 2 * 64


@pytest.mark.full
def test_a_profiler_leaves_the_llm_as_it_was():
    with LLM("shapes-vl", num_threads=1, kv_cache_memory=2**24) as llm:
        params = SamplingParams(temperature=0, max_tokens=4)
        (before,) = llm.generate([30, 31, 32], params, use_tqdm=False)
        engine = dict(vars(llm._desk.engine))
        profiler = Profiler(llm)
        with profiler.watching():
            (during,) = llm.generate([30, 31, 32], params, use_tqdm=False)
        profile = profiler.profile()
        assert before.outputs.token_ids == during.outputs.token_ids
        assert vars(llm._desk.engine) == engine
        assert not any(
            module._forward_pre_hooks or module._forward_hooks for module in llm.model.modules()
        )
        assert "forward" not in vars(llm.model)
        llm.generate([30, 31, 32], params, use_tqdm=False)
        assert profiler.profile() == profile
        assert profile.num_steps == 4


def test_a_clock_takes_exclusive_times(monkeypatch):
    now = iter([0, 1, 4, 9, 10]).__next__
    monkeypatch.setattr("mmdeploy_llm.cli.bench.profile.time.perf_counter", now)
    clock = Clock(threading.current_thread(), None)
    clock.enter("forward", "other")
    clock.enter(None, "linear")
    clock.leave()
    clock.enter("sample", "other")
    clock.leave()
    assert clock.seconds == {
        ("forward", "other"): 1 + 5,
        ("forward", "linear"): 3,
        ("sample", "other"): 1,
    }


@pytest.mark.full
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8", "int4"])
def test_the_machine_is_measured(precision):
    kernels = native.load() if precision == "int4" else None  # torch has no such product
    found = measure_machine(torch.device("cpu"), precision, kernels)
    assert found.precision == precision
    assert 1e8 < found.flops < 1e15
    assert 1e8 < found.bandwidth < 1e13
