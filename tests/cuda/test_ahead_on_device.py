"""Steps that start from tokens on the device: an engine with the DeviceSampler, against one with
the Sampler, which waits for each step."""

import pytest

from mmdeploy_llm.sampling import Sampler
from mmdeploy_llm.testing.tiny import make_tokenizer


@pytest.fixture(scope="module")
def ahead(load_file):
    return load_file("runner/test_ahead.py")


@pytest.fixture(scope="module")
def make(ahead, load_file):
    return ahead.engines(load_file("runner/test_graphs.py"), make_tokenizer())


@pytest.mark.parametrize("seed", [0, 1])
def test_outputs_are_those_without(ahead, make, triton_device, seed):
    if triton_device.type != "cpu":
        pytest.skip("the model of this test is on the CPU")
    from mmdeploy_llm.cuda.choose import Tiling
    from mmdeploy_llm.sampling.device import DeviceSampler

    class Small(DeviceSampler):
        def __init__(self, **options):
            super().__init__(**options, tiling=Tiling(block=512, candidates=32, together=512))

    given = list(ahead.requests(seed, 7))
    expected = ahead.outputs_of(make(Sampler), given, seed=seed)
    given = list(ahead.requests(seed, 7))
    assert ahead.outputs_of(make(Small), given, seed=seed) == expected
