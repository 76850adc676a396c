"""Shared by all tests: the two tiers, which skips are known, and fixtures of several folders."""

import importlib.util
import os
import re
import signal
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
GPU_FOLDER = TESTS / "gpu"
HAS_GPU = any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg"))

# Triton reads it when it is imported: without a GPU its kernels run in the interpreter.
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")

# `make test` runs the quick tier: every rule, every room, one representative of each kind (a dense
# model, one with M-RoPE, one with atomic media and experts) and one path through each feature from
# end to end. Of these files and folders only the tests whose name matches are quick, or after a "!"
# those whose name does not; the others are marked "full" and run in `make test-all`. The longest
# path that fits a test decides.
QUICK = {
    "attention/test_triton.py": r"batches\[\d\]|8_bits\[64-|4_bits\[[0-4]\]|^test_(pad|num|str|sp)",
    "attention/test_select.py": r"!heads_of_the_models.*(?<!\[qwen2\])$",
    "attention/test_rotary_cache.py": r"shape[02](\]|-True|-cache)|no_tok|take|recorded|\[True\]",
    "batch/test_killed.py": "cut_at_any_byte",
    "batch/test_report_browser.py": "!",
    "batch/test_run.py": "!memory_does_not_grow",
    "bench/test_bench.py": "!photos_are_decoded|int8_and_tables",
    "bench/test_gpu.py": "!all_parts",
    "cuda/test_choose.py": "!frequencies|dtype1",
    "cuda/test_compiles.py": "!",
    "cuda/test_emulated.py": r"text\[qwen3|media\[qwen2_5_vl|greedy_step|sends",
    "cuda/test_emulated_backends.py": "flash-attn-4|triton",
    "cuda/test_emulated_few_bits.py": r"loading\[int8\]|fp8 rows",
    "cuda/test_emulated_memory.py": "!counts_of_penalties",
    "cuda/test_experts.py": r"loop\[[17]-|True\]|options[01]|media2|no_|sorted",
    "cuda/test_loading.py": "!",
    "cuda/test_rows.py": r"shape[024]|\[3-.*-True|beyond|takes",
    "datasets/test_memory.py": "!",
    "distributed/test_ahead_of_ranks.py": "!",
    "distributed/test_faults_of_ranks.py": r"have\[one\]|given_up",
    "distributed/test_desks.py": "!ctrl_c|dead_engine|in_another",
    "distributed/test_messages.py": "!test_workers|ends_with_its_parent",
    "distributed/test_ranks.py": "ernie|wrong_at_the_start|not_there",
    "distributed/test_restarts.py": "!",
    "distributed/test_share_of_weights.py": "!memory_of_a_rank",
    "native": r"!\[(avx2|portable)",
    "packages/test_minimal.py": "!",
    "plugins/test_every_plugin.py": r"\[(image|qwen|sources)\]",
    "plugins/test_text_models.py": r"\[qwen2\]|^test_",
    "plugins/test_vision_models.py": "TestErnieVL|TestPaddleOCRVL|TestQwen25VL|^test_",
    "plugins/transformers_any/test_census.py": "!sample|crash",
    "plugins/transformers_any/test_embeds.py": r"chunks.*gemma3\]|named",
    "plugins/transformers_any/test_exact.py": "gemma3|bf16",
    "plugins/transformers_any/test_kernels.py": "gemma3",
    "plugins/transformers_any/test_text.py": "TestGemma2|^test_",
    "processors/test_isolation.py": "!nonsense|left|close|outlives|from_outside",
    "processors/test_video_processor.py": "!counts.*ernie|strip|same_video|same_errors|used_again",
    "ray/test_cluster.py": "importing",
    "gguf/test_gguf_hostile.py": "!damaged.*(gemma|qwen|lfm)",
    "gguf/test_gguf_models.py": r"alone\[(llama|gemma3|qwen3\.5)\]|\[Q8_0\]|split|command|piece",
    "schedule/test_simulation.py": r"roomy|\[tiny pool\]|atomic media\]|the_scenes",
    "security/test_checkpoint_code.py": "!folders_are_hostile",
    "security/test_checkpoint_json.py": r"!mutated_files\[[1-9]",
    "security/test_grammars.py": r"pattern\]|stars|ambiguous gr|choice|closing|some|dies|itself",
    "security/test_templates.py": r"sum of|width in %|\[lists\]|both|bound_m|closing|errors\[0\]",
    "system/test_async_ends.py": "ctrl_c|forked",
    "system/test_async_load.py": "tenth",
    "system/test_deterministic.py": "refuse|checks_the_promise",
    "system/test_documents.py": r"code_blocks_run\[README",
    "system/test_embeds.py": r"in_chunks.*qwen2_5|shapes_and|grids_and",
    "system/test_faults.py": "!a_program_ends",
    "system/test_interrupts.py": r"\[batch\]",
    "system/test_pool.py": "!minute",
    "system/test_processes.py": r"\[one\]|order0|threads\[variables0",
    "system/test_soak.py": "short",
    "system/test_sampling_options.py": "!any_value|whatever_else|sampling1",
    "test_counting.py": "!forked",
    "system/test_shapes_vl.py": "reduced_evaluation",
    "testing/test_kit.py": "!fifteen_lines|without_pytest|report_of_a_failure",
    "testing/test_model_checks.py": "!a_broken_model.*checks[1-9]|models_they_are",
    "testing/test_plugin_checks.py": "!a_broken_plugin.*checks([2-9]|1[0-4])",
    "weights/test_load.py": "!no_second_copy",
}
# Files whose tests run or compile Triton kernels without the fixture `triton_device`.
TRITON_FILES = ("cuda/test_compiles.py",)

