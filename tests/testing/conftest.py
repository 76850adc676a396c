"""Fixtures that run checks on deliberately broken plugins and return the failures."""

import itertools
import re
import sys
from types import ModuleType

import pytest
import torch

from mmdeploy_llm.testing import CheckFailed, CheckSkipped
from mmdeploy_llm.testing.plugins import fresh, probe


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_process_of_factories(monkeypatch):
    """No process that imports the factories of each plugin, and torch with them."""
    monkeypatch.setattr(fresh, "changes_of", lambda modules: {})
    monkeypatch.setattr(probe, "CHANGES", "")


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


@pytest.fixture(scope="session")
def demand_failures():
    """demand_failures(found, all checks, names of those that must fail, regex for the message of
    the first). "*" among the names means that further checks may fail as a consequence."""

    def demand(found, checks, names, message):
        first = next(check.__name__ for check in checks if check.__name__ in names)
        assert re.search(message, found[first], re.DOTALL), found[first]
        if "*" not in names:
            assert set(found) == names

    return demand


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
