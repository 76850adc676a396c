"""Shared by all tests: which run first, which skips are known, and fixtures of several folders."""

import ast
import gc
import importlib.util
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.tiers import RECORD, leave_to_full, leave_to_long, longest_first

TESTS = Path(__file__).parent
GPU_FOLDER = TESTS / "gpu"
REAL_FOLDER = TESTS / "real"
HAS_GPU = any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg"))

# Triton reads it when it is imported: without a GPU its kernels run in the interpreter.
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Tests caption small drawings of their own: nobody asks them for another model.
os.environ.setdefault("MMDEPLOY_LLM_MODEL", "shapes-vl")

# Why a test may be skipped in CI: what the machine, not the installation, decides.
KNOWN_SKIPS = re.compile(
    "needs a CUDA device|no CUDA device|needs Chromium or Chrome|root reads everything"
    "|without AVIF|NUMA nodes|may not choose where memory comes from|no large pages"
    "|only root makes devices|got empty parameter set|is Linux's|needs .* and qemu-user"
    "|needs the extra upright"
)


def pytest_configure(config):
    """Makes runs alike: a busy machine may take long over an example of hypothesis, and a shell
    that starts the tests in the background has them ignore Ctrl-C, which some of them send."""
    from hypothesis import settings

    if not _holds_kernels(Path.home()):
        os.environ["HOME"] = str(config.cache.mkdir("home"))

    signal.signal(signal.SIGINT, signal.default_int_handler)
    settings.register_profile("any machine", deadline=None)
    settings.load_profile("any machine")


def _holds_kernels(home):
    """Whether kernels can be kept in a home: an account may have none, or one that is full."""
    try:
        folder = home / ".cache" / "mmdeploy_llm" / "kernels"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(2**24))
    except OSError:
        return False
    return True


def pytest_sessionstart():
    """Programs and tables have the width and the colours of a pipe, whatever the terminal is; what
    pytest writes has the terminal's, which it knows by now."""
    for name in (
        "COLUMNS",
        "FORCE_COLOR",
        "LINES",
        "NO_COLOR",
        "TTY_COMPATIBLE",
        "TTY_INTERACTIVE",
    ):
        os.environ.pop(name, None)


def pytest_addoption(parser):
    parser.addoption(
        "--known-skips-only",
        action="store_true",
        help="fail when a test is skipped for a reason that tests/conftest.py does not list",
    )
    parser.addoption(
        "--soak-requests",
        type=int,
        default=6000,
        help="how many requests the test of a long mixed stream sends; 6000 take about a minute",
    )


def pytest_ignore_collect(collection_path, config):
    """tests/gpu is left out where there is no GPU, and tests/real everywhere, unless it is named or
    `-m gpu` or `-m real` asks for it."""

    def is_asked_for(marker):
        return re.search(rf"(?<!not )\b{marker}\b", config.option.markexpr)

    is_left_out = {
        GPU_FOLDER: not (HAS_GPU or is_asked_for("gpu")),
        REAL_FOLDER: not is_asked_for("real"),
    }
    return True if is_left_out.get(collection_path) else None


def pytest_collection_modifyitems(items):
    leave_to_long(items)
    leave_to_full(items)
    for item in items:
        if item.path.is_relative_to(GPU_FOLDER):
            item.add_marker(pytest.mark.gpu)
        if item.path.is_relative_to(REAL_FOLDER):
            item.add_marker(pytest.mark.real)
        if "triton_device" in item.fixturenames:
            item.add_marker(pytest.mark.triton)
    # What takes longest begins at once, while other processes run the rest.
    items[:] = longest_first(items, json.loads(RECORD.read_text("utf-8")))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collects no garbage while tests are collected: a third of that time, and nothing is freed."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish():
    """Keeps modules and tests, a million objects, from the collector of garbage: engines that end
    would have it examine them again, each for most of a second, and pytest does five times as it
    ends. Young objects are looked at less often, since most of them die by themselves."""
    gc.freeze()
    gc.set_threshold(10_000)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Keeps what a file leaves, such as modules that it has imported, from the collector, too."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        pytest.fail("it left a handler of Ctrl-C, which might end the process of a later test")


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


