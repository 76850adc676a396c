"""Attention of other libraries, with fakes, and caches of few bits on the emulated card."""

import sys

import pytest
import torch

from mmdeploy_llm import LLM
from mmdeploy_llm.hooks import AttentionSetup, PluginManager
from mmdeploy_llm.layers.attention import libraries, select

BLOCK_SIZES = {"flash-attn": 256, "torch-varlen": 256, "flash-attn-3": 16, "flash-attn-4": 16}
LIBRARIES = [
    pytest.param(name, marks=[pytest.mark.full] * (name != "flash-attn-4")) for name in BLOCK_SIZES
]


@pytest.fixture(scope="module")
def whole(load_file):
    """Loads test_emulated.py, which tests a whole LLM."""
    return load_file("kernels/cuda/test_emulated.py")


@pytest.fixture(scope="module")
def cases(load_file):
    return load_file("layers/attention/cases.py")


@pytest.fixture
def install(load_file, cases, monkeypatch):
    """Installs the fake of a library on a card; returns the names of its calls."""
    fakes = load_file("layers/attention/fakes.py").Fakes(cases.dense)

    is_installed = libraries.is_installed

    def install(card, name):
        monkeypatch.setattr(libraries, "is_installed", lambda x: x == name or is_installed(x))
        fakes.install(monkeypatch, libraries, name)
        module = sys.modules[libraries.LIBRARIES[name].module]
        for function in libraries.LIBRARIES[name].functions:
            setattr(module, function, card.library(getattr(module, function)))
        return fakes.calls

    return install


@pytest.mark.full
@pytest.mark.parametrize("name", LIBRARIES)
def test_attention_of_libraries(folder_of, on_cpu, whole, new_card, install, name):
    """Prefill, and decode from graphs with a row of padding, without a wait of the host."""
    folder = folder_of("ernie4_5", head_dim=16, num_hidden_layers=1)
    options = {**whole.OPTIONS, "dtype": "float16", "max_num_seqs": 4, "num_gpu_blocks_override": 9}
    prompts = [[70, 71, 72], [73, 74], list(range(80, 87))]
    chosen = [whole.params(0, logprobs=2, max_tokens=2 + number) for number in range(3)]
    expected = on_cpu(folder, prompts, chosen, **options)
    card = new_card()
    calls = install(card, name)
    options |= {"attention_backend": name, "block_size": BLOCK_SIZES[name]}
    with LLM(model=folder, device="cuda", **options) as llm:
        card.waits.clear()
        outputs = whole.results(llm, prompts, chosen)
    whole.check(outputs, expected, within=0.02)
    assert whole.kinds(card) == {"Event.synchronize"}
    assert set(libraries.LIBRARIES[name].functions) == set(calls)
    assert sum(graph.num_replays for graph in card.graphs) > 1


@pytest.mark.one_is_quick
@pytest.mark.parametrize("name", [*LIBRARIES, "triton"])
def test_media_that_attend_to_themselves_do_not_make_the_host_wait(cases, new_card, install, name):
    card = new_card()
    if name != "triton":
        install(card, name)
    query_lens, earlier, spans = cases.SPANS[1]
    case = cases.Case(
        8, query_lens, earlier, block_size=BLOCK_SIZES.get(name, 16), spans=spans, device="cuda"
    )
    layout = cases.with_lengths(case.layout)
    setup = AttentionSetup(
        device=torch.device("cuda"), dtype="float32", kv_cache_dtype="float32", head_dims=(16,)
    )
    backend = select.create(name, PluginManager.load(("attention",)), setup)
    card.waits.clear()
    found = backend.begin(layout, case.cache).attend(0, case.q, case.k, case.v)
    assert not card.waits
    torch.testing.assert_close(found.cpu().double(), case.expected().cpu(), atol=1e-5, rtol=1e-5)


@pytest.mark.full
def test_segments_of_a_vision_tower_in_one_call(folder_of, whole, new_card, install):
    """It is computed in 16 bits, with windows and whole images of different sizes."""
    folder = folder_of("qwen2_5_vl")
    options = {**whole.OPTIONS, "dtype": "float16", "native_kernels": False}
    options |= {"attention_backend": "reference", "enforce_eager": True}
    image = whole.IMAGE["qwen2_5_vl"]
    images = [whole.picture(1, 56, 84), whole.picture(2, 28, 28)]
    prompt = {"prompt": f"see {image} and {image}", "multimodal_data": {"image": images}}
    chosen = whole.params(0, logprobs=2)
    with LLM(model=folder, device="cpu", **options) as llm:
        expected = whole.results(llm, [prompt], chosen)
    card = new_card()
    calls = install(card, "torch-varlen")
    with LLM(model=folder, device="cuda", **options) as llm:
        outputs = whole.results(llm, [prompt], chosen)
    whole.check(outputs, expected, within=0.05)
    assert len(calls) == 3  # a layer each


@pytest.mark.full
@pytest.mark.parametrize(
    ("dtype", "eager", "within"),
    [("int8", False, 0.02), ("int4", False, 0.02), ("int4", True, 0.02), ("fp8", True, 0.3)],
)
def test_caches_of_few_bits(folder_of, on_cpu, whole, new_card, dtype, eager, within):
    """int8 and int4 equal the CPU; 8-bit floats are close to a cache without loss."""
    folder = folder_of("qwen3", head_dim=16, num_hidden_layers=2)
    options = {**whole.OPTIONS, "max_num_seqs": 2}
    prompts = [[70, 71, 72], list(range(80, 98))]
    chosen = [whole.params(0, logprobs=2)] * 2
    cpu = {} if dtype == "fp8" else {"kv_cache_dtype": dtype}
    expected = on_cpu(folder, prompts, chosen, **options, **cpu)
    card = new_card()
    with LLM(
        model=folder, device="cuda", kv_cache_dtype=dtype, enforce_eager=eager, **options
    ) as llm:
        outputs = whole.results(llm, prompts, chosen)
    whole.check(outputs, expected, within=within)
    assert bool(sum(graph.num_replays for graph in card.graphs)) != eager


@pytest.mark.full
@pytest.mark.parametrize("is_eager", [False, pytest.param(True, marks=pytest.mark.long)])
def test_layers_with_a_window_have_their_own_tables(folder_of, on_cpu, whole, new_card, is_eager):
    """Recorded steps and others, in pools that hold the windows and not the prompts."""
    folder = folder_of("mistral", head_dim=16, num_hidden_layers=2, sliding_window=24)
    prompts = [[70, 71, 72], list(range(80, 150))]
    chosen = [whole.params(0, logprobs=2, max_tokens=28)] * 2
    expected = on_cpu(folder, prompts, chosen, **whole.OPTIONS)
    card = new_card()
    with LLM(model=folder, device="cuda", enforce_eager=is_eager, **whole.OPTIONS) as llm:
        outputs = whole.results(llm, prompts, chosen)
        assert llm._desk.engine._scheduler._requests.windows.pool.num_blocks < 30
    whole.check(outputs, expected, within=1e-3)
    assert bool(sum(graph.num_replays for graph in card.graphs)) != is_eager
