"""Computes with every library of an installed wheel that this processor executes: python
tests/kernels/cpu/installed.py. Needs neither pytest nor a compiler."""

import sys

import torch

import mmdeploy_llm
from mmdeploy_llm.kernels import cpu as native


def check(level):
    """Compares products of the level's kernels with plain torch."""
    path = native.find_prebuilt(level)
    assert path is not None, f"the wheel has no kernels for {level.value}"
    kernels = native.CpuKernels(path)
    x, weight = torch.rand(7, 192).bfloat16() - 0.5, torch.rand(96, 192).bfloat16() - 0.5
    found = kernels.linear_float(x, kernels.pack_float(weight.clone()), 96, None)
    torch.testing.assert_close(found.float(), x.float() @ weight.float().T, atol=0.02, rtol=0.02)
    found = kernels.silu_mul(x, x)
    torch.testing.assert_close(found, torch.nn.functional.silu(x) * x, atol=1e-3, rtol=2**-7)


def main():
    levels = native.cpu_levels()
    for level in levels:
        check(level)
    print(f"{mmdeploy_llm.__file__}: {', '.join(level.value for level in levels)}")


if __name__ == "__main__":
    sys.exit(main())
