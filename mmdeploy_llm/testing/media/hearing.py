"""Checks of a processor of sounds: that it resamples, and computes features without joints.

They need no reference: one sound is given at several rates, and one that repeats itself must have
features that do so too.

    sound     |~~^~|~~^~|~~^~|~~^~|      features   abcd abcd abcd abcd
    chunks    |------|------|------      of chunks  abcd abXd abcX Xbcd
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.hooks import MediaInput
from mmdeploy_llm.testing.models.base import Check, CheckSkipped, demand, since

from . import equal
from .samples.sounds import RATE, Wave, wav_bytes
from .subject import ProcessorSubject
from .truth import GIVE_YOUR_OWN, MediaTruth

# Seconds after which a sound repeats itself: many hops of all usual ones, and no number of chunks
# of a usual length.
PERIOD = 3.68
PERIODS = (19, 7, 4, 1)  # of a sound, the first number that the processor takes
FEW = 2
LOUDNESS = 0.005  # with what is above, so that nothing is cut off
LOW, HIGH = 40.0, 0.4  # Hz; of the rate: between which the sound is
ABOVE = (0.6, 1.2)  # of the rate: what resampling must leave out
MOST_APART = 0.2  # of the mean deviation of features: by which resampled ones may differ
MOST_JOINT = 0.03  # of their standard deviation: by which those of one frame may differ


@since(1, 2)
def sounds_are_resampled(subject: ProcessorSubject) -> None:
    """A sound at another rate has the features and tokens that it has at the processor's own."""
    rate, is_known = _rate(subject)
    num_periods, first = _first(subject, rate, PERIODS[1:])
    kept = _features(first)
    for times in (2, 3):
        above = ABOVE if times == 3 and is_known else None  # else some of it may be heard
        source = wav_bytes(steady(num_periods, rate, times, above), rate=times * rate)
        what = f"a sound of {num_periods * PERIOD:.2f} s at {times * rate} Hz"
        made = subject.run_source(what, source)
        own = f"{made.num_tokens} tokens and features of shape {tuple(_features(made).shape)}"
        demand(
            abs(made.num_tokens - first.num_tokens) <= 1 + first.num_tokens // 50,
            f"{what} has {own}, at {rate} Hz {first.num_tokens} and {tuple(kept.shape)}; resample "
            "what comes at another rate",
        )
        apart = _apart(kept, _features(made))
        demand(
            apart <= MOST_APART,
            f"{what} has other features than at {rate} Hz, apart by {apart:.2f} of their mean "
            "deviation; resample what comes at another rate, with a filter that leaves out what is "
            "above half the new one",
        )


@since(1, 2)
def features_have_no_joints(subject: ProcessorSubject) -> None:
    """The features of a long sound are those of the whole, not of chunks that are put together."""
    rate, _ = _rate(subject)
    num_periods, made = _first(subject, rate, PERIODS)
    what = f"a sound of {num_periods * PERIOD:.2f} s"
    truth = _truth(subject, wav_bytes(steady(num_periods, rate), rate=rate), made)
    if truth is not None:
        equal.demand_same_tensors(subject, what, made, truth)
        return
    _demand_periodic(subject, what, num_periods, rate, 1)
    _demand_periodic(subject, f"{what} at {2 * rate} Hz", num_periods, rate, 2)


def _truth(subject: ProcessorSubject, source: bytes, made: MediaInput) -> MediaTruth | None:
    """Returns what the reference makes of a sound; None where there is none, and where it fills
    sounds to another length."""
    try:
        markers = (*subject.processor.markers, subject.processor.token)
        truth = subject.reference(source, {}, markers)
    except CheckSkipped:
        return None
    own = {name: it for name, it in truth.tensors.items() if name in made.tensors}
    is_alike = all(it.shape == made.tensors[name].shape for name, it in own.items())
    return truth if own and is_alike else None


