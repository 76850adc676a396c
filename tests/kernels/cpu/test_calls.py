"""The list of calls in calls.h: Python and C++ read the same structures from it."""

import ctypes
import subprocess

import pytest
import torch

from mmdeploy_llm.kernels.cpu.calls import CALL, HEADER, STRUCT, structures
from mmdeploy_llm.kernels.cpu.recording import prefetch_next

from .test_build import compiler

PROGRAM = """
#include <cstddef>
#include <cstdio>
#include "calls.h"
#define SIZE(name, Args) std::printf("%s %zu\\n", #name, sizeof(mm::Args));
#define FIELD(Args, name) \\
    std::printf("%s.%s %zu %zu\\n", #Args, #name, offsetof(mm::Args, name), sizeof(mm::Args::name));
int main() {{
    MM_EACH_PRODUCT(SIZE) MM_EACH_SEQUENCE_CALL(SIZE) MM_EACH_LOW_RANK_CALL(SIZE)
    MM_EACH_EXPERT_CALL(SIZE) MM_EACH_OTHER_CALL(SIZE)
    {fields}
}}
"""


def test_both_sides_agree_on_sizes_and_offsets(tmp_path):
    found = structures()
    pairs = [(args, name) for args in found.values() for name, _ in args._fields_]
    fields = "\n    ".join(f"FIELD({args.__name__}, {name})" for args, name in pairs)
    source, program = tmp_path / "layout.cpp", tmp_path / "layout"
    source.write_text(PROGRAM.format(fields=fields))
    command = [compiler(), "-std=c++17", f"-I{HEADER.parent}", str(source), "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True)
    lines = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    expected = [f"{name} {ctypes.sizeof(args)}" for name, args in found.items()]
    for args, name in pairs:
        field = getattr(args, name)
        expected.append(f"{args.__name__}.{name} {field.offset} {field.size}")
    assert lines.splitlines() == expected


def test_every_structure_is_a_call():
    text = HEADER.read_text()
    calls = [args for _, args in CALL.findall(text)]
    assert sorted(calls) == sorted(name for name, _ in STRUCT.findall(text))
    assert len({*calls}) == len(calls) == text.count("\nstruct ")


def test_fields_are_given_by_name_and_all_of_them(kernels):
    x = torch.ones(1, 4)
    fields = {
        **dict.fromkeys(("gate", "up", "out"), x),
        **{"dtype": x.dtype, "kind": 3, "gate_stride": 4, "up_stride": 4, "rows": 1, "size": 4},
    }
    kernels._library.gated_mul(**fields)
    assert x.eq(torch.nn.functional.silu(torch.ones(()))).all()
    with pytest.raises(AssertionError, match="GatedMul has the fields dtype, kind, gate"):
        kernels._library.gated_mul(**fields, strides=4)
    del fields["size"]
    with pytest.raises(AssertionError, match="GatedMul has the fields"):
        kernels._library.gated_mul(**fields)
    with pytest.raises(KeyError, match="size"):
        kernels._library.gated_mul(**fields, sizes=4)
    with pytest.raises(AttributeError, match="no call 'silu'"):
        kernels._library.silu(**fields)


def test_products_are_told_the_weights_of_the_next():
    found = structures()
    first, second = (
        found["linear"](packed=1, row_bytes=2),
        found["linear_s8"](packed=3, row_bytes=4),
    )
    between, last = found["gated_mul"](), found["linear_codes"](packed=5, row_bytes=6)
    prefetch_next([first, between, second, last])
    assert (first.next_packed, first.next_row_bytes) == (3, 4)
    assert (second.next_packed, second.next_row_bytes) == (5, 6)
    assert (last.next_packed, last.next_row_bytes) == (None, 0)
