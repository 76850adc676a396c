"""The choice of a backend and its block size, and the error messages."""

import dataclasses
import sys
from types import SimpleNamespace

import pytest
from mmdeploy_llm_plugins.attention import provide_attention_backends

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import PluginManager
from mmdeploy_llm.kernels import TORCH
from mmdeploy_llm.layers.attention import libraries
from mmdeploy_llm.layers.attention import select as selection
from mmdeploy_llm.layers.attention.native import NativeAttention
from mmdeploy_llm.layers.attention.reference import ReferenceAttention
from mmdeploy_llm.testing.tiny import generating, write_tiny
from mmdeploy_llm.values.options.runtime_config import AttentionNeeds
from mmdeploy_llm.weights.folder import read_checkpoint

BACKENDS = {spec.name: spec for spec in provide_attention_backends()}
ON_CUDA = [name for name, spec in BACKENDS.items() if spec.devices == ("cuda",)]
ALL = frozenset(ON_CUDA)
KERNELS = SimpleNamespace(attention=object())
HOPPER, BLACKWELL, AMPERE, ADA, VOLTA = (9, 0), (10, 0), (8, 0), (8, 9), (7, 0)


@pytest.fixture(scope="module")
def plugins():
    """The backends of this package, and no other plugin."""
    return PluginManager.load(("attention",))


@pytest.fixture
def select(plugins, monkeypatch):
    """select(needs, has_kernels, capabilities, head_dim, installed) -> AttentionChoice"""

    def call(requested, has_kernels=False, capabilities=(HOPPER,), head_dim=128, installed=ALL):
        monkeypatch.setattr(libraries, "is_installed", lambda name: name in installed)
        own = dataclasses.replace(requested, head_dims=() if head_dim is None else (head_dim,))
        host = selection.Host(kernels=KERNELS if has_kernels else TORCH, capabilities=capabilities)
        return selection.select(own, plugins, host)

    return call


def needs(name="auto", device="cpu", dtype="bfloat16", block_size=None, kv_cache_dtype=None, **own):
    return AttentionNeeds(
        name=name,
        device=device,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype or dtype,
        block_size=block_size,
        **own,
    )


def on_cuda(**options):
    return needs(device="cuda", **options)


@pytest.mark.parametrize(
    ("requested", "has_kernels", "name"),
    [
        (needs(), True, "native"),
        (needs(), False, "reference"),
        (needs(dtype="float32"), True, "native"),
        (needs(dtype="float16"), True, "reference"),
        (needs(kv_cache_dtype="int8"), True, "native"),
        (needs(kv_cache_dtype="int4"), True, "native"),
        (needs(kv_cache_dtype="int4"), False, "reference"),
        (needs(kv_cache_dtype="float32"), True, "reference"),
        (needs("reference"), True, "reference"),
    ],
)
def test_cpu(select, requested, has_kernels, name):
    chosen = select(requested, has_kernels)
    assert (chosen.name, chosen.block_size) == (name, 64)


@pytest.mark.parametrize(
    ("requested", "capability", "name", "block_size"),
    [
        (on_cuda(), HOPPER, "flash-attn-3", 128),
        (on_cuda(), BLACKWELL, "flash-attn-4", 128),
        (on_cuda(), AMPERE, "flash-attn", 256),
        (on_cuda(dtype="float16"), VOLTA, "triton", 64),
        (on_cuda(dtype="float32"), HOPPER, "triton", 64),
        (on_cuda(block_size=48), HOPPER, "flash-attn-3", 48),
        (on_cuda(block_size=48), AMPERE, "triton", 48),  # flash-attn 2 cannot
        (on_cuda(block_size=512), AMPERE, "flash-attn", 512),
        (on_cuda(kv_cache_dtype="float8_e4m3fn"), HOPPER, "triton", 64),
        (on_cuda(kv_cache_dtype="int8"), AMPERE, "triton", 64),
        (on_cuda(kv_cache_dtype="int4"), VOLTA, "triton", 64),
        (on_cuda(name="reference", kv_cache_dtype="int4"), HOPPER, "reference", 64),
        (on_cuda(kv_cache_dtype="float32"), HOPPER, "reference", 64),
    ],
)
def test_cuda(select, requested, capability, name, block_size):
    chosen = select(requested, capabilities=(capability,))
    assert (chosen.name, chosen.block_size) == (name, block_size)


def test_the_installed_libraries_decide(select):
    order = ON_CUDA
    for position, name in enumerate(order):
        assert select(on_cuda(), installed=frozenset(order[position:])).name == name
    assert select(on_cuda(), installed=frozenset()).name == "reference"


