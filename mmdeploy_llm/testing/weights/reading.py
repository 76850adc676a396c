"""Checks that a format reads what was quantised, and nothing else."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from mmdeploy_llm.testing.models.base import CheckFailed, CheckSkipped, attributed, demand
from mmdeploy_llm.weights.files import SafetensorsFile
from mmdeploy_llm.weights.quantized.reading import QuantizedFile

from .subject import (
    NAME,
    Sample,
    Tensors,
    WeightFormatSubject,
    distance,
    equal,
    random_weight,
    whole,
)

PLAIN_KEYS = ("model.norm.weight", "lm_head.weight", f"{NAME[:-7]}gate_proj.weight")
UNKNOWN = "not_a_setting_of_any_format"
NONSENSE: tuple[Any, ...] = ("nonsense", -7, [], {})
NUM_WEIGHTS = 4
LISTED_SHARE = 0.25  # of the bytes of a file that a format may read to know shapes
NUM_THREADS = 2  # that read weights


def round_trip_is_within_error(subject: WeightFormatSubject) -> str:
    """A weight that was quantised and read again is near to what it was, in every shape."""
    worst = 0.0
    for sample in subject.quantised_samples:
        found = subject.weights(sample)
        demand(
            sample.key in found,
            f"the weight of {', '.join(sample.tensors)} is read as {', '.join(found)}; give it the "
            f"key {sample.key}, under which models ask for it",
        )
        weight = found[sample.key]
        assert sample.weight is not None
        demand(
            weight.shape == sample.weight.shape,
            f"a weight {list(sample.weight.shape)} is read as {list(weight.shape)}; [out, in], "
            "without what fills the last word or group",
        )
        demand(weight.isfinite().all(), f"sample {sample.name}: values are not finite")
        error = distance(weight, sample.weight)
        demand(
            error <= subject.error,
            f"sample {sample.name}: the error is {error:.2g} of the weight's size, allowed: "
            f"{subject.error:.2g}; look at the order of codes, groups and zeros, or state a larger "
            "`error`",
        )
        worst = max(worst, error)
    left = [shape for shape in subject.shapes if not _has(subject, shape)]
    return f"largest error {worst:.2g}" + (f"; not for {left}" if left else "")


def _has(subject: WeightFormatSubject, shape: tuple[int, int]) -> bool:
    return any(s.weight is not None and s.weight.shape == shape for s in subject.quantised_samples)


def equals_the_reference(subject: WeightFormatSubject) -> None:
    """Dequantised weights equal those of the reference to the last bit."""
    if subject.reference is None:
        raise CheckSkipped(
            "give `reference`, which returns dequantised weights by key as the library that owns "
            "the format computes them"
        )
    for sample in subject.samples:
        wanted, found = subject.reference(sample.tensors, sample.settings), subject.weights(sample)
        demand(
            wanted.keys() == found.keys(),
            f"{sample.name}: the reference has {', '.join(wanted)}, the format {', '.join(found)}",
        )
        for key, weight in wanted.items():
            same = found[key].shape == weight.shape and torch.equal(
                found[key].float(), weight.float()
            )
            demand(
                same,
                f"sample {sample.name}: {key} differs from the reference"
                + (
                    f" by {distance(found[key], weight):.2g} of its size"
                    if found[key].shape == weight.shape
                    else f": {list(found[key].shape)} instead of {list(weight.shape)}"
                ),
            )


def plain_weights_stay(subject: WeightFormatSubject) -> None:
    """Weights in floats beside quantised ones are read as they are, and no tensor is left over."""
    sample = subject.sample
    plain = {key: torch.full((3, 2), float(n)) for n, key in enumerate(PLAIN_KEYS)}
    plain = {key: own for key, own in plain.items() if key not in sample.tensors}
    with attributed("reading plain weights beside quantised ones", "leave them as they are"):
        found = subject.read({**sample.tensors, **plain}, sample.settings)
    for key, own in plain.items():
        demand(
            key in found and equal(found[key], own),
            f"{key}, which is stored in floats, is read otherwise; find weights by the tensors "
            "that only quantised ones have",
        )
    if sample.weight is None:
        return
    left = sorted(found.keys() - plain.keys() - {sample.key})
    demand(
        not left,
        f"{', '.join(left)} would be given to the model, which knows no such parameter; name all "
        "tensors of a weight in `parts`, and what is not needed in the spec's `ignored`",
    )


def every_tensor_matters(subject: WeightFormatSubject) -> None:
    """A change of any tensor of a weight changes the weight, or is an error."""
    sample = subject.sample
    for key, own in _parts(subject, sample):
        for where, index in (("first", 0), ("last", -1)):
            if index and sample.weight is None:
                continue  # of a folder the last value may only fill a word
            tensors = {**sample.tensors, key: _changed(own, index)}
            demand(
                subject.outcome(tensors, sample.settings, sample) != "",
                f"a change of the {where} value of {key} changes nothing; decode with it, or name "
                "it in `ignored`",
            )


def _changed(own: Tensor, index: int) -> Tensor:
    """Returns a copy with another value at the index, in words another bit."""
    changed = own.clone()
    flat = changed.view(-1)
    if own.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        flat[index] = flat[index] * 2 + 1
    else:
        flat.view(torch.uint8)[index] ^= 1
    return changed


def missing_tensors_are_named(subject: WeightFormatSubject) -> None:
    """A weight without one of its tensors is a CheckpointError that names the tensor."""
    sample = subject.sample
    for key, _ in _parts(subject, sample):
        rest = {name: own for name, own in sample.tensors.items() if name != key}
        if not rest:
            continue  # another weight is then missing, which the model says
        said = subject.outcome(rest, sample.settings, sample)
        demand(
            said is not None,
            f"without {key} another weight is read, or none; list all suffixes in the spec's "
            "`suffixes`, and those that a weight must have in stored.parts",
        )
        demand(said == "" or key in str(said), f"the error without {key} does not name it: {said}")


def cut_tensors_are_refused(subject: WeightFormatSubject) -> None:
    """A tensor of another shape or dtype is a CheckpointError that names it, or the weight's shape
    is another one, which the model refuses."""
    sample = subject.sample
    shapes = {key: own.shape for key, own in subject.weights(sample).items()}
    for key, own in _parts(subject, sample):
        for what, changed in _damaged(own):
            tensors = {**sample.tensors, key: changed}
            said = subject.outcome(tensors, sample.settings, sample)
            if said is None:
                found = subject.read(tensors, sample.settings)
                is_same = all(found.get(name, own).shape == s for name, s in shapes.items())
                demand(
                    not is_same,
                    f"{key} {what} is read as a weight of other values; check each tensor with "
                    "stored.check(key, shape, dtypes)",
                )
                continue
            demand(said, f"{key} {what} is read as if nothing were wrong; check its shape")
            names = [name for name in sample.tensors if name in said]
            demand(names, f"the error for {key} {what} names no tensor of the weight: {said}")


def _damaged(own: Tensor) -> Iterator[tuple[str, Tensor]]:
    for axis, size in enumerate(own.shape):
        if size > 1:
            yield f"cut by one on axis {axis}", own.narrow(axis, 0, size - 1).contiguous()
    other = torch.int32 if own.is_floating_point() and own.dtype.itemsize > 1 else torch.float64
    yield f"in {str(other).removeprefix('torch.')}", own.float().to(other)


def settings_are_checked(subject: WeightFormatSubject) -> None:
    """Settings that mean nothing, or are missing, are a CheckpointError, or are not needed."""
    sample = subject.sample
    for key in sample.settings:
        if key == "quant_method":
            continue
        rest = {name: value for name, value in sample.settings.items() if name != key}
        for what, settings in (
            ("without it", rest),
            *((f"= {value!r}", {**rest, key: value}) for value in NONSENSE),
        ):
            try:
                said = subject.outcome(sample.tensors, settings, sample)
            except CheckFailed as failure:
                raise CheckFailed(f"quantization_config.{key} {what}: {failure}") from failure
            is_optional = settings is rest
            demand(
                said is not None or is_optional,
                f"quantization_config.{key} {what} is accepted, and other weights are read; check "
                "it with read_settings",
            )


def unknown_settings_are_refused(subject: WeightFormatSubject) -> None:
    """A setting that the format does not know is a CheckpointError that names it: it may mean that
    weights are read otherwise."""
    if subject.ignores_unknown_settings:
        raise CheckSkipped("ignores_unknown_settings: another program adds notes of its own")
    sample = subject.sample
    settings = {**sample.settings, UNKNOWN: 1}
    said = subject.outcome(sample.tensors, settings, sample)
    demand(
        said and UNKNOWN in said,
        f"quantization_config with {UNKNOWN!r} is accepted; derive the settings from "
        "WeightSettings and read them with read_settings, or set ignores_unknown_settings",
    )


def some_rows_equal_the_whole(subject: WeightFormatSubject) -> None:
    """Some rows of a weight, and the transposed weight, have the values of the whole one."""
    for sample in subject.samples:
        weights = subject.weights(sample)
        with subject.opened(sample.tensors, sample.settings) as files:
            for file, key in _keys(files):
                _compare_rows(file, key, weights[key])


def _compare_rows(file: QuantizedFile, key: str, weight: Tensor) -> None:
    n, row_size = weight.shape[0], weight[0].numel()
    for first, stop in {(0, 1), (n // 2, n), (n - 1, n), (n // 3, max(n // 3 + 1, n // 2))}:
        out = torch.empty((stop - first, *weight.shape[1:]), dtype=weight.dtype)
        file.read_into(key, out, first_value=first * row_size, transpose=False)
        demand(
            torch.equal(out, weight[first:stop]),
            f"{key}: rows {first} to {stop} are not those of the whole weight; `rows(start, end)` "
            "counts from the first row of the weight",
        )
    if weight.dim() == 2:
        out = torch.empty(weight.shape[::-1], dtype=weight.dtype)
        file.read_into(key, out, first_value=0, transpose=True)
        demand(torch.equal(out, weight.T), f"{key}: the transposed weight has other values")


def files_may_share_a_weight(subject: WeightFormatSubject) -> None:
    """The tensors of a weight may be in several files."""
    sample = subject.sample
    weights = subject.weights(sample)
    with attributed("reading a weight from two files", "take tensors from `stored` only"):
        found = subject.read(sample.tensors, sample.settings, num_files=min(2, len(sample.tensors)))
    for key, own in weights.items():
        demand(key in found and equal(found[key], own), f"{key} has other values from two files")


def weights_share_nothing(subject: WeightFormatSubject) -> None:
    """Weights that are decoded at the same time, and in two threads, as the engine has, have the
    values of those that are decoded alone."""
    tensors, settings, wanted = _several(subject)
    with (
        attributed("reading in two threads", "decode without state of your own"),
        subject.opened(tensors, settings) as files,
        ThreadPoolExecutor(NUM_THREADS) as pool,
    ):
        for key, made in {key: file.decoded(key) for file, key in _keys(files)}.items():
            demand(
                torch.equal(made.rows(0, len(wanted[key])), wanted[key]),
                f"{key} has other values when other weights are decoded before its rows are "
                "computed; keep no buffer between calls of `decode`",
            )
        pairs = list(_keys(files)) * 4
        found = list(pool.map(lambda pair: whole(*pair), pairs))
    for (_, key), own in zip(pairs, found, strict=True):
        demand(
            torch.equal(own, wanted[key]), f"{key} has other values when two threads read weights"
        )


def one_weight_at_a_time(subject: WeightFormatSubject) -> None:
    """Listing the weights reads a small part of the files, and no weight is kept after it was
    read."""
    tensors, settings, _ = _several(subject)
    log: list[tuple[int, Any]] = []

    class Counting(SafetensorsFile):
        def read_into(self, key: str, out: Tensor, **how: Any) -> None:
            super().read_into(key, out, **how)
            log.append((out.nbytes, weakref.ref(out)))

    total = sum(own.nbytes for own in tensors.values())
    with subject.opened(tensors, settings, file=Counting) as files:
        listed = sum(size for size, _ in log)
        demand(
            listed <= LISTED_SHARE * total,
            f"{listed} of {total} bytes are read to list the weights; `stored.entries` has the "
            "shapes, and `decode` gets the tensors",
        )
        small = total / NUM_WEIGHTS * LISTED_SHARE
        for file, key in _keys(files):
            whole(file, key)
            kept = _alive(log, small)
            if kept:  # perhaps in a circle; collecting takes a third of a second
                gc.collect()
                kept = _alive(log, small)
            demand(
                not kept,
                f"{kept} bytes of stored tensors are kept after {key} was read; `decode` keeps "
                "nothing, in no cache either",
            )


def _alive(log: list[tuple[int, Any]], small: float) -> int:
    return sum(size for size, ref in log if size > small and ref() is not None)


def _several(subject: WeightFormatSubject) -> tuple[Tensors, Any, Tensors]:
    """Returns the tensors of several weights, their settings, and the weights."""
    shapes = [s.weight.shape for s in subject.quantised_samples if s.weight is not None]
    shape = max(shapes, key=lambda own: own[0] * own[1])
    tensors: dict[str, Tensor] = {}
    settings: Any = {}
    for number in range(NUM_WEIGHTS):
        name = NAME.replace("0", str(number))
        sample = subject.quantised(random_weight((shape[0], shape[1]), number), name)
        assert sample is not None
        tensors |= sample.tensors
        settings = sample.settings
    every = Sample(name="several weights", tensors=tensors, settings=settings)
    wanted = subject.weights(every)
    demand(len(wanted) == NUM_WEIGHTS, f"of {NUM_WEIGHTS} weights {len(wanted)} are found")
    return tensors, settings, wanted


def _keys(files: Any) -> Iterator[tuple[QuantizedFile, str]]:
    found = (file for file in files if isinstance(file, QuantizedFile))
    return ((file, key) for file in found for key in file.entries)


def _parts(subject: WeightFormatSubject, sample: Sample) -> Iterator[tuple[str, Tensor]]:
    """Yields the stored tensors that belong to weights, of a folder those of its first weight."""
    ignored = subject.spec.ignored
    with subject.opened(sample.tensors, sample.settings) as files:
        found = [file.stored_keys(key) for file, key in _keys(files)]
    demand(found, f"of {', '.join(sample.tensors)} the format finds no weight")
    keys = list(sample.tensors) if sample.weight is not None else list(found[0])
    yield from ((key, sample.tensors[key]) for key in keys if not key.endswith(ignored or "\0"))


CHECKS = (
    round_trip_is_within_error,
    equals_the_reference,
    plain_weights_stay,
    every_tensor_matters,
    missing_tensors_are_named,
    cut_tensors_are_refused,
    settings_are_checked,
    unknown_settings_are_refused,
    some_rows_equal_the_whole,
    files_may_share_a_weight,
    weights_share_nothing,
    one_weight_at_a_time,
)
