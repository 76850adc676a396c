"""Loads the programs of examples/benchmarks, which are no package."""

import importlib.util
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "examples" / "benchmarks"


@pytest.fixture(scope="module")
def load_benchmark():
    """load_benchmark(name) -> the module."""
    names = []

    def load(name):
        spec = importlib.util.spec_from_file_location(f"{name}_benchmark", FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[module.__name__] = module  # its dataclasses look themselves up
        names.append(module.__name__)
        spec.loader.exec_module(module)
        return module

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))  # a benchmark imports its neighbours
        yield load
    for name in names:
        del sys.modules[name]
