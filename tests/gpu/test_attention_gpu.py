"""The attention backends with their real libraries on a GPU, compared with dense attention; the
cases are those of tests/layers/attention. Backends that are not installed are skipped."""

import pytest
import torch
from mmdeploy_llm_plugins.attention import provide_attention_backends

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import PluginManager
from mmdeploy_llm.layers.attention import select as selection
from mmdeploy_llm.layers.attention.layouts import decode_layout
from mmdeploy_llm.layers.attention.reference import ReferenceAttention
from mmdeploy_llm.values.options.runtime_config import AttentionNeeds

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]
DTYPES = (torch.bfloat16, torch.float16)
BACKENDS = {spec.name: spec for spec in provide_attention_backends() if spec.devices == ("cuda",)}


@pytest.fixture(scope="module")
def cases(load_file):
    return load_file("layers/attention/cases.py")


@pytest.fixture(scope="module")
def plugins():
    return PluginManager.load(("attention",))


def needs(name):
    return AttentionNeeds(
        name=name, device="cuda", dtype="bfloat16", kv_cache_dtype="bfloat16", head_dims=(128,)
    )


def host():
    return selection.Host(capabilities=(torch.cuda.get_device_capability(),))


@pytest.fixture(scope="module", params=BACKENDS)
def name(request, plugins):
    """Names of the backends that this machine has and this GPU can run."""
    try:
        selection.select(needs(request.param), plugins, host())
    except ConfigError as error:
        pytest.skip(str(error))
    return request.param


@pytest.fixture(scope="module")
def backend(name, plugins):
    return selection.create(name, plugins, host().setup(needs(name)))


def block_sizes(name):
    return {1: (16, 64, 128), 256: (256,)}[BACKENDS[name].block_multiple]


def options_of(backend, options):
    if backend.name == "torch-varlen":
        options.pop("softcap", None)
    if not backend.has_sinks:
        options.pop("sinks", None)
    return options


@pytest.mark.parametrize("seed", range(30))
def test_random_batches(cases, name, backend, seed):
    """flash-attn 4 compiles for seconds, so only cases with its prefill run: each head size in both
    dtypes."""
    if name == "flash-attn-4" and seed >= 10:
        pytest.skip("the first ten have what it computes; each shape compiles")
    case, options = cases.random_case(
        seed, longest=600, block_sizes=block_sizes(name), dtype=DTYPES[seed % 2], device="cuda"
    )
    case.check(backend, **options_of(backend, options))


@pytest.mark.parametrize("batch", range(4))
def test_tokens_of_a_span_attend_to_each_other(cases, name, backend, batch):
    query_lens, earlier, spans = cases.SPANS[batch]
    case = cases.Case(
        8,
        query_lens,
        earlier,
        head_dim=64,
        block_size=block_sizes(name)[-1],
        spans=spans,
        dtype=torch.bfloat16,
        device="cuda",
    )
    case.check(backend)
    case.check(backend, window=12)


@pytest.mark.parametrize("shape", [(28, 4, 128), (32, 8, 128), (16, 16, 64), (20, 4, 80)])
def test_long_contexts_in_decode(cases, name, backend, shape):
    """Contexts are split, with the head counts of real models."""
    heads, kv_heads, head_dim = shape
    case = cases.Case(
        11,
        [1, 1, 1],
        [4095, 700, 0],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_sizes(name)[-1],
        dtype=torch.bfloat16,
        device="cuda",
    )
    case.check(backend)


def test_long_prefill_after_a_prefix(cases, name, backend):
    case = cases.Case(
        12,
        [1500, 300],
        [512, 0],
        heads=28,
        kv_heads=4,
        head_dim=128,
        block_size=block_sizes(name)[-1],
        dtype=torch.bfloat16,
        device="cuda",
    )
    case.check(backend)


@pytest.mark.parametrize("shape", [(28, 4, 128), (8, 4, 256), (20, 4, 80)])
@pytest.mark.parametrize("batch", [([1, 1], [4095, 700]), ([1, 300], [512, 90])])
def test_cache_in_4_bits(cases, name, backend, shape, batch):
    if "int4" not in BACKENDS[name].cache_dtypes:
        pytest.skip(f"{name} reads no cache of few bits")
    heads, kv_heads, head_dim = shape
    fixed = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block_size": 64}
    case = cases.Case(14, *batch, **fixed, dtype=torch.bfloat16, device="cuda")
    case.check_int4(backend, sinks=cases.sinks_of(heads, "cuda"))


class Graph:
    """A CUDA graph with the interface of the recording in tests/layers/attention."""

    def __init__(self):
        self._graph = torch.cuda.CUDAGraph()

    def __enter__(self):
        self._capture = torch.cuda.graph(self._graph)
        return self._capture.__enter__()

    def __exit__(self, *error):
        return self._capture.__exit__(*error)

    def replay(self):
        self._graph.replay()
        torch.cuda.synchronize()


@pytest.mark.parametrize("options", [{}, {"window": 9}])
def test_captured_decode_serves_other_batches(cases, name, backend, options):
    assert backend.can_capture
    cases.check_replays(
        backend,
        Graph(),
        decode_layout,
        options,
        block_size=block_sizes(name)[-1],
        dtype=torch.bfloat16,
        device="cuda",
    )


def test_reference_on_the_gpu(cases):
    case = cases.Case(
        13, [1, 40], [70, 9], head_dim=64, block_size=16, dtype=torch.bfloat16, device="cuda"
    )
    case.check(ReferenceAttention(), window=20)
