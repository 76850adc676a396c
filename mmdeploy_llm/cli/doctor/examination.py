"""Examines processor, kernels, memory, GPUs, libraries and plugins, without loading a model."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from mmdeploy_llm.engine.startup.cards import CudaSetup, missing_cuda, read_cuda
from mmdeploy_llm.engine.startup.sizes import available_memory
from mmdeploy_llm.errors import MMDeployLLMError
from mmdeploy_llm.hooks import AttentionBackendSpec, PluginManager
from mmdeploy_llm.kernels import TORCH
from mmdeploy_llm.kernels import cpu as native
from mmdeploy_llm.layers.attention.select import Host, examined
from mmdeploy_llm.system.portable.machine import free_ram
from mmdeploy_llm.values.options.runtime_config import AttentionNeeds
from mmdeploy_llm.weights.cache import cache_folder, folder_size

from .findings import Finding, State

PLAIN = "reference"  # the backend in plain torch
CPU_INFO = Path("/proc/cpuinfo")
NEWER_COMPILER = "install a newer C++ compiler: GCC 11 or Clang 12 knows all levels of x86"
COMPILER_ADVICE = (
    "install a C++ compiler: `apt install g++` (Debian, Ubuntu), `dnf install gcc-c++` (Fedora), "
    "`xcode-select --install` (macOS)"
)
LEVELS = {  # the instructions of each level, in words
    native.Level.AMX: "AMX: products of matrices of bfloat16 and of 8 bits",
    native.Level.AVX512_BF16: "AVX-512 with products of bfloat16 and of 8 bits",
    native.Level.AVX512_VNNI: "AVX-512 with products of 8 bits",
    native.Level.AVX512: "AVX-512",
    native.Level.AVX2_VNNI: "AVX2 with products of 8 bits",
    native.Level.AVX2: "AVX2",
    native.Level.NEON_BF16: "NEON with products of matrices of bfloat16 and of 8 bits",
    native.Level.NEON_I8MM: "NEON with products of matrices of 8 bits",
    native.Level.NEON_DOT: "NEON with dot products of 8 bits",
    native.Level.PORTABLE: "the vector instructions of every processor of this architecture",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Optional:
    """A library that only some uses need. module: what shows that it is installed."""

    module: str
    package: str
    use: str
    install: str


OPTIONAL = (
    Optional(
        module="llguidance",
        package="llguidance",
        use="guided decoding (JSON schemas, regular expressions, choices)",
        install='pip install "mmdeploy-llm[guided]"',
    ),
    Optional(
        module="gguf",
        package="gguf",
        use="GGUF files",
        install='pip install "mmdeploy-llm[gguf]"',
    ),
    Optional(
        module="pyarrow",
        package="pyarrow",
        use="batches from Parquet and Arrow files, and to Parquet files",
        install='pip install "mmdeploy-llm[parquet]"',
    ),
    Optional(
        module="datasets",
        package="datasets",
        use="batches from the Hugging Face hub and folders of the library datasets",
        install='pip install "mmdeploy-llm[datasets]"',
    ),
    Optional(
        module="lance",
        package="pylance",
        use="batches from Lance tables",
        install='pip install "mmdeploy-llm[lance]"',
    ),
    Optional(
        module="fsspec",
        package="fsspec",
        use="media and corpora from object stores, outputs there",
        install='pip install "mmdeploy-llm[fsspec]"',
    ),
    Optional(
        module="ray",
        package="ray",
        use="engines on many machines (Ray Data, batch --ray)",
        install='pip install "mmdeploy-llm[ray]"',
    ),
    Optional(
        module="jsonschema",
        package="jsonschema",
        use="checking the answers of a batch (--validate)",
        install='pip install "mmdeploy-llm[validate]"',
    ),
    Optional(
        module="pypdfium2",
        package="pypdfium2",
        use="PDF documents",
        install='pip install "mmdeploy-llm[pdf]"',
    ),
    Optional(
        module="pypdf",
        package="pypdf",
        use="finding what pages of PDF documents have lost",
        install='pip install "mmdeploy-llm[pdf]"',
    ),
    Optional(
        module="pillow_heif",
        package="pillow-heif",
        use="HEIF images (.heic)",
        install='pip install "mmdeploy-llm[heif]"',
    ),
)


def examine(weight_cache: str | bool = True) -> Iterator[Finding]:
    """Yields the findings, one after the other. Compiles the CPU kernels if they are not built.
    weight_cache: see EngineConfig."""
    yield processor()
    kernels, finding = cpu_kernels()
    yield finding
    yield memory()
    yield cached_weights(weight_cache)
    setup = read_cuda()
    yield cards(setup)
    yield attention(setup, kernels)
    yield versions()
    yield from libraries()
    yield plugins()


def processor() -> Finding:
    """Names the processor and says with how many threads an engine computes."""
    cpus = native.usable_cpus()
    own = native.own_choice(native.THREAD_COUNT.of_host, cpus)
    num_threads = native.num_suitable_threads(cpus) if own is None else own
    chosen = "" if own is None else ", as OMP_NUM_THREADS or the like asks for"
    name = _cpu_name() or platform.machine()
    text = (
        f"{name}: {_count(len(cpus), 'CPU')}, an engine computes in "
        f"{_count(num_threads, 'thread')}{chosen}"
    )
    return Finding(topic="processor", state=State.GOOD, text=text)


def _cpu_name() -> str:
    """Returns the processor's name where the system tells it (Linux on x86)."""
    try:
        lines = CPU_INFO.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "")


