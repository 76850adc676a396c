"""The backends that call a library: their index tensors and arguments, with fakes that keep the
contracts of the libraries. The libraries themselves need a GPU: tests/gpu/test_attention_gpu.py."""

import sys

import pytest
import torch

from mmdeploy_llm.errors import ConfigError, ModelNotSupportedError
from mmdeploy_llm.layers.attention import libraries
from mmdeploy_llm.layers.attention.flash import FlashAttention
from mmdeploy_llm.layers.attention.flash3 import FlashAttention3
from mmdeploy_llm.layers.attention.flash4 import FlashAttention4
from mmdeploy_llm.layers.attention.layouts import decode_layout
from mmdeploy_llm.layers.attention.torch_varlen import TorchVarlenAttention

CLASSES = {
    "flash-attn": FlashAttention,
    "flash-attn-3": FlashAttention3,
    "flash-attn-4": FlashAttention4,
    "torch-varlen": TorchVarlenAttention,
}
BLOCK_SIZES = {"flash-attn": (256,), "torch-varlen": (256, 512)}


@pytest.fixture
def fake(cases, fakes):
    return fakes.Fakes(cases.dense)


@pytest.fixture
def create(fake, monkeypatch):
    def create(name):
        fake.install(monkeypatch, libraries, name)
        return CLASSES[name]()

    return create


@pytest.fixture(params=CLASSES)
def backend(request, create):
    return create(request.param)


def without_refused(backend, options):
    if backend.name == "torch-varlen":
        options.pop("softcap", None)
    if not backend.has_sinks:
        options.pop("sinks", None)
    return options


@pytest.mark.one_is_quick
@pytest.mark.parametrize("seed", range(30))
def test_random_batches(cases, create, seed):
    """The backends share the code that prepares their calls, so the cases are divided among
    them."""
    backend = create([*CLASSES][seed % len(CLASSES)])
    sizes = BLOCK_SIZES.get(backend.name, (1, 16, 128))
    case, options = cases.random_case(seed, block_sizes=sizes)
    if seed % 3:
        case.layout = cases.with_lengths(case.layout, max_context=5000)
    case.check(backend, **without_refused(backend, options))


@pytest.mark.one_is_quick
@pytest.mark.parametrize("options", [{}, {"window": 12, "scale": 0.4, "softcap": 3.0}])
@pytest.mark.parametrize("batch", range(4))
def test_tokens_of_a_span_attend_to_each_other(cases, backend, batch, options):
    query_lens, earlier, spans = cases.SPANS[batch]
    case = cases.Case(8, query_lens, earlier, block_size=256, spans=spans)
    case.check(backend, **without_refused(backend, dict(options)))
    with pytest.raises(ModelNotSupportedError, match="longer than the attention window of layer 0"):
        case.check(backend, window=1)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("options", [{}, {"window": 9, "softcap": 2.0}])
def test_recorded_decode_serves_other_batches(
    cases, backend, fake, recording, monkeypatch, options
):
    """The step is recorded once on padding only and replayed for batches of other sizes and
    lengths. Padding is written to the slot of the first sequence and must leave no trace."""
    for name in ("_with_cache", "_varlen"):
        if hasattr(backend, name):
            monkeypatch.setattr(backend, name, recording.kernel(getattr(backend, name)))
    options = without_refused(backend, dict(options))
    cases.check_replays(backend, recording, decode_layout, options, block_size=256)


def test_decode_has_a_function_of_its_own_in_flash_attn_2(cases, fake, monkeypatch):
    fake.install(monkeypatch, libraries, "flash-attn")
    backend = FlashAttention()
    for query_lens, functions in (
        ([1, 1], ["flash_attn_with_kvcache"]),
        ([4, 2], ["flash_attn_varlen_func"]),
        ([1, 4], ["flash_attn_with_kvcache", "flash_attn_varlen_func"]),
    ):
        fake.calls.clear()
        case = cases.Case(1, query_lens, [3, 0], block_size=256)
        backend.begin(case.layout, case.cache).attend(0, case.q, case.k, case.v)
        assert fake.calls == functions


def test_flash_attn_4_leaves_decode_to_our_kernels(cases, fake, monkeypatch, triton_attention):
    if triton_attention.gpu.num_processors > 8:
        pytest.skip("the fake computes on the CPU")
    fake.install(monkeypatch, libraries, "flash-attn-4")
    backend = FlashAttention4(decode=triton_attention)
    for query_lens, calls in (([1, 1], 0), ([1, 5], 1)):
        fake.calls.clear()
        case = cases.Case(2, query_lens, [9, 3], head_dim=64)
        context = backend.begin(case.layout, case.cache)
        options = {"window": 7, "sinks": cases.sinks_of(4)}
        out = context.attend(0, case.q, case.k, case.v, **options)
        torch.testing.assert_close(out.double(), case.expected(**options), atol=2e-5, rtol=2e-5)
        assert len(fake.calls) == calls


def test_softcap_is_refused_by_torch(cases, fake, monkeypatch):
    fake.install(monkeypatch, libraries, "torch-varlen")
    case = cases.Case(3, [1], [3], block_size=256)
    with pytest.raises(ModelNotSupportedError, match="layer 0 caps its attention scores"):
        case.check(TorchVarlenAttention(), softcap=30.0)


def test_sinks_are_refused_where_a_library_has_none(cases, backend):
    """flash-attn 4 takes them, in bfloat16."""
    case = cases.Case(3, [1, 5], [3, 9], block_size=256)
    options = {"sinks": cases.sinks_of(4), "window": 6}
    if backend.has_sinks:
        return case.check(backend, **options)
    with pytest.raises(ModelNotSupportedError, match="layer 0 has attention sinks"):
        case.check(backend, **options)


@pytest.mark.parametrize("name", CLASSES)
def test_a_missing_library_raises_with_what_to_install(monkeypatch, name):
    library = libraries.LIBRARIES[name]
    monkeypatch.setitem(sys.modules, library.module, None)
    with pytest.raises(ConfigError) as raised:
        CLASSES[name]()
    assert name in str(raised.value)
    assert library.install in str(raised.value)


@pytest.mark.parametrize("name", ["flash-attn-3", "flash-attn-4", "torch-varlen"])
def test_a_version_without_block_tables_is_refused(fake, monkeypatch, name):
    """torch 2.11's varlen_attn has no block tables, nor do early releases of the other
    libraries."""
    fake.install(monkeypatch, libraries, name)
    library = libraries.LIBRARIES[name]
    module = sys.modules[library.module]
    monkeypatch.setattr(module, library.functions[0], lambda q, k, v: q)
    with pytest.raises(ConfigError, match=f"takes no {library.parameters[0]}"):
        CLASSES[name]()


def test_the_installed_torch_has_the_signature_that_we_call():
    """Checks the signature of the real function, which computes on GPUs only."""
    import inspect

    from torch.nn.attention.varlen import varlen_attn

    if torch.__version__ < "2.13":
        assert not libraries.is_installed("torch-varlen")
        return
    assert libraries.is_installed("torch-varlen")
    parameters = inspect.signature(varlen_attn).parameters
    ours = ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert list(parameters)[:7] == ours
    assert {"scale", "window_size", "enable_gqa", "seqused_k", "block_table"} <= set(parameters)
