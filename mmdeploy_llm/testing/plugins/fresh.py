"""Looks in a fresh process what a plugin changes there when it is imported, lists what it provides,
and when its factories are imported; where that process cannot tell, in a second one that has
imported torch and transformers before."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence

from mmdeploy_llm.hooks.validation import PROVIDED
from mmdeploy_llm.testing.models.base import Check, CheckFailed, demand

from .plugin_subject import PluginSubject

TIMEOUT = 300.0
WHEN = ("when it is imported and lists what it provides", "when its factories are imported")

# argv[1]: sys.path, names of the modules, provide_ hooks. Prints module -> what has changed in each
# phase.
PROBE = """
import importlib, json, sys
path, names, hooks = json.loads(sys.argv[1])
sys.path[:] = path
from mmdeploy_llm.testing.plugins.left_over import Left, named_by, replaced_by
from pathlib import Path
import mmdeploy_llm.hooks
from mmdeploy_llm import layers
from mmdeploy_llm.hooks.factories import imported
from mmdeploy_llm.hooks.files import load_file
found, specs = {}, {}
for name in names:
    is_file = name.endswith(".py")
    if is_file:  # which may import torch and all layers, whose changes are their own
        import torch
        for exported in layers.__all__:
            getattr(layers, exported)
    left = Left()
    try:
        module = load_file(Path(name)) if is_file else importlib.import_module(name)
        specs[name] = [spec for hook in hooks for spec in getattr(module, hook, list)()]
    except Exception:  # whatever a module raises: imports_in_a_fresh_process says so
        continue
    found[name] = [left.difference(), None]
for name, listed in specs.items():
    if listed:  # with the libraries that transformers imports, whose changes are their own
        import torch
        import transformers.models.auto.image_processing_auto
    left = Left()
    for spec in listed:
        try:
            imported(named_by(spec))
        except Exception:  # whatever a module raises: factories_can_be_imported says so
            continue
    found[name][1] = left.difference() or replaced_by(name)
print("PROBE" + json.dumps(found))
"""


def changes_of(modules: Sequence[str]) -> Mapping[str, tuple[str | None, str | None]]:
    """Returns module -> what has changed in the two phases, None where nothing has. A module may be
    the path of a single file. Those that cannot be imported are left out."""
    arguments = json.dumps([sys.path, list(modules), list(PROVIDED)])
    command = [sys.executable, "-c", PROBE, arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        raise CheckFailed(
            f"importing {', '.join(modules)} and their factories took over {TIMEOUT:g} s"
        ) from None
    _, mark, answer = done.stdout.rpartition("PROBE")
    last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    demand(mark, f"importing {', '.join(modules)} and their factories ended the process: {last}")
    found: Mapping[str, tuple[str | None, str | None]] = json.loads(answer)
    return found


def imports_change_nothing(subject: PluginSubject) -> None:
    """Importing the module, listing, and importing the factories replaces no function of others,
    changes no setting of the process, and starts nothing."""
    changes = subject.probe["changes"]
    if changes is None:  # it is the first that imports a library
        name = subject.module_name if subject.file is None else str(subject.file)
        changes = changes_of((name,)).get(name, (None, None))
    for when, change in zip(WHEN, changes, strict=True):
        demand(change is None, f"{subject.module_name!r} changes the process {when}: {change}")


CHECKS: tuple[Check, ...] = (imports_change_nothing,)
