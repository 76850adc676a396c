"""Corrects errors of Triton's interpreter and runs it in a fraction of its time."""

import sys
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, wraps
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle


@contextmanager
def mended():
    """Patches the language once: the interpreter does so for each launch and each call between
    functions, which takes a third of its time. Half of the rest goes into values that nobody looks
    at: every sum of integers is computed again in 64 bits for a check that only `debug` makes, and
    every value describes its shape anew."""
    with pytest.MonkeyPatch.context() as patch:
        rewriter, options = interpreter.FunctionRewriter, interpreter.interpreter_builder.options
        patch.setattr(rewriter, "_compile_and_exec", with_probes(rewriter._compile_and_exec))
        options = replace(options, sanitize_overflow=False)
        patch.setattr(interpreter.interpreter_builder, "options", options)
        patch.setattr(interpreter, "_get_np_dtype", by_scalar(interpreter._get_np_dtype))
        patch.setattr(tl.block_type, "__init__", with_known_shapes(tl.block_type.__init__))
        patch.setattr(tl.tensor, "__init__", with_known_types(tl.tensor.__init__))
        patch.setattr(interpreter, "_patch_lang_tensor", with_index(interpreter._patch_lang_tensor))
        builder = interpreter.InterpreterBuilder
        patch.setattr(builder, "binary_op", with_int1(in_silence(builder.binary_op)))
        patch.setattr(builder, "create_dot", with_bfloat16(builder.create_dot))
        patch.setattr(interpreter, "_convert_float", with_rounding(interpreter._convert_float))
        sees_all = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
        scope = interpreter._patch_lang(sees_all)
        patch.setattr(interpreter, "_patch_lang", lambda fn: interpreter._LangPatchScope())
        yield
    scope.restore()


def with_probes(compile_and_exec):
    """The interpreter compiles the code of a kernel anew, in which coverage finds no line."""
    counter = sys.modules.get("tests.line_coverage")

    def mended(rewriter, transformed):
        made = compile_and_exec(rewriter, transformed)
        if counter is not None and counter.MATCHER.matches(rewriter.filename):
            made.__code__ = counter.LINES.probes.instrument(made.__code__)
        return made

    return mended


def by_scalar(get_np_dtype):
    """The dtype of a block is that of its values, which is looked up once."""
    of_scalar = cache(get_np_dtype)

    def found(tt_dtype):
        scalar = tt_dtype.scalar
        return get_np_dtype(scalar) if scalar.is_ptr() else of_scalar(scalar)

    return found


def with_known_shapes(describe):
    """A type of blocks is its elements' type and its shape; each is described once."""
    known = {}

    @wraps(describe)
    def init(self, element_ty, shape):
        key = str(element_ty), *(getattr(size, "value", size) for size in shape)
        if key not in known:
            describe(self, element_ty, shape)
            known[key] = {**vars(self)}
        vars(self).update(known[key], element_ty=element_ty)

    return init


def with_known_types(describe):
    """So is a tensor by its type."""
    known = {}

    @wraps(describe)
    def init(self, handle, type):
        key = str(type)
        if key not in known:
            describe(self, handle, type)
            known[key] = {**vars(self)}
        vars(self).update(known[key], handle=handle, type=type, dtype=type.scalar)

    return init


def with_index(patch_tensor):
    """Scalars are arrays of one value in the interpreter, which numpy 2.4 does not accept as an
    index."""

    def mended(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return mended


def in_silence(binary_op):
    """numpy warns of 0 / 0 and of infinity less infinity, for which a GPU returns NaN."""

    def mended(builder, lhs, rhs, op):
        with np.errstate(divide="ignore", invalid="ignore"):
            return binary_op(builder, lhs, rhs, op)

    return mended


def with_int1(binary_op):
    """A comparison returns booleans under the dtype of its operands, which become integers where a
    scalar is spread over a block; loads and stores of Triton 3.9 refuse such a mask."""

    def mended(builder, lhs, rhs, op):
        found = binary_op(builder, lhs, rhs, op)
        if found.data.dtype == np.bool_:
            found.dtype = tl.int1
        return found

    return mended


def with_bfloat16(create_dot):
    """The interpreter multiplies the bits of bfloat16 as if they were integers."""

    def mended(builder, a, b, d, *rest):
        return create_dot(builder, _as_float32(a), _as_float32(b), d, *rest)

    return mended


def with_rounding(convert_float):
    """The interpreter truncates to bfloat16, and forgets the carry when rounding to 8 bits reaches
    the next power of two."""
    targets = {
        "bf16": (torch.bfloat16, torch.uint16),
        "fp8e4nv": (torch.float8_e4m3fn, torch.uint8),
    }

    def mended(source, source_type, target_type, rounding):
        if str(source_type) != "fp32" or str(target_type) not in targets:
            return convert_float(source, source_type, target_type, rounding)
        dtype, bits = targets[str(target_type)]
        return torch.from_numpy(source.copy()).to(dtype).view(bits).numpy()

    return mended


def _as_float32(handle):
    if handle.dtype.scalar is not tl.bfloat16:
        return handle
    bits = handle.data.astype(np.uint32) << 16
    return TensorHandle(bits.view(np.float32), tl.float32)
