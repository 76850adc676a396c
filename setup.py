"""Adds compiled kernels to a wheel for x86-64 Linux; pyproject.toml has everything else.

`python -m build` makes a wheel with them. MMDEPLOY_LLM_PURE=1 makes one without, for any machine,
which compiles its kernels on first use; so does a machine without a C++ compiler.
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

NATIVE = Path(__file__).parent / "src" / "mmdeploy_llm" / "native"
TARGET = Path("mmdeploy_llm") / "native" / "prebuilt"


def load_prebuilt():
    """Imports native/prebuilt.py and build.py as a package of their own: the real package imports
    torch, which an isolated build has not."""
    package = types.ModuleType("native_for_setup")
    package.__path__ = [str(NATIVE)]
    sys.modules[package.__name__] = package
    return importlib.import_module("native_for_setup.prebuilt")


prebuilt = load_prebuilt()
wants_kernels = not os.environ.get("MMDEPLOY_LLM_PURE") and prebuilt.can_prebuild()


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
        except prebuilt.BuildError as error:
            self.announce(f"no kernels in the wheel: {error}", level=3)


class Wheel(bdist_wheel):
    """Names the platform of the kernels; any Python 3 loads them."""

    def get_tag(self):
        """Returns the tags of Python, its binary interface and the platform."""
        return "py3", "none", BuildWithKernels.platform or "any"


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": Wheel})
