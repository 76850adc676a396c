"""Fixtures that run checks on deliberately broken plugins and return the failures."""

import itertools
import sys
from types import ModuleType

import pytest
import torch

from mmdeploy_llm.testing import CheckFailed, CheckSkipped


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def failures():
    """failures(checks, subject) -> {name of a failed check: message}."""

    def run(checks, subject):
        found = {}
        for check in checks:
            try:
                check(subject)
            except CheckFailed as failure:
                found[check.__name__] = str(failure)
            except CheckSkipped:
                pass
        return found

    return run


@pytest.fixture(scope="module")
def factory():
    """factory(object) -> the "module:name" with which a spec can refer to the object."""
    names = []

    def register(value):
        name = f"kit_made_up_{next(numbers)}"
        module = ModuleType(name)
        module.made = value
        sys.modules[name] = module
        names.append(name)
        return f"{name}:made"

    numbers = itertools.count(id(names))
    yield register
    for name in names:
        del sys.modules[name]
