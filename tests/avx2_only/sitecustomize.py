"""Python imports this at its start where PYTHONPATH names the folder: torch then says that the CPU
has AVX2 and nothing newer, in every process. `make test-avx2` runs the tests so, since results and
paths that depend on the instruction set show themselves on other machines only."""

import importlib.abc
import importlib.util
import sys

NEWER = ("avx512", "avx_vnni", "avx_ne", "avx10", "amx")  # how names of capabilities begin


class LesserCPU(importlib.abc.MetaPathFinder):
    """Changes torch.cpu when it is imported."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != "torch.cpu":
            return None
        sys.meta_path.remove(self)  # the others find it
        spec = importlib.util.find_spec(fullname)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            real = module.get_capabilities
            module.get_capabilities = lambda: {
                name: value and not name.startswith(NEWER) for name, value in real().items()
            }

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, LesserCPU())
