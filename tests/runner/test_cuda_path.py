"""All that a GPU's steps are made of at once: Triton's attention, fused kernels and sampler, frames
of recorded decode steps, steps started ahead. On a machine without a GPU in Triton's interpreter,
with a recorder that runs Python again; the tokens are those of the plain path."""

import pytest
import torch

from mmdeploy_llm.attention.reference import ReferenceAttention
from mmdeploy_llm.delivery.delivery import Delivery
from mmdeploy_llm.engine import Engine
from mmdeploy_llm.hooks import EngineInfo, PluginManager
from mmdeploy_llm.intake.checkpoint import read_checkpoint
from mmdeploy_llm.layers.kernels import use_kernels
from mmdeploy_llm.params import SamplingParams
from mmdeploy_llm.request import Request
from mmdeploy_llm.runner.graphs import CudaRecorder
from mmdeploy_llm.runner.kv_cache import KVCacheShape, allocate
from mmdeploy_llm.runner.runner import Runner
from mmdeploy_llm.runner.slots import Slots
from mmdeploy_llm.sampling import Sampler
from mmdeploy_llm.schedule.scheduler import Scheduler, SchedulerConfig
from mmdeploy_llm.testing.tiny import VOCAB_SIZE, make_tokenizer, write_tiny
from mmdeploy_llm.weights.load import build_model

BLOCK, LENGTH, SEQS, BLOCKS = 16, 64, 4, 20
NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 0, "repetition_penalty": 1.0}
NEUTRAL |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
CHOICES = (
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 0.7, "seed": 4, "top_p": 0.8, "repetition_penalty": 1.2},
    {"temperature": 0.0, "frequency_penalty": 0.5},
    {"temperature": 0.0, "logprobs": 1},
)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "ernie4_5_vl_moe"])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def checkpoint(family, tmp_path_factory):
    return read_checkpoint(write_tiny(family, tmp_path_factory.mktemp(family)))


def load(checkpoint, device):
    plugins = PluginManager.load()
    spec = plugins.model_for(checkpoint.config.architectures)
    return build_model(
        lambda config: plugins.build(spec, config), checkpoint, dtype=torch.float32, device=device
    )


def engine_of(model, backend, sampler, device):
    shape = KVCacheShape(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=BLOCK,
        dtype=torch.float32,
    )
    runner = Runner(
        model=model,
        backend=backend,
        cache=allocate(shape, BLOCKS, device),
        sampler=sampler(max_num_slots=SEQS, vocab_size=VOCAB_SIZE, device=device),
        slots=Slots(SEQS, LENGTH, BLOCK),
        device=device,
    )
    config = SchedulerConfig(
        max_num_seqs=SEQS,
        max_num_batched_tokens=24,
        max_model_len=LENGTH,
        num_blocks=BLOCKS,
        block_size=BLOCK,
    )
    info = EngineInfo(
        model="m",
        architecture="A",
        device=str(device),
        dtype="float32",
        num_blocks=BLOCKS,
        block_size=BLOCK,
        max_num_seqs=SEQS,
        max_model_len=LENGTH,
    )
    engine = Engine(
        scheduler=Scheduler(config),
        runner=runner,
        delivery=Delivery(make_tokenizer()),
        plugins=PluginManager.load(plugins=()),
        info=info,
    )
    return engine, runner


def tokens_of(engine):
    for number, (length, choice) in enumerate(zip((3, 18, 1, 5, 2), CHOICES, strict=True)):
        params = SamplingParams(max_tokens=5 - number % 2, ignore_eos=True, **{**NEUTRAL, **choice})
        engine.add(
            Request(
                request_id=f"r{number}",
                prompt="",
                prompt_token_ids=list(range(60 + number, 60 + number + length)),
                params=params,
                arrival_time=float(number),
            )
        )
    found = {}
    for _ in range(100):
        if not engine.has_work:
            return found
        for output in engine.step():
            assert output.is_ok, output.error_msg
            found[output.request_id] = found.get(output.request_id, ()) + output.outputs.token_ids
    raise AssertionError("the engine does not come to an end")


def test_tokens_of_the_whole_path(checkpoint, triton_device, load_file):
    from mmdeploy_llm.attention.triton_paged import TritonAttention
    from mmdeploy_llm.cuda.kernels import CudaKernels
    from mmdeploy_llm.cuda.paged import Gpu
    from mmdeploy_llm.sampling.device import DeviceSampler

    cpu, is_cuda = torch.device("cpu"), triton_device.type == "cuda"
    plain, _ = engine_of(load(checkpoint, cpu), ReferenceAttention(), Sampler, cpu)
    expected = tokens_of(plain)

    model = load(checkpoint, triton_device)
    use_kernels(model, CudaKernels(triton_device))
    gpu = None if is_cuda else Gpu(num_processors=8, shared_memory=100_000)
    backend = TritonAttention(triton_device, gpu)
    engine, runner = engine_of(model, backend, DeviceSampler, triton_device)
    fake = load_file("runner/test_graphs.py").Recorder()
    runner.record_graphs([1, 2, SEQS], CudaRecorder(triton_device) if is_cuda else fake)
    assert runner._graphs is not None
    started = []
    start = runner.start
    engine._ahead.start = lambda plan, before=None: started.append(before) or start(plan, before)
    assert tokens_of(engine) == expected
    assert any(before is not None for before in started)
    assert is_cuda or fake.num_replays > 3
