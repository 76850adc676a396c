"""Imports a plugin in a fresh process, lists what it provides, and imports its factories; tells how
long the import took, what heavy modules came with it, and what has changed in the process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from mmdeploy_llm.hooks.validation import PROVIDED
from mmdeploy_llm.testing.models.base import CheckFailed

SECONDS = 120.0
IMPORTTIME = "import time:"
HEAVY = ("torch", "transformers")
# Specs whose objects compute with torch, and, but for splitters, media processors: it is imported
# before their factories.
OF_TORCH = ("AttentionBackendSpec", "LogitsProcessorSpec", "ModelSpec", "WeightFormatSpec")
# Libraries in which a plugin may change something. Where the plugin is the first to import one,
# nobody can tell its changes from those that the library makes itself when it is imported: then
# `certain` is false, and fresh.changes_of looks in a process that has imported all of them before.
LIBRARIES = ("PIL", "av", "numpy", "safetensors", "torch", "transformers")

# argv[1]: sys.path, name of the module, its file if it is a single one, provide_ hooks; argv[2]:
# HEAVY, OF_TORCH, LIBRARIES.
PROGRAM = r"""
import json, re, sys, time
path, name, file, hooks = json.loads(sys.argv[1])
heavy_names, of_torch, libraries = json.loads(sys.argv[2])
sys.path[:] = path
import mmdeploy_llm.hooks, mmdeploy_llm.hooks.files
from pathlib import Path
from mmdeploy_llm.hooks.factories import imported
from mmdeploy_llm.testing.plugins.left_over import Left, named_by, replaced_by
if file is not None:  # which may import any library at its top
    import numpy, PIL.Image, PIL.ImageFile, PIL.ImageOps
    if re.search(r"^(import|from) (torch|mmdeploy_llm[.]layers)\b", Path(file).read_text(), re.M):
        import safetensors.torch, torch
        from mmdeploy_llm import layers
        for exported in layers.__all__:
            getattr(layers, exported)
importers = {}
class Finder:
    def find_spec(self, module, *_):
        frame = sys._getframe(1)
        while "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        importers.setdefault(module, f"{frame.f_code.co_filename}:{frame.f_lineno}")
sys.meta_path.insert(0, Finder())
def known():
    return {library for library in libraries if library in sys.modules}
before, left = known(), Left()
print("BEGIN", file=sys.stderr, flush=True)
start = time.perf_counter()
if file is None:
    __import__(name)  # of which Python tells the time of each module
    module = sys.modules[name]
else:
    module = mmdeploy_llm.hooks.files.load_file(Path(file))
seconds = time.perf_counter() - start
print("IMPORTED", flush=True)
specs = [spec for hook in hooks for spec in getattr(module, hook, list)()]
print("END", file=sys.stderr, flush=True)
heavy = [name for name in heavy_names if name in sys.modules]
by = {name: importers.get(name, "") for name in heavy}
print("PROBE" + json.dumps({"seconds": seconds, "by": by}), flush=True)
"""
# Goes on in the same process: it looks what has changed, and imports the factories.
CHANGES = """
certain, changes = file is None or known() == before, [left.difference(), None]
if specs:
    import numpy, PIL.Image, PIL.ImageFile, PIL.ImageOps
    kinds = {type(spec).__name__ for spec in specs if not getattr(spec, "yields", None)}
    if kinds & {*of_torch, "MediaProcessorSpec"}:
        import safetensors.torch, torch
    before, left = known(), Left()
    for spec in specs:
        try:
            imported(named_by(spec))
        except Exception:  # whatever a module raises: factories_can_be_imported says so
            continue
    certain = certain and known() == before
    changes[1] = left.difference() or replaced_by(name if file is None else file)
print("CHANGES" + json.dumps(changes if certain else None))
"""


def probed(name: str, file: str | None) -> Mapping[str, Any]:
    """Returns "seconds" of the import, "by": heavy module -> the line that imports it, "slowest":
    the module that took longest, "heavy_seconds" of what is heavy, "changes": when the plugin was
    imported and when its factories were, None where this process cannot tell.

    name: of the module. file: of a plugin that is a single one. Raises CheckFailed when the process
    fails before the plugin has listed what it provides.
    """
    about = json.dumps([sys.path, name, file, list(PROVIDED)])
    names = json.dumps([HEAVY, OF_TORCH, LIBRARIES])
    command = [sys.executable, "-X", "importtime", "-c", PROGRAM + CHANGES, about, names]
    out, told, ended = _run(command)
    before, _, listed = out.partition("PROBE")
    is_done = "CHANGES" in listed  # else a factory ended or held the process, see fresh.changes_of
    if ended is None and (is_done or not listed):
        raise CheckFailed(
            f"importing {name!r} and listing took over {SECONDS:g} s; do no work at import, move "
            "it into the factory"
        )
    if not listed or (is_done and ended):
        said = told.rpartition("BEGIN")[2] or told
        lines = [line for line in said.splitlines() if not line.startswith(IMPORTTIME)]
        why = ([line for line in lines if line.strip()] or [f"exit status {ended}"])[-1]
        doing = "calling the provide_ hooks of" if "IMPORTED" in before else "importing"
        raise CheckFailed(
            f"{doing} {name!r} in a fresh process failed: {why}; a plugin must be importable on "
            "its own and list what it provides"
        )
    read = json.JSONDecoder().raw_decode
    found, changes = read(listed)[0], listed.rpartition("CHANGES")[2]
    timed = _timed(told)
    return {
        **found,
        "slowest": _slowest(timed),
        "heavy_seconds": _heavy_seconds(timed),
        "changes": read(changes)[0] if is_done else None,
    }


def _run(command: Sequence[str]) -> tuple[str, str, int | None]:
    """Returns output, errors and exit status; None for a process that had to be ended."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", errors="replace"
    )
    try:
        return *process.communicate(timeout=SECONDS), process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        return *process.communicate(), None


Timed = Sequence[tuple[int, int, str]]  # own, cumulative microseconds, indented name


def _slowest(timed: Timed) -> str:
    """Returns the module that took longest by itself."""
    micros, name = max(((own, name.strip()) for own, _, name in timed), default=(0, "nothing"))
    return f"{name} ({micros / 1e6:.1f} s)"


def _heavy_seconds(timed: Timed) -> float:
    """Returns the seconds in imports of torch, transformers and this package, and of what they
    import."""
    total, within = 0, -1
    for _, cumulative, name in reversed(timed):  # a module comes before its importers
        depth = len(name) - len(name.lstrip())
        if depth > within >= 0:
            continue
        is_heavy = name.strip().partition(".")[0] in (*HEAVY, "mmdeploy_llm")
        within = depth if is_heavy else -1
        total += cumulative if is_heavy else 0
    return total / 1e6


def _timed(told: str) -> Timed:
    """Returns the modules imported from BEGIN to END, as Python tells them."""
    found = []
    for line in told.partition("BEGIN")[2].partition("\nEND")[0].splitlines():
        own, _, rest = line.removeprefix(IMPORTTIME).partition("|")
        cumulative, _, name = rest.partition("|")
        if line.startswith(IMPORTTIME) and own.strip().isdigit():
            found.append((int(own), int(cumulative), name))
    return found
