"""Fixtures for tests that need a card. `pytest tests/gpu --gpu-tests-on cpu` runs those that can
run on a CPU: it shows that the tests are right, not that CUDA is."""

import os
import re

import numpy as np
import pytest
import torch

from mmdeploy_llm import LLM
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.testing.tiny import write_tiny

# Models whose heads the CUDA backends do not compute, since these need multiples of 8 channels.
LARGER_HEADS = {
    "qwen2": {"hidden_size": 96},
    **{name: {"head_dim": 24} for name in ("gemma", "glm", "glm4", "llama", "qwen3", "qwen3_moe")},
    "seed_oss": {"head_dim": 24},
}
NOT_HERE = re.compile(
    "cannot be imported|takes no|compute capability|needs a CUDA device"
    "|cannot compute attention sinks"
)


def pytest_addoption(parser):
    parser.addoption("--gpu-tests-on", default="cuda", choices=("cuda", "cpu"))


@pytest.fixture(scope="session", autouse=True)
def _kernels_are_compiled():
    """On a card the kernels must be compiled: Triton's interpreter would compute them on the
    CPU."""
    if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET", "0") != "0":
        pytest.exit("TRITON_INTERPRET is set: unset it to test the card", returncode=2)


@pytest.fixture(scope="session")
def device(request):
    wanted = request.config.getoption("--gpu-tests-on", "cuda")
    if wanted == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return wanted


@pytest.fixture
def on_card(device):
    """Skips a test without a card."""
    if device != "cuda":
        pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def _full_precision():
    """Computes float32 products in float32, so that tokens can be compared with the CPU's."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory):
    """Returns a function: family -> a tiny checkpoint of it."""
    folders = {}

    def make(family):
        if family not in folders:
            options = LARGER_HEADS.get(family, {})
            folders[family] = write_tiny(family, tmp_path_factory.mktemp(family), **options)
        return folders[family]

    return make


@pytest.fixture
def make_llm(folder_of):
    """Returns a function that makes the LLM of a family on a device, with a small KV cache; videos
    need av, which a GPU host may lack. It skips if a backend is not installed or does not support
    this card."""
    opened = []

    def make(family, device, **options):
        defaults = {
            "dtype": "float32",
            "kv_cache_memory": 2**25,
            "max_num_seqs": 8,
            "max_model_len": 512,
            "limit_mm_per_prompt": {"image": 4},
            "guided_decoding_backend": "off",
            "enable_prefix_caching": False,
            "num_threads": 1,
        }
        if device == "cpu":
            defaults |= {"native_kernels": False, "attention_backend": "reference"}
        try:
            llm = LLM(model=str(folder_of(family)), device=device, **{**defaults, **options})
        except ConfigError as error:
            if "attention_backend" in str(error) and NOT_HERE.search(str(error)):
                pytest.skip(str(error))
            raise
        opened.append(llm)
        return llm

    yield make
    for llm in opened:
        llm.close()


@pytest.fixture(scope="session")
def prompts_of():
    """Returns a function: family -> prompts of uneven length, with images of several sizes if it
    accepts them."""

    def image(seed, height, width):
        rng = np.random.default_rng(seed)
        return rng.integers(0, 256, (height, width, 3), dtype=np.uint8)

    def make(family):
        rng = np.random.default_rng(7)
        prompts = [rng.integers(60, 300, size).tolist() for size in (1, 5, 17, 33, 70)]
        if "vl" in family:
            sizes = ((56, 84), (112, 56), (84, 84))
            for count in (1, 3):
                images = [image(number, *sizes[number]) for number in range(count)]
                parts = [{"type": "image", "image": one} for one in images]
                parts.append({"type": "text", "text": "What is in the picture?"})
                prompts.append({"messages": [{"role": "user", "content": parts}]})
        return prompts

    return make
