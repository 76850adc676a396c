"""Calls: the functions of the C++ library, each called with the fields of its arguments by name.

    cpp/layers/calls.h --read--> a ctypes structure of each call --> library.rms_norm(x=x, ...)

The header is the one list of calls: the C++ sources include it, and a field that is added there is
a field here.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable, Sequence
from ctypes import Structure, c_char_p, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .build import CALLS

HEADER = CALLS / "calls.h"
TYPES = {"int32_t": c_int32, "int64_t": c_int64, "float": c_float}
CALL = re.compile(r"^    CALL\((\w+), (\w+)\)", re.MULTILINE)
STRUCT = re.compile(r"^struct (\w+) \{\n(.*?)^\};", re.MULTILINE | re.DOTALL)
FIELD = re.compile(r"    (?:const )?(\w+)(\*?) (\w+); *(?://.*)?")
THREADS = "num_threads"  # the field that every call but one has
FOLLOWING = {"next_packed": None, "next_row_bytes": 0}  # fields that a recording fills in
# As calls.h numbers them. Two values of 4 bits are a uint8.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.uint8: 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One function of the library.

    pack: returns the bytes of its arguments for values of their fields by name, but for
        num_threads, which are as many as torch has, and for those that a recording fills in. A
        pointer is a tensor, None for none; a dtype is torch's.
    run: calls it with the same values, and returns these bytes.
    args: the structure of the arguments.
    address: of the function.
    """

    pack: Callable[..., bytes]
    run: Callable[..., bytes]
    args: type[Structure]
    address: int | None


class Calls:
    """The functions of a loaded library, each a method with its name without the prefix mm_."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.by_name = {
            name: _call(getattr(library, f"mm_{name}"), args) for name, args in structures().items()
        }
        for name, call in self.by_name.items():
            setattr(self, name, call.run)

    def __getattr__(self, name: str) -> Callable[..., bytes]:
        raise AttributeError(f"{HEADER.name} has no call {name!r}")


def _call(function: Any, args: type[Structure]) -> Call:
    """Makes a Call. Packing the values takes half the time of filling a structure in."""
    fields: Sequence[Any] = args._fields_
    forms = {name: _form(name, kind) for name, kind in fields}
    kinds = "".join(kind._type_ for _, kind in fields)
    packed = struct.Struct(f"@{kinds}0q")  # padded to whole words, as the structure is
    assert packed.size == ctypes.sizeof(args), args
    function.argtypes, function.restype = (c_char_p,), None
    unset = {name: value for name, value in FOLLOWING.items() if name in forms}
    has_threads = THREADS in forms

    def pack(**given: Any) -> bytes:
        given |= unset
        if has_threads:
            given[THREADS] = torch.get_num_threads()
        assert len(given) == len(forms), f"{args.__name__} has the fields {', '.join(forms)}"
        return packed.pack(*[form(given[name]) for name, form in forms.items()])

    def run(**given: Any) -> bytes:
        data = pack(**given)
        function(data)
        return data

    return Call(pack=pack, run=run, args=args, address=ctypes.cast(function, c_void_p).value)


def _form(name: str, kind: Any) -> Callable[[Any], Any]:
    """Returns the function that turns the value of a field into the number that is packed."""
    if kind is c_void_p:
        return _address
    if name.endswith("dtype"):
        return DTYPES.__getitem__
    return float if kind is c_float else int


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@cache
def structures() -> dict[str, type[Structure]]:
    """Returns the structure of each call, by the call's name, as calls.h has them."""
    text = HEADER.read_text(encoding="utf-8")
    bodies = dict(STRUCT.findall(text))
    return {name: _structure(args, bodies[args]) for name, args in CALL.findall(text)}


def _structure(name: str, body: str) -> type[Structure]:
    fields = []
    for line in body.splitlines():
        found = FIELD.fullmatch(line)
        assert found is not None, f"{HEADER.name}, {name}: {line!r} is no field"
        kind, pointer, field = found.groups()
        fields.append((field, c_void_p if pointer else TYPES[kind]))
    return type(name, (Structure,), {"_fields_": tuple(fields)})