def cpu_kernels() -> tuple[native.CpuKernels | None, Finding]:
    """Builds and loads the C++ kernels. Returns them, or None, with what was found."""
    try:
        kernels = native.load()
    except native.BuildError as error:
        text = f"{error}: plain torch computes the same, several times slower"
        has_none = isinstance(error, native.NoCompilerError)
        advice = COMPILER_ADVICE if has_none else "mend what the message names"
        return None, Finding(topic="CPU kernels", state=State.SLOW, text=text, advice=advice)
    level = native.Level(kernels.cpu_level)
    levels = native.cpu_levels()
    others = levels[levels.index(level) + 1 :]
    origin = "built on this machine" if native.find_prebuilt(level) is None else "of the wheel"
    text = f"{origin}, for the level {level.value} ({LEVELS[level]})"
    text += "".join(f", or by cpu_level={other.value!r}" for other in others[:1])
    if level is levels[0]:
        return kernels, Finding(topic="CPU kernels", state=State.GOOD, text=text)
    text += f"; the compiler cannot build the faster {levels[0].value} of this processor"
    return kernels, Finding(topic="CPU kernels", state=State.SLOW, text=text, advice=NEWER_COMPILER)


def memory() -> Finding:
    """Says how much memory is free and how much of it the KV cache takes by default."""
    cache = available_memory(torch.device("cpu"), 1.0)
    text = (
        f"{free_ram() / 2**30:.1f} GiB can be had by this process; the KV cache on the CPU takes "
        f"{cache / 2**30:.1f} of them unless kv_cache_memory is given"
    )
    return Finding(topic="memory", state=State.GOOD, text=text)


def cached_weights(option: str | bool) -> Finding:
    """Says where packed weights are kept for the next start, and how large they are."""
    try:
        folder = cache_folder(option)
    except RuntimeError as error:
        text = f"there is no home directory to keep packed weights in: {error}"
        return Finding(topic="weight cache", state=State.ABSENT, text=text)
    if folder is None:
        return Finding(topic="weight cache", state=State.GOOD, text="off")
    found = folder_size(folder)
    text = (
        f"{_count(found.num_files, 'file')}, {found.num_bytes / 1e9:.2f} GB of packed weights in "
        f"{folder}, from which models start faster; it may be deleted"
    )
    return Finding(topic="weight cache", state=State.GOOD, text=text)