def test_the_device_that_is_used_decides(select):
    cards = (AMPERE, HOPPER)
    assert select(on_cuda(), capabilities=cards).name == "flash-attn"
    assert select(needs(device="cuda:1"), capabilities=cards).name == "flash-attn-3"


def test_heads_of_other_sizes(select):
    assert select(on_cuda(), head_dim=256).name == "flash-attn-3"
    assert select(on_cuda(), head_dim=512).name == "reference"
    assert select(on_cuda(), head_dim=None).name == "flash-attn-3"


def test_heads_that_newer_cards_have_no_kernel_for(select):
    blackwell = {"capabilities": (BLACKWELL,), "installed": {"flash-attn-4", "triton"}}
    assert select(on_cuda(), head_dim=128, **blackwell).name == "flash-attn-4"
    assert select(on_cuda(), head_dim=192, **blackwell).name == "triton"
    with pytest.raises(ConfigError, match=r"heads of 192 channels.*multiples of 8 up to 128"):
        select(on_cuda(name="flash-attn-4"), head_dim=192, **blackwell)


def test_block_size_of_the_user_wins(select):
    assert select(needs("reference", block_size=16)).block_size == 16
    assert select(needs("triton", "cuda", block_size=7)).block_size == 7


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        (
            needs("flash"),
            r"did you mean 'flash-attn'\?; use auto, or flash-attn-3, flash-attn-4, flash-attn, "
            "torch-varlen, triton, native, reference of plugin 'attention'",
        ),
        (needs("flash-attn"), "needs a CUDA device and bfloat16 or float16"),
        (needs("triton"), "needs a CUDA device and bfloat16 or float16 or float32"),
        (needs("flash-attn", "cuda", block_size=64), "multiple of 256"),
        (needs("torch-varlen", "cuda", block_size=300), "multiple of 256"),
        (needs("flash-attn", "cuda", kv_cache_dtype="float16"), "kv_cache_dtype = 'float16' for"),
        (needs("flash-attn-3", "cuda", kv_cache_dtype="float8_e4m3fn"), "use .*'triton'"),
        (needs("flash-attn-3", "cuda:1"), "needs compute capability 9.0, but cuda:1 has 8.0"),
        (
            needs("flash-attn-3", "cuda:2"),
            "does not support compute capability 10.0, but cuda:2 has 10.0",
        ),
        (needs("triton", "cuda:1", kv_cache_dtype="float8_e4m3fn"), "8.9 for kv_cache_dtype"),
        (needs("native"), "C\\+\\+ kernels, which are not available"),
        (needs("native", "cuda"), "needs a CPU"),
        (needs("native", dtype="float16"), "needs a CPU and bfloat16 or float32"),
        (needs(kv_cache_dtype="int8"), "leave kv_cache_dtype out"),
        (needs(kv_cache_dtype="float8_e4m3fn"), "kv_cache_dtype = 'fp8' for .*: use 'triton'"),
        (needs("reference", "cuda", kv_cache_dtype="int8"), "leave kv_cache_dtype out"),
        (on_cuda(name="flash-attn-3", kv_cache_dtype="int4"), "'int4' for .*: use 'triton' .cuda."),
        (needs("native", kv_cache_dtype="int4"), "C\\+\\+ kernels, which are not available"),
    ],
)
def test_unsupported_choices_raise(select, requested, message):
    with pytest.raises(ConfigError, match=message):
        select(requested, capabilities=(HOPPER, AMPERE, BLACKWELL))


@pytest.mark.parametrize(("head_dim", "name"), [(512, "triton"), (100, "flash-attn")])
def test_unsupported_head_sizes_raise(select, head_dim, name):
    with pytest.raises(ConfigError, match=f"heads of {head_dim} channels"):
        select(needs(name, "cuda"), head_dim=head_dim)


def create(plugins, name, head_dim=64):
    asked = needs(name, head_dims=(head_dim,))
    return selection.create(name, plugins, selection.Host(kernels=KERNELS).setup(asked))


@pytest.mark.parametrize("name", BACKENDS)
def test_a_model_with_sinks_gets_a_backend_that_computes_them(plugins, monkeypatch, name):
    """Libraries without sinks leave them to one that takes the same pages."""
    is_on_cuda = name in ALL
    asked = needs(
        device="cuda" if is_on_cuda else "cpu", block_size=BACKENDS[name].block_size, sinks=True
    )

    def chosen(option, installed=ALL):
        monkeypatch.setattr(libraries, "is_installed", lambda name: name in installed)
        host = selection.Host(kernels=KERNELS, capabilities=(HOPPER,))
        return selection.suited(name, option, asked, plugins, host)

    if name in ("triton", "native", "reference", "flash-attn-4"):
        assert chosen("auto") == chosen(name) == name
        return
    assert chosen("auto") == "flash-attn-4"
    assert chosen("auto", {name, "triton"}) == "triton"
    assert chosen("auto", ()) == "reference"
    with pytest.raises(ConfigError, match=f"'{name}' cannot compute attention sinks.*'triton'"):
        chosen(name)


