"""Adds compiled kernels to a wheel for Linux or macOS; pyproject.toml has everything else.

`python -m build` makes a wheel with them. MMDEPLOY_LLM_PURE=1 makes one without, for any machine,
which compiles its kernels on first use; so does a machine without a C++ compiler. With
MMDEPLOY_LLM_KERNELS=1 a wheel without them is an error, as it must be where wheels are released.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parent
TARGET = "mmdeploy_llm/kernels/cpu/prebuilt"
# What kernels/cpu/prebuilt.py imports, up to the root: their own __init__.py import more than an
# isolated build has, which has no torch.
PACKAGES = ("mmdeploy_llm", "mmdeploy_llm.kernels", "mmdeploy_llm.kernels.cpu")
PACKAGES += ("mmdeploy_llm.system", "mmdeploy_llm.system.portable")


def load_prebuilt() -> Any:
    """Imports kernels/cpu/prebuilt.py without what the packages around it import."""
    for name in PACKAGES:
        package = types.ModuleType(name)
        package.__path__ = [str(ROOT.joinpath(*name.split(".")))]
        sys.modules[name] = package
    return importlib.import_module("mmdeploy_llm.kernels.cpu.prebuilt")


class KernelsHook(BuildHookInterface):
    """Compiles the kernels into a folder of its own, whose files go into the wheel; never for an
    editable install."""

    _folder: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds the libraries, and names the platform that they run on; any Python 3 loads them.
        Raises SystemExit where kernels are demanded and cannot be made."""
        if version == "editable":
            return
        must_have = bool(os.environ.get("MMDEPLOY_LLM_KERNELS"))
        prebuilt = load_prebuilt()
        if os.environ.get("MMDEPLOY_LLM_PURE") or not prebuilt.can_prebuild():
            if must_have:
                raise SystemExit(
                    "MMDEPLOY_LLM_KERNELS is set, but no wheel with kernels can be made here"
                )
            return
        self._folder = tempfile.TemporaryDirectory()
        try:
            system = prebuilt.prebuild(Path(self._folder.name))
        except prebuilt.BuildError as error:
            if must_have:
                raise SystemExit(f"no kernels for the wheel: {error}") from error
            self.app.display_warning(f"no kernels in the wheel: {error}")
            return
        if must_have and system.startswith("linux"):
            raise SystemExit("the kernels need newer system libraries than manylinux_2_28 has")
        for path in Path(self._folder.name).iterdir():
            build_data["force_include"][str(path)] = f"{TARGET}/{path.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{system}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Removes the folder."""
        if self._folder is not None:
            self._folder.cleanup()
