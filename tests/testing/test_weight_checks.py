"""The checks of weight formats pass on good formats, and find bugs that are planted in them."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mmdeploy_llm.hooks.files import load_file
from mmdeploy_llm.testing import WeightFormatConformance, check_plugin
from mmdeploy_llm.testing.models.base import CheckFailed, CheckSkipped
from mmdeploy_llm.testing.weights import products, reading
from mmdeploy_llm.testing.weights.subject import WeightFormatSubject
from mmdeploy_llm.weights.quantized import GroupedMatrix

FILE = Path(__file__).parents[2] / "examples" / "plugins" / "rows8.py"
CHECKS = {check.__name__: check for check in reading.CHECKS + products.CHECKS}
ROWS8 = load_file(FILE)
(SPEC,) = ROWS8.provide_weight_formats()


class TestRows8(WeightFormatConformance):
    spec = SPEC
    error = 0.01

    @staticmethod
    def reference(tensors, settings):
        codes = next(own for key, own in tensors.items() if key.endswith(".codes"))
        scales = next(own for key, own in tensors.items() if key.endswith(".row_scales"))
        name = next(iter(tensors)).rpartition(".")[0]
        return {f"{name}.weight": codes.float() * scales[:, None]}


def planted(**changes):
    """Returns the example's format with functions that are replaced."""

    def layers(settings, stored):
        made = list(changes.get("layers", ROWS8.layers)(settings, stored))
        if "decode" in changes:
            made = [replace(layer, decode=changes["decode"]) for layer in made]
        if "layer" in changes:
            made = [changes["layer"](layer) for layer in made]
        return made

    return layers


def matrix(codes, scales, group_size=None, **more):
    size = codes.shape[1] if group_size is None else group_size
    return GroupedMatrix(codes=codes, scales=scales, group_size=size, dtype=torch.float32, **more)


def wrong_zero(parts):
    """Rows are right, and few bits are not: the codes are shifted, but the layout knows no zero."""
    own = ROWS8.decode(parts)

    class Shifted(GroupedMatrix):
        def coded(self, layout):
            return replace(super().coded(layout), zeros=torch.zeros_like(own.scales).byte())

    return Shifted(
        codes=own.codes, scales=own.scales, group_size=own.group_size, dtype=torch.float32
    )


def from_zero(parts):
    """Rows count from the first one that is asked for."""
    weight = parts["codes"].float() * parts["scales"][:, None]

    class Rows:
        def rows(self, start, end):
            return weight[: end - start]

    return Rows()


KEPT = {}


def kept(parts):
    KEPT[parts["codes"].data_ptr()] = parts
    return ROWS8.decode(parts)


class Shared:
    """Decodes into one buffer for all."""

    buffer = None


def shared_buffer(parts):
    codes = parts["codes"]
    if Shared.buffer is None or Shared.buffer.shape != codes.shape:
        Shared.buffer = torch.empty(codes.shape)
    Shared.buffer.copy_(codes)

    class Rows:
        def rows(self, start, end):
            return Shared.buffer[start:end] * parts["scales"][start:end, None]

    return Rows()


def reads_all(settings, stored):
    for layer in ROWS8.layers(settings, stored):
        parts = {role: stored.read(key) for role, key in layer.parts.items()}
        yield replace(layer, decode=functools.partial(lambda own, _: ROWS8.decode(own), parts))


def unchecked(settings, stored):
    """Believes the shapes of the scales."""
    stored = _Believing(stored.entries, stored.files)
    yield from ROWS8.layers(settings, stored)


class _Believing(
    type(reading) and __import__("mmdeploy_llm.weights.quantized", fromlist=["x"]).Stored
):
    def check(self, key, shape, *dtypes):
        return self.entries[key]


def any_settings(settings, stored):
    known = {name: value for name, value in settings.items() if name in ("highest",)}
    yield from ROWS8.layers(known, stored)


def careless_settings(settings, stored):
    assert settings["highest"] <= 127
    yield from ROWS8.layers({"highest": 127}, stored)