# Runs first: it takes minutes, in which other processes run the rest.
LONGEST = TESTS / "system" / "test_soak.py"

# Why a test may be skipped in CI: what the machine, not the installation, decides.
KNOWN_SKIPS = re.compile(
    "needs a CUDA device|no CUDA device|needs Chromium or Chrome|root reads everything"
    "|without AVIF|NUMA nodes|may not choose where memory comes from|no large pages"
    "|got empty parameter set|is Linux's"
)


def pytest_configure():
    """Makes runs alike: a busy machine may take long over an example of hypothesis, and a shell
    that starts the tests in the background has them ignore Ctrl-C, which some of them send."""
    from hypothesis import settings

    signal.signal(signal.SIGINT, signal.default_int_handler)
    settings.register_profile("any machine", deadline=None)
    settings.load_profile("any machine")


def pytest_addoption(parser):
    parser.addoption(
        "--known-skips-only",
        action="store_true",
        help="fail when a test is skipped for a reason that tests/conftest.py does not list",
    )
    parser.addoption(
        "--soak-seconds",
        type=float,
        default=60,
        help="how long the test of a long mixed stream of requests runs",
    )


def pytest_ignore_collect(collection_path, config):
    """tests/gpu is left out where there is no GPU, unless it is named or `-m gpu` asks for it."""
    is_wanted = HAS_GPU or re.search(r"(?<!not )\bgpu\b", config.option.markexpr)
    return True if collection_path == GPU_FOLDER and not is_wanted else None


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path != LONGEST)
    for item in items:
        if not item.path.is_relative_to(TESTS):
            continue
        path = item.path.relative_to(TESTS)
        if path.parts[0] == GPU_FOLDER.name:
            item.add_marker(pytest.mark.gpu)
        if "triton_device" in item.fixturenames or path.as_posix() in TRITON_FILES:
            item.add_marker(pytest.mark.triton)
        if not is_quick(path, item.nodeid.partition("::")[2]):
            item.add_marker(pytest.mark.full)


def is_quick(path, name):
    """path: of the file, below tests/. name: of the test, with its class and parameters."""
    for folder in (path, *path.parents):
        pattern = QUICK.get(folder.as_posix())
        if pattern is not None:
            is_found = re.search(pattern.removeprefix("!"), name) is not None
            return is_found is not pattern.startswith("!")
    return True


def pytest_sessionfinish(session):
    """Fails a run with skips that nobody expects. Processes of pytest-xdist know of no skips."""
    if session.config.getoption("known_skips_only") and unknown_skips(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def unknown_skips(config):
    """Reasons that KNOWN_SKIPS does not match. A check of the conformance kit that does not apply
    to a plugin is known too."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    found = set()
    for report in reporter.stats.get("skipped", ()) if reporter else ():
        path, _, reason = report.longrepr
        is_of_kit = Path(path).as_posix().endswith("mmdeploy_llm/testing/conformance.py")
        if not is_of_kit and not KNOWN_SKIPS.search(reason):
            found.add(f"{report.nodeid}: {reason}")
    return sorted(found)


def pytest_terminal_summary(terminalreporter, config):
    if config.getoption("known_skips_only"):
        for line in unknown_skips(config):
            terminalreporter.write_line(f"skipped for an unknown reason: {line}", red=True)


@pytest.fixture(scope="session")
def load_file():
    """load_file(path) -> the module of helpers at a path below tests/, which is no package."""

    def load(name):
        path = TESTS / name
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def build_kernels(pytestconfig):
    """build_kernels(level) -> the library, built once for all processes and runs of the tests."""
    from filelock import FileLock

    from mmdeploy_llm.native import build

    folder = pytestconfig.cache.mkdir("kernels")

    def built(level, flags=()):
        with FileLock(folder / f"{level.name}.lock"):
            return build(level, folder, flags)

    return built


@pytest.fixture(scope="session")
def kernels():
    """The kernels of this CPU; tests/native and tests/cuda have fixtures of the same name."""
    from mmdeploy_llm.native import BuildError, load

    try:
        return load()
    except BuildError as error:
        pytest.skip(f"no kernels on this machine: {error}")


@pytest.fixture(scope="session")
def triton_device(load_file):
    """The device of Triton's kernels: the GPU, or the CPU, where the interpreter runs them."""
    pytest.importorskip("triton", reason="needs triton, which the extra 'dev' installs")
    import torch

    if torch.cuda.is_available():
        yield torch.device("cuda")
        return
    with load_file("interpreter.py").mended():
        yield torch.device("cpu")