def steady(
    num_periods: int, rate: int, times: int = 1, above: tuple[float, float] | None = None
) -> Wave:
    """Returns a noise that repeats itself after each PERIOD and is loud and low within it, at
    `times` a rate. above: shares of the rate between which there is more noise."""
    rng, count = np.random.default_rng(12), round(PERIOD * rate) * times
    heights = np.arange(count // 2 + 1) / PERIOD
    spectrum = np.zeros(len(heights), np.complex128)
    bands = [(LOW, HIGH * rate, 1.0)]
    if above is not None:
        bands.append((above[0] * rate, above[1] * rate, 9.0))
    for low, high, loudness in bands:
        band = np.flatnonzero((heights >= low) & (heights <= high))
        phases = rng.uniform(0, 2 * np.pi, len(band))
        spectrum[band] = loudness * np.exp(1j * phases) / np.sqrt(heights[band])
    time = np.arange(count) / count
    values = np.fft.irfft(spectrum, count) * count * (0.1 + np.sin(np.pi * time) ** 2)
    return np.tile(values * LOUDNESS, num_periods).clip(-1, 1).astype(np.float32)


def _rate(subject: ProcessorSubject) -> tuple[int, bool]:
    """Returns the rate at which the processor hears, and whether the checkpoint says it. Raises
    CheckSkipped for one of anything but sounds."""
    is_wave = any(blob[8:12] == b"WAVE" for blob in subject.encoded().values())
    if subject.spec.kind != "audio" and not is_wave:
        raise CheckSkipped("its items are no sounds: nothing to add")
    given = subject.checkpoint.preprocessor.get("sampling_rate")
    return (given, True) if isinstance(given, int) and given > 0 else (RATE, False)


def _first(subject: ProcessorSubject, rate: int, numbers: Sequence[int]) -> tuple[int, MediaInput]:
    """Returns the first sound that the processor takes, of these numbers of periods: its own, and
    what is made of it. Raises CheckSkipped where it takes none."""
    reason: MediaError | None = None
    for num_periods in numbers:
        source = wav_bytes(steady(num_periods, rate), rate=rate)
        try:
            item = subject.processor.decode(source, subject.limits)
            return num_periods, subject.processor.process(item, {})
        except MediaError as error:
            reason = error
    raise CheckSkipped(f"it takes no WAV files of {rate} Hz and such lengths: {reason}")


def _features(made: MediaInput) -> torch.Tensor:
    """Returns the largest tensor of floats. Raises CheckSkipped without one."""
    found = equal.largest(made.tensors)
    if found is None:
        raise CheckSkipped("there is no tensor of floats to compare")
    return found.detach().float()


def _apart(one: torch.Tensor, two: torch.Tensor) -> float:
    """Returns by how much features differ, in their mean deviation; where one has a few frames
    more, these are left out."""
    if one.dim() != two.dim():
        return float("inf")
    for axis in range(one.dim()):
        least = min(one.shape[axis], two.shape[axis])
        if abs(one.shape[axis] - two.shape[axis]) > 4 + least // 50:
            return float("inf")
        one, two = one.narrow(axis, 0, least), two.narrow(axis, 0, least)
    return float((one - two).abs().mean() / (one - one.mean()).abs().mean().clamp(min=1e-9))


def _demand_periodic(
    subject: ProcessorSubject, what: str, num_periods: int, rate: int, times: int
) -> None:
    """Demands that the features of the periods of a sound equal each other, but for the first and
    the last one."""
    sources = (wav_bytes(steady(n, rate, times), rate=times * rate) for n in (num_periods, FEW))
    long, short = (_features(subject.run_source(what, source)) for source in sources)
    axes = [n for n in range(long.dim()) if long.shape[n] != short.shape[n]]
    more = num_periods - FEW
    is_one = more > 0 and long.dim() == short.dim() and len(axes) == 1
    frames = (long.shape[axes[0]] - short.shape[axes[0]]) if is_one else 0
    if frames <= 0 or frames % more or frames // more < 4:
        raise CheckSkipped(
            f"features of {num_periods * PERIOD:.2f} s have shape {tuple(long.shape)}, those of "
            f"{FEW * PERIOD:.2f} s {tuple(short.shape)}: no frames that repeat; {GIVE_YOUR_OWN}"
        )
    own = frames // more
    values = long.movedim(axes[0], 0).flatten(1)
    inner = values[own : own * (num_periods - 2)]
    after = values[own * 2 : own * (num_periods - 1)]
    apart = (inner - after).abs().mean(1) / inner.std().clamp(min=1e-9)
    place = int(apart.argmax())
    demand(
        float(apart[place]) <= MOST_JOINT,
        f"{what} that repeats itself has other features at {(place / own + 1) * PERIOD:.1f} s than "
        f"a period later, apart by {float(apart[place]):.2f} of their deviation: they are computed "
        "of chunks, which end there; read, resample and transform a sound as a whole",
    )


CHECKS: tuple[Check, ...] = (sounds_are_resampled, features_have_no_joints)
