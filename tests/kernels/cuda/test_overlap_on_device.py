"""Overlapped steps, whose token ids are on the device: an engine with the CudaSampler, compared
with one with the Sampler, which waits for each step."""

import dataclasses

import pytest
import torch

from mmdeploy_llm.engine.runner.sampling.sampler import Sampler
from mmdeploy_llm.testing.tiny import make_tokenizer


@pytest.fixture(scope="module")
def ahead(load_file):
    return load_file("engine/runner/test_overlap.py")


@pytest.fixture(scope="module")
def make(ahead, load_file):
    return ahead.engines(load_file("engine/runner/test_graphs.py"), make_tokenizer())


@pytest.fixture
def small(triton_device):
    """Returns a CudaSampler with small tiles."""
    if triton_device.type != "cpu":
        pytest.skip("the model of these tests is on the CPU")
    from mmdeploy_llm.engine.runner.sampling.cuda_sampler import CudaSampler
    from mmdeploy_llm.kernels.cuda.choose import Tiling

    class Small(CudaSampler):
        def __init__(self, **options):
            super().__init__(**options, tiling=Tiling(block=512, candidates=32, together=512))

    return Small


@pytest.mark.full
@pytest.mark.parametrize("seed", [0, 1])
def test_outputs_equal_those_without_overlap(ahead, make, small, seed):
    given = list(ahead.requests(seed, 7))
    expected = ahead.outputs_of(make(Sampler), given, seed=seed)
    given = list(ahead.requests(seed, 7))
    assert ahead.outputs_of(make(small), given, seed=seed) == expected


@pytest.mark.full
def test_tokens_of_a_step_that_raised_are_drawn_again(ahead, make, small):
    """By then the device has counted the tokens of such a step and moved on to the next."""

    class Raising(small):
        num_launches = 0

        def launch(self, *args, **options):
            pending = super().launch(*args, **options)
            self.num_launches += 1
            if self.num_launches % 4 == 0:
                raise torch.OutOfMemoryError("out of memory")
            return pending

    def given():
        for request in ahead.requests(6, 4):
            rules = {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.4}
            params = request.params.model_copy(update=rules)
            yield dataclasses.replace(request, params=params)

    expected = ahead.outputs_of(make(Sampler), given())
    engine = make(Raising)
    assert ahead.outputs_of(engine, given()) == expected
    assert engine._runner._sampler.num_launches > 16
