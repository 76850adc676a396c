"""The examination finds what is missing or wrong, and says what to do."""

import importlib.metadata
import importlib.util
import json
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from mmdeploy_llm.cli import app
from mmdeploy_llm.cli.doctor import State, examine, self_test
from mmdeploy_llm.cli.doctor.comparison import CASES
from mmdeploy_llm.cli.doctor.examination import (
    OPTIONAL,
    attention,
    cached_weights,
    cards,
    cpu_kernels,
    libraries,
    plugins,
    processor,
    versions,
)
from mmdeploy_llm.engine.startup.cards import Card, CudaSetup
from mmdeploy_llm.hooks import PluginManager
from mmdeploy_llm.kernels import cpu as native
from mmdeploy_llm.testing.models.reference import Reference

PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"
CARD = Card(name="A Card", capability=(9, 0), total_bytes=80 * 2**30)
WITH_CARD = CudaSetup(torch="2", cuda=(13, 0), driver=(13, 0), cards=(CARD,))


def test_a_machine_where_all_is_well():
    found = {finding.topic: finding for finding in examine()}
    assert {"processor", "CPU kernels", "memory", "GPU", "attention", "plugins"} <= found.keys()
    assert not [finding for finding in found.values() if finding.state is State.BAD]
    assert native.cpu_levels()[0].value in found["CPU kernels"].text


def test_the_processor_of_an_unknown_system(monkeypatch, tmp_path):
    monkeypatch.setattr("mmdeploy_llm.cli.doctor.examination.CPU_INFO", tmp_path / "none")
    assert "an engine computes in" in processor().text


def test_the_weight_cache(monkeypatch, tmp_path):
    (tmp_path / "a.weights").write_bytes(bytes(20_000_000))
    found = cached_weights(str(tmp_path))
    assert "1 file, 0.02 GB" in found.text
    assert str(tmp_path) in found.text
    assert cached_weights(False).text == "off"
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert cached_weights(True).state is State.ABSENT


def test_no_compiler(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda _: None)
    kernels, finding = cpu_kernels()
    assert kernels is None
    assert finding.state is State.SLOW
    assert "no C++ compiler" in finding.text
    assert "apt install g++" in finding.advice


def test_a_compiler_that_is_too_old(monkeypatch):
    best, *others = native.cpu_levels()
    if not others:
        pytest.skip("this processor has one level")
    kernels = native.load(level=others[0])
    monkeypatch.setattr(native, "load", lambda: kernels)
    _, finding = cpu_kernels()
    assert finding.state is State.SLOW
    assert f"cannot build the faster {best.value}" in finding.text
    assert "newer C++ compiler" in finding.advice


def test_kernels_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    _, finding = cpu_kernels()
    assert finding.state is State.SLOW
    assert "cannot be written" in finding.text
    assert "apt" not in finding.advice


def test_a_missing_library_comes_with_the_line_that_installs_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    found = list(libraries())
    assert {finding.state for finding in found} == {State.ABSENT}
    assert all(finding.advice.startswith("pip install ") for finding in found)


def test_a_library_that_is_not_there_is_no_source_tree(monkeypatch):
    """PyAV removed: videos and sounds fail, and nothing else says so before the batch."""
    real = importlib.metadata.version

    def version(name):
        if name == "av":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr("importlib.metadata.version", version)
    finding = versions()
    assert "av not installed" in finding.text
    assert (finding.state, finding.advice) == (State.BAD, "pip install av")


def test_the_libraries_are_those_of_the_extras():
    """The packages of an extra are those of the libraries whose lines install it."""
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    packages: dict[str, set[str]] = {}
    for library in OPTIONAL:
        (extra,) = re.findall(r"mmdeploy-llm\[(\w+)\]", library.install)
        packages.setdefault(extra, set()).add(library.package)
        assert importlib.util.find_spec(library.module)
    for extra, named in packages.items():
        assert {re.split(r"[^\w-]", wanted)[0] for wanted in extras[extra]} == named


def test_gpus():
    assert "A Card (80 GiB)" in cards(WITH_CARD).text
    absent = cards(CudaSetup(torch="2", cuda=(13, 0)))
    assert (absent.state, "install it" in absent.advice) == (State.ABSENT, True)
    old = cards(CudaSetup(torch="2", cuda=(13, 0), driver=(12, 0)))
    assert (old.state, "update the driver" in old.advice) == (State.BAD, True)


def test_attention_on_a_card_without_any_library(monkeypatch):
    monkeypatch.setattr("mmdeploy_llm.layers.attention.libraries.is_installed", lambda _: False)
    finding = attention(WITH_CARD, None)
    assert finding.state is State.SLOW
    assert finding.text.startswith("on CUDA: reference; not ")
    assert "not flash-attn is not installed: pip install" in finding.text


def test_a_broken_plugin(monkeypatch):
    _fail_a_plugin(monkeypatch)
    finding = plugins()
    assert finding.state is State.BAD
    assert finding.text == "bad: broken"


def _fail_a_plugin(monkeypatch):
    failure = SimpleNamespace(plugin="bad", error="broken")
    monkeypatch.setattr(PluginManager, "failures", (failure,))


@pytest.mark.full
def test_every_way_to_compute_is_compared():
    found = list(self_test(has_kernels=True))
    assert [finding.topic for finding in found] == [f"self-test {case.name}" for case in CASES]
    assert {finding.state for finding in found} == {State.GOOD}


@pytest.mark.full
def test_a_machine_that_computes_something_else_is_found(monkeypatch):
    logits = Reference.logits
    monkeypatch.setattr(Reference, "logits", lambda *args: logits(*args).roll(1, dims=1))
    found = list(self_test(has_kernels=False))
    assert [finding.state for finding in found] == [State.BAD] * 2
    assert "try native_kernels=False" in found[0].advice


def test_the_command():
    done = CliRunner().invoke(app, ["doctor", "--no-self-test"])
    assert done.exit_code == 0
    assert "CPU kernels" in done.output


def test_the_command_tells_what_is_wrong(monkeypatch):
    _fail_a_plugin(monkeypatch)
    done = CliRunner().invoke(app, ["doctor", "--no-self-test", "--json"])
    assert done.exit_code == 1
    (wrong,) = [item for item in json.loads(done.output) if item["state"] == "bad"]
    assert wrong["topic"] == "plugins"