@pytest.fixture(scope="session", autouse=True)
def frozen_objects_are_not_counted():
    """Engines ask as they start whether their program has frozen objects. The answer is known, see
    above, and a million would be counted, for a tenth of a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "get_freeze_count", lambda: 1)
        yield


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
def run_program(load_file):
    """run_program(code, *words, cwd=, env=, timeout=): runs Python in another process, where torch
    and transformers have been imported already; see programs.py. Kernels have been compiled, so
    that what a program prints has no line about that."""
    from mmdeploy_llm.kernels.cpu import BuildError, load

    with suppress(BuildError):
        load()
    programs = load_file("programs.py").Programs()
    yield programs.run
    programs.close()


@pytest.fixture(scope="session", autouse=True)
def warm_children(load_file):
    """Ranks and engines begin where torch has been imported already; see warm.py."""
    if sys.platform != "linux":
        yield
        return
    from mmdeploy_llm.system.portable import children

    warm = load_file("warm.py").Warm()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(children, "subprocess", warm)
        yield
    warm.close()


@pytest.fixture
def cold_children(monkeypatch):
    """Ranks and engines begin anew, for tests of what they import or take."""
    from mmdeploy_llm.system.portable import children

    monkeypatch.setattr(children, "subprocess", subprocess)


@pytest.fixture(scope="session")
def build_kernels():
    """build_kernels(level) -> the library, built once for all processes and runs of the tests, in
    the folder in which engines look for it."""
    from filelock import FileLock

    from mmdeploy_llm.kernels.cpu import build

    home = Path.home() / ".cache" / "mmdeploy_llm" / "kernels"
    home.mkdir(mode=0o700, parents=True, exist_ok=True)

    def built(level, cache=home, flags=()):
        with FileLock(home / f"{level.name}.lock"):
            return build(level, cache, flags)

    return built


@pytest.fixture(scope="session", autouse=True)
def engines_wait_for_kernels(request):
    """Engines wait while another process of these tests compiles the same kernels."""
    if not hasattr(request.config, "workerinput"):  # there is no other process
        yield
        return
    from mmdeploy_llm.kernels.cpu import cpu_kernels

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_kernels, "build", request.getfixturevalue("build_kernels"))
        yield


@pytest.fixture(scope="session")
def references(pytestconfig, load_file):
    """Tiny checkpoints and transformers' answers, see references.py."""
    made = load_file("references.py").References(pytestconfig.cache.mkdir("references"))
    yield made
    changed = made.changed()
    assert not changed, f"a test wrote to {changed}, which others read; copy it first"


@pytest.fixture(scope="session")
def tiny_folder(references):
    """tiny_folder(family, **options of write_tiny) -> a checkpoint that is read only."""
    return references.tiny


@pytest.fixture(scope="session")
def tiny_copy(references):
    """tiny_copy(family, folder, **options of write_tiny) -> the folder, a copy to be changed."""

    def copy(family, folder, **options):
        return shutil.copytree(references.tiny(family, **options), folder, dirs_exist_ok=True)

    return copy


@pytest.fixture(scope="session")
def transformers_of(references):
    """transformers_of(folder) -> transformers' model, asked each question once."""
    return references.of


@pytest.fixture(scope="session")
def kernels():
    """The kernels of this CPU; the folders of tests/kernels have fixtures of the same name."""
    from mmdeploy_llm.kernels.cpu import BuildError, load

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


@pytest.fixture
def clock(monkeypatch):
    """clock.pass_by(seconds): time goes by for all that asks time.monotonic, and nobody waits."""
    now, passed = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now() + sum(passed))
    return SimpleNamespace(pass_by=passed.append)


@pytest.fixture
def limits():
    """The limits on one media item, as they are by default."""
    from mmdeploy_llm.hooks import MediaLimits

    return MediaLimits()


@pytest.fixture
def noise():
    """noise(width, height): a picture of random pixels."""
    import numpy as np
    from PIL import Image

    def make(width, height, seed=0):
        values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        return Image.fromarray(values)

    return make


@pytest.fixture
def png() -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (40, 20), (200, 30, 30)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def encode():
    """encode(image, format): the bytes of a file."""

    def encoded(image, format="PNG", **options):
        buffer = io.BytesIO()
        image.save(buffer, format, **options)
        return buffer.getvalue()

    return encoded


@pytest.fixture(scope="session")
def rules_of():
    """rules_of(model, name, ...): functions of the model's processor of videos, or of another kind,
    in transformers, read from its source, because the module cannot be imported without
    torchvision."""
    import math

    import numpy as np
    import torch
    import transformers

    def rules(model, *names, kind="video"):
        path = f"models/{model}/{kind}_processing_{model}.py"
        source = (Path(transformers.__file__).parent / path).read_text("utf-8")
        found = {"math": math, "np": np, "torch": torch}
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and node.name in names:
                for part in (node, *node.args.args):
                    part.annotation = part.returns = None
                node.decorator_list = []
                exec(compile(ast.Module([node], []), node.name, "exec"), found)
        return SimpleNamespace(**{name: found[name] for name in names})

    return rules


@pytest.fixture
def pictures(tmp_path, png):
    """A folder with 1.png, 2.png, 10.png, bad.jpg (corrupt), a text file and a subfolder."""
    folder = tmp_path / "pictures"
    (folder / "sub").mkdir(parents=True)
    for name in ("1.png", "2.png", "10.png", "sub/3.PNG", ".hidden.png"):
        (folder / name).write_bytes(png)
    (folder / "bad.jpg").write_bytes(b"\xff\xd8\xff not a picture")
    (folder / "notes.txt").write_text("no picture")
    return folder


@pytest.fixture(scope="session")
def kinds_of():
    """Returns a function that makes a table of kinds from specs, given as dicts."""
    from mmdeploy_llm.hooks import MediaProcessorSpec
    from mmdeploy_llm.hooks.kinds import table_of
    from mmdeploy_llm.hooks.records import PluginOrigin, Provided

    def make(*specs):
        origin = PluginOrigin(name="acme", module="acme", distribution="acme")
        values = ({"name": "its", "factory": "a:b", **spec} for spec in specs)
        return table_of(Provided(spec=MediaProcessorSpec(**own), origin=origin) for own in values)

    return make