def cards(setup: CudaSetup) -> Finding:
    """Lists the GPUs that torch can use, or says why it can use none."""
    problem = missing_cuda(setup)
    if problem is None:
        named = ", ".join(
            f"{card.name} ({card.total_bytes / 2**30:.0f} GiB)" for card in setup.cards
        )
        return Finding(topic="GPU", state=State.GOOD, text=f"device='auto' uses cuda: {named}")
    what, _, advice = problem.partition("; ")
    state = State.BAD if setup.driver else State.ABSENT
    return Finding(topic="GPU", state=state, text=f"none: {what}", advice=advice)


def attention(setup: CudaSetup, kernels: native.CpuKernels | None) -> Finding:
    """Lists the attention backends for the device that `auto` means, in the order of "auto", and
    says why those of other plugins, and the faster ones, cannot be used."""
    device = "cuda" if setup.cards else "cpu"
    needs = AttentionNeeds(name="auto", device=device, dtype="bfloat16", kv_cache_dtype="bfloat16")
    host = Host(kernels=kernels or TORCH, capabilities=[card.capability for card in setup.cards])
    manager = PluginManager.load()
    try:
        found = list(examined(needs, manager, host))
    except MMDeployLLMError as error:
        return Finding(topic="attention", state=State.BAD, text=str(error), advice="see above")
    able = [_with_owner(spec, manager) for spec, problem in found if problem is None]
    missing = [
        f"{_with_owner(spec, manager)} {problem}"
        for spec, problem in found
        if problem and (device in spec.devices or not manager.origin(spec).is_builtin)
    ]
    where = "the CPU" if device == "cpu" else "CUDA"
    order = f"on {where}: {', then '.join(able) or 'none'}"
    text = "; ".join((order, *(f"not {reason}" for reason in missing)))
    fast = [spec for spec, problem in found if problem is None and spec.name != PLAIN]
    if fast:
        return Finding(topic="attention", state=State.GOOD, text=text)
    advice = "plain torch computes, much slower; do what is said of one of the others"
    return Finding(topic="attention", state=State.SLOW, text=text, advice=advice)


def _with_owner(spec: AttentionBackendSpec, manager: PluginManager) -> str:
    """Names a backend, with its plugin where that is not ours."""
    own = manager.origin(spec)
    return spec.name if own.is_builtin else f"{spec.name} ({own})"


def versions() -> Finding:
    """Lists the versions of the libraries that decide results. One that is missing is an error: all
    of them are installed with this package."""
    modules = ("torch", "transformers", "tokenizers", "pillow", "av")
    found = {name: _version(name) for name in ("mmdeploy-llm", *modules)}
    found["mmdeploy-llm"] = found["mmdeploy-llm"] or "of a source tree"
    missing = [name for name, version in found.items() if version is None]
    shown = ", ".join(f"{name} {version or 'not installed'}" for name, version in found.items())
    return Finding(
        topic="versions",
        state=State.BAD if missing else State.GOOD,
        text=f"Python {platform.python_version()}, {shown}",
        advice=f"pip install {' '.join(missing)}" if missing else "",
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def libraries() -> Iterator[Finding]:
    """Yields a finding for each library that only some uses need."""
    for library in OPTIONAL:
        if importlib.util.find_spec(library.module) is None:
            yield Finding(
                topic=library.package,
                state=State.ABSENT,
                text=f"not installed; needed for {library.use}",
                advice=library.install,
            )
        else:
            text = f"{_version(library.package) or 'a copy'}, for {library.use}"
            yield Finding(topic=library.package, state=State.GOOD, text=text)


def plugins() -> Finding:
    """Loads all plugins and names those that fail."""
    manager = PluginManager.load()
    if manager.failures:
        failed = "; ".join(f"{failure.plugin}: {failure.error}" for failure in manager.failures)
        advice = "see `mmdeploy-llm plugins list`; install what is missing or remove the package"
        return Finding(topic="plugins", state=State.BAD, text=failed, advice=advice)
    return Finding(topic="plugins", state=State.GOOD, text=f"{len(manager.plugins)} loaded")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
