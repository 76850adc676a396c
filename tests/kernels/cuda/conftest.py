"""Kernels on the device at hand: a GPU, or the CPU in Triton's interpreter."""

import warnings
from contextlib import ExitStack
from functools import partial

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module")
def products_of_a_gpu(triton_device):
    """Without VNNI torch's product of integers on CPUs adds pairs in 16 bits, where large ones do
    not fit, and none of its products of bfloat16 returns float32; a GPU's is exact and does."""
    if triton_device.type == "cuda":
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that an operator has another implementation now
        library.impl("_int_mm", lambda x, weight: x.int() @ weight.int(), "CPU")
        library.impl("mm.dtype", lambda x, weight, dtype: x.to(dtype) @ weight.to(dtype), "CPU")
    yield
    library._destroy()


@pytest.fixture(scope="session")
def kernels(triton_device):
    from mmdeploy_llm.kernels.cuda.cuda_kernels import CudaKernels

    return CudaKernels(triton_device)


@pytest.fixture(scope="session")
def dtypes():
    return torch.float32, torch.float16, torch.bfloat16


@pytest.fixture(scope="session")
def folder_of(tiny_folder):
    """Returns the folder of a tiny model."""
    return lambda family, **options: str(tiny_folder(family, **options))


@pytest.fixture(scope="session")
def on_cpu(load_file):
    """on_cpu(folder, prompts of ids, their params, **options of LLM) -> outputs of the CPU, which
    are computed once for all ways of the card."""
    from mmdeploy_llm import LLM

    digest, found = load_file("references.py").digest, {}

    def outputs(folder, prompts, chosen, **options):
        key = digest(folder, prompts, [params.model_dump() for params in chosen], options)
        if key not in found:
            with LLM(model=folder, device="cpu", **options) as llm:
                found[key] = llm.generate(prompts, chosen, use_tqdm=False)
        assert all(output.error_code == 200 for output in found[key])
        return found[key]

    return outputs


@pytest.fixture
def assert_near():
    """Compares values up to one rounding."""

    def check(found, expected):
        assert found.dtype is expected.dtype
        limit = {torch.float32: 2e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}[found.dtype]
        torch.testing.assert_close(found.float(), expected.float(), atol=limit, rtol=limit)

    return check


@pytest.fixture(scope="session")
def emulated(load_file):
    """See emulated.py."""
    return partial(
        load_file("kernels/cuda/emulated.py").emulated, order=load_file("kernels/cuda/order.py")
    )


@pytest.fixture
def new_card(triton_device, emulated, monkeypatch):
    """Replaces CUDA with an emulated card, see emulated.py. At the end of the test no fault may
    have been found."""
    if triton_device.type == "cuda":
        pytest.skip("there is a real one")
    from mmdeploy_llm.kernels.cuda import heads

    monkeypatch.setattr(heads, "PROGRAMS", 1)  # of a token, in which its heads share what they load
    with ExitStack() as stack:
        cards = []

        def new(**options):
            cards.append(stack.enter_context(emulated(monkeypatch, **options)))
            return cards[0]

        yield new
    assert not any(card.faults for card in cards)


@pytest.fixture
def card(new_card):
    return new_card()
