"""Adds compiled kernels to a wheel for Linux or macOS; pyproject.toml has everything else.

`python -m build` makes a wheel with them. MMDEPLOY_LLM_PURE=1 makes one without, for any machine,
which compiles its kernels on first use; so does a machine without a C++ compiler. With
MMDEPLOY_LLM_KERNELS=1 a wheel without them is an error, as it must be where wheels are released.
"""

import importlib
import os
import shutil
import sys
import types
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

SOURCES = Path(__file__).parent / "src" / "mmdeploy_llm"
TARGET = Path("mmdeploy_llm") / "native" / "prebuilt"


def load_prebuilt():
    """Imports native/prebuilt.py without what the packages around it import: torch, which an
    isolated build has not."""
    for folder in (SOURCES, SOURCES / "native"):
        package = types.ModuleType(".".join(folder.relative_to(SOURCES.parent).parts))
        package.__path__ = [str(folder)]
        sys.modules[package.__name__] = package
    return importlib.import_module("mmdeploy_llm.native.prebuilt")


prebuilt = load_prebuilt()
must_have = bool(os.environ.get("MMDEPLOY_LLM_KERNELS"))
wants_kernels = not os.environ.get("MMDEPLOY_LLM_PURE") and prebuilt.can_prebuild()
if must_have and not wants_kernels:
    raise SystemExit("MMDEPLOY_LLM_KERNELS is set, but no wheel with kernels can be made here")


class BuildWithKernels(build_py):
    """Compiles the kernels into the folder that becomes the wheel; not for an editable install."""

    platform = None  # of the compiled kernels, None without

    def run(self):
        """Builds the package."""
        super().run()
        shutil.rmtree(Path(self.build_lib) / TARGET, ignore_errors=True)  # of an earlier build
        if not wants_kernels or self.editable_mode:
            return
        try:
            type(self).platform = prebuilt.prebuild(Path(self.build_lib) / TARGET)
            if must_have and type(self).platform.startswith("linux"):
                raise SystemExit("the kernels need newer system libraries than manylinux_2_28 has")
        except prebuilt.BuildError as error:
            if must_have:
                raise SystemExit(f"no kernels for the wheel: {error}") from error
            self.announce(f"no kernels in the wheel: {error}", level=3)


class Wheel(bdist_wheel):
    """Names the platform of the kernels; any Python 3 loads them."""

    def get_tag(self):
        """Returns the tags of Python, its binary interface and the platform."""
        return "py3", "none", BuildWithKernels.platform or "any"


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": Wheel})
