"""Kernels: the operations of layers, in plain torch and compiled.

    base.py       Kernels: each operation in plain torch, the reference, and what it computes
    cpu/          CpuKernels overrides it with C++, whose sources are in cpp/
    cuda/         CudaKernels overrides it with Triton

A layer calls its `kernels`, whatever they are: an override whose kernel does not take the tensors
hands them on to the base class. A new operation is a method of Kernels, with its docstring and its
plain torch. On the CPU it is an override, a C++ function, and a struct of its arguments in
cpp/layers/calls.h, which cpu/calls.py reads: their names and types stand nowhere else.

What overrides what (tests/test_kernels.py):

                            CPU   CUDA
    takes                   x     x
    look_up                 x     -
    replace_id              x     -
    angles                  x     -
    activate                x     -
    gated_mul               x     -
    silu_mul                x     x
    clamped_mul             x     -
    softcap                 x     -
    scale                   x     -
    add_rows                x     -
    gate_heads              x     -
    widen                   x     -
    rms_norm                x     x
    layer_norm              x     -
    norm_heads              x     -
    normed_heads            x     -
    add_norm                x     -
    rotate                  x     x
    mix_heads               x     -
    norm_and_rotate         x     x
    norm_and_rotate_apart   x     -
    choose                  x     x
    can_run_experts         -     x
    run_experts             -     x
    mixture                 x     -
    can_convolve            x     -
    short_conv              x     -
    can_delta               x     -
    gated_delta             x     -
    can_mamba2              x     -
    mamba2                  x     -
    low_rank_table          x     x
    can_draw                x     -
    first_largest           x     -
    draw                    x     -
    place_threads           x     -
    can_pack                x     x
    pack                    x     x
    can_pack_coded          x     x
    pack_coded              x     x
    record                  x     -
"""

from .base import TORCH, DrawRules, Kernels, PackedWeight, Quantization
from .mixtures import Gates, RouteRule
from .plain import ActivationName

__all__ = [
    "TORCH",
    "ActivationName",
    "DrawRules",
    "Gates",
    "Kernels",
    "PackedWeight",
    "Quantization",
    "RouteRule",
]