def test_what_a_model_needs_decides(select):
    """torch's copy of flash-attn has no softcap, and only plain torch gives keys by sequence."""
    installed = {"torch-varlen", "triton"}
    capped = on_cuda(softcaps=True)
    assert select(on_cuda(), installed=installed).name == "torch-varlen"
    assert select(capped, installed=installed).name == "triton"
    assert select(needs(sequences=True), has_kernels=True).name == "reference"
    assert select(needs(deterministic=True), has_kernels=True).name == "native"
    with pytest.raises(
        ConfigError, match=r"(?s)no backend can serve .*\n - reference adds in an order"
    ):
        select(needs(deterministic=True, dtype="float16"), has_kernels=True)


def test_the_choice_says_why(select):
    why = select(on_cuda(), capabilities=(AMPERE,), installed={"triton"}).why
    assert why.startswith("attention backend 'auto': 'triton' of plugin 'attention' (")
    assert "not flash-attn-3 needs compute capability 9.0, but cuda has 8.0" in why
    assert "not flash-attn is not installed: pip install" in why
    assert "'native' of plugin" in select(needs("native"), has_kernels=True).why


def test_create(plugins, select):
    assert isinstance(create(plugins, "reference"), ReferenceAttention)
    assert isinstance(create(plugins, "native"), NativeAttention)
    for head_dim in (7, 514):
        with pytest.raises(ConfigError, match=f"heads of {head_dim} channels"):
            select(needs("native"), has_kernels=True, head_dim=head_dim)


@pytest.mark.parametrize("name", ["flash-attn", "flash-attn-3", "torch-varlen"])
def test_create_a_backend_that_calls_a_library(plugins, cases, fakes, monkeypatch, name):
    fakes.Fakes(cases.dense).install(monkeypatch, libraries, name)
    assert create(plugins, name).name == name


def test_installed_libraries_are_found_without_an_import(monkeypatch):
    """A library is found by a module that only it has: flash-attn 4 shares its package with
    flash-attn 2."""
    searched = []

    def find(name):
        searched.append(name)
        if name == "flash_attn.cute":
            raise ModuleNotFoundError("no flash_attn")  # as find_spec does without the package
        return None

    monkeypatch.setattr(libraries.importlib.util, "find_spec", find)
    assert not any(libraries.is_installed(name) for name in libraries.LIBRARIES)
    assert "flash_attn_2_cuda" in searched


def test_a_missing_library_raises_before_loading(plugins, monkeypatch):
    """The library may be missing, or broken or too old, which only building it shows."""
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    host = selection.Host(capabilities=(HOPPER,))
    with pytest.raises(ConfigError, match="'flash-attn-3' is not installed: build it"):
        selection.select(on_cuda(name="flash-attn-3"), plugins, host)
    with pytest.raises(ConfigError, match="'flash-attn-3', but it cannot be imported"):
        create(plugins, "flash-attn-3")


def test_the_error_says_what_an_8_bit_cache_needs(select):
    with pytest.raises(ConfigError, match=r"needs compute capability 8\.9 .* use 'int8'"):
        select(on_cuda(kv_cache_dtype="float8_e4m3fn"), capabilities=(AMPERE,))


@pytest.mark.few_in_ci(16)
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[pytest.mark.full] * (name != "qwen2"))
        for name in sorted(generating())
    ],
)
def test_every_backend_takes_the_heads_of_the_models_of_tests_gpu(
    family, load_file, tmp_path, select
):
    """Otherwise tests/gpu would compare the reference with itself."""
    larger = load_file("gpu/conftest.py").LARGER_HEADS
    folder = write_tiny(family, tmp_path, **larger.get(family, {}))
    config = read_checkpoint(folder).config.get_text_config()
    for layer in range(config.num_hidden_layers):
        own = config.per_layer_config[layer]
        head_dim = getattr(own, "head_dim", None)
        heads = getattr(config, "decoder_attention_heads", config.num_attention_heads)
        head_dim = head_dim or config.hidden_size // heads
        for name in ON_CUDA:
            asked = needs(name, device="cuda", dtype="bfloat16")
            assert select(asked, head_dim=head_dim).name == name
        assert select(needs(device="cuda", dtype="float32"), head_dim=head_dim).name == "triton"