def every_weight(settings, stored):
    """Takes for quantised whatever is called a weight."""
    yield from ROWS8.layers(settings, stored)
    for name in stored.names(".weight"):
        yield replace(
            next(iter(ROWS8.layers(settings, stored))),
            name=name,
            key=f"{name}.weight",
            parts={"codes": f"{name}.weight"},
            shape=stored.entries[f"{name}.weight"].shape,
            layout=None,
            decode=lambda parts: parts["codes"] * 2,
        )


PLANTS = {  # name -> (changes of the function, of the spec, check that finds it)
    "columns reversed": (
        {"decode": lambda parts: matrix(parts["codes"].flip(1), parts["scales"][:, None])},
        {},
        "round_trip_is_within_error",
    ),
    "scales of the row before": (
        {"decode": lambda parts: matrix(parts["codes"], parts["scales"].roll(1)[:, None])},
        {},
        "round_trip_is_within_error",
    ),
    "transposed": (
        {"layer": lambda own: replace(own, shape=own.shape[::-1], layout=None)},
        {},
        "round_trip_is_within_error",
    ),
    "one scale for all": (
        {
            "decode": lambda parts: matrix(
                parts["codes"], parts["scales"][:1, None].expand(len(parts["codes"]), 1)
            )
        },
        {},
        "every_tensor_matters",
    ),
    "zero forgotten in few bits": (
        {"decode": wrong_zero},
        {},
        "few_bits_equal_dequantised_weights",
    ),
    "rows count from zero": ({"decode": from_zero}, {}, "some_rows_equal_the_whole"),
    "decoded weights are kept": ({"decode": kept}, {}, "one_weight_at_a_time"),
    "all is read while listing": ({"layers": reads_all}, {}, "one_weight_at_a_time"),
    "one buffer for all threads": (
        {"decode": shared_buffer, "layer": lambda own: replace(own, layout=None)},
        {},
        "weights_share_nothing",
    ),
    "shapes are not checked": ({"layers": unchecked}, {}, "cut_tensors_are_refused"),
    "suffixes not listed": ({}, {"suffixes": (".row_codes",)}, "missing_tensors_are_named"),
    "unknown settings": ({"layers": any_settings}, {}, "unknown_settings_are_refused"),
    "settings not checked": ({"layers": careless_settings}, {}, "settings_are_checked"),
    "plain weights too": ({"layers": every_weight}, {}, "plain_weights_stay"),
    "a key of its own": (
        {"layer": lambda own: replace(own, key=own.name)},
        {},
        "round_trip_is_within_error",
    ),
}


@pytest.mark.one_is_quick
@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_bug_is_found(name, monkeypatch):
    changes, fields, check = PLANTS[name]
    KEPT.clear()
    monkeypatch.setitem(globals(), "_planted", planted(**changes))
    spec = replace(SPEC, factory=f"{__name__}:_planted", **fields)
    subject = WeightFormatSubject(
        spec=spec, quantise=ROWS8.quantise, error=0.01, shapes=((64, 64), (48, 80))
    )
    with pytest.raises(CheckFailed) as failure:
        CHECKS[check](subject)
    print(f"{name}: {check}: {failure.value}")


def test_a_format_without_samples_is_told_what_to_add():
    subject = WeightFormatSubject(spec=replace(SPEC, quantise=None))
    for check in CHECKS.values():
        with pytest.raises(CheckSkipped, match=r"give `(quantise|reference)`"):
            check(subject)


@pytest.mark.full
def test_plugins_check_runs_them():
    verdicts = [each for each in check_plugin(str(FILE)) if "rows8" in each.subject]
    assert {each.check for each in verdicts} == CHECKS.keys()
    assert [each.message for each in verdicts if each.outcome == "fail"] == []
    assert [each.check for each in verdicts if each.outcome == "skip"] == ["equals_the_reference"]


@pytest.mark.full
def test_plugins_check_of_the_built_in_formats_says_what_to_add():
    verdicts = [each for each in check_plugin("Quantized") if each.subject]
    assert {each.subject for each in verdicts} == {
        f"weight format {name}"
        for name in ("auto-round", "awq", "compressed-tensors", "fp8", "gptq", "mxfp4")
    }
    assert {each.outcome for each in verdicts} == {"skip"}
