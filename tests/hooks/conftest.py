"""Temporary packages with plugins, as pip installs them: a module next to a *.dist-info folder."""

import importlib
import sys
import types
from importlib import metadata
from textwrap import dedent

import pytest

from mmdeploy_llm.hooks import hookimpl

IMPORTS = """
from mmdeploy_llm.hooks import (
    MediaProcessor, MediaProcessorSpec, ModelSpec, ReasoningParser, ReasoningParserSpec, ToolParser,
    ToolParserSpec, LogitsProcessorSpec, ReadingPreset, hookimpl,
)
"""


class Site:
    """A folder on sys.path; the only one in which plugins are searched during a test."""

    def __init__(self, folder):
        self.folder = folder
        self.modules = []

    def install(
        self, plugin, source, *, package=None, version="1.0", requires=(), module=None, entry=None
    ):
        """Writes a package with one entry point `plugin`; returns the name of its module."""
        package = package or f"{plugin}-llm"
        module = module or f"site_{package.replace('-', '_')}"
        (self.folder / f"{module}.py").write_text(IMPORTS + dedent(source))
        lines = ["Metadata-Version: 2.1", f"Name: {package}", f"Version: {version}"]
        lines += [f"Requires-Dist: {line}" for line in requires]
        info = self.folder / f"{package.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        (info / "entry_points.txt").write_text(f"[mmdeploy_llm]\n{plugin} = {entry or module}\n")
        self.modules.append(module)
        importlib.invalidate_caches()
        return module


@pytest.fixture
def site(tmp_path, monkeypatch):
    """An empty Site. Discovery finds its packages and no others; all else is unchanged."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    everywhere = metadata.distributions

    def here(**options):
        return everywhere(**{"path": [str(folder)], **options})

    monkeypatch.setattr("importlib.metadata.distributions", here)
    site = Site(folder)
    yield site
    for module in site.modules:
        sys.modules.pop(module, None)
    importlib.invalidate_caches()


MODEL_PLUGIN = """
@hookimpl
def provide_models():
    return [ModelSpec(name={name!r}, architectures=({architecture!r},), factory="json:loads",
                      priority={priority})]
"""


@pytest.fixture
def model_plugin():
    """Returns the source of a plugin with one model."""

    def source(name="acme", architecture="AcmeForCausalLM", priority=0):
        return MODEL_PLUGIN.format(name=name, architecture=architecture, priority=priority)

    return source


@pytest.fixture
def make_plugin():
    """make_plugin(hook=function, ...): a plugin that is no package."""

    def make(**hooks):
        plugin = types.ModuleType("in_process")
        for name, function in hooks.items():
            setattr(plugin, name, hookimpl(function, specname=name))
        return plugin

    return make
