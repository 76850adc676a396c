"""VideoOptions: which frames of a video are used, and at what size.

Resolved from the family's defaults, overridden by the checkpoint's video_preprocessor_config.json,
then by the engine's mm_processor_kwargs (`video_*`), then by the item's own options. What was not
given gives way to what was: only given values contradict each other.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any

from mmdeploy_llm.errors import CheckpointError, ConfigError, MediaError, MMDeployLLMError
from mmdeploy_llm_processors.image.options import ROUNDED, apart

PREFIX = "video_"  # marks video options in mm_processor_kwargs
_MOST_FRAMES = 4096  # to which a default bound gives way, as many as max_video_frames has
SAMPLE_MODES = ("leading", "middle", "rand")
# Names in transformers' files -> ours.
ALIASES = {"num_frames": "target_frames", "target_fps": "fps"}
# One item cannot set these, only a family or an engine.
ENGINE_ONLY = ("min_pixels", "max_pixels", "font")
_ITEM_ONLY = ("times",)


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoOptions:
    """Resolved options.

    fps: frames to use of each second; negative if target_frames sets their number.
    min_frames, max_frames: bounds of the number of frames.
    target_frames: number of frames to use; -1: fps decides.
    frames_sample: which frame of an interval to use.
    min_pixels, max_pixels: area of a frame after resizing, or in some families of all frames
        together.
    draw_on_frames: whether to write the time on each frame.
    font: name of a font file in the checkpoint.
    source_fps: frames per second of a list of frames or an array.
    times: seconds of each frame of a list or an array, ascending; (): source_fps says them.
    given: names of options that the engine or the video was given.
    """

    fps: float = 2.0
    min_frames: int = 16
    max_frames: int = 180
    target_frames: int = -1
    frames_sample: str = "leading"
    min_pixels: int
    max_pixels: int
    draw_on_frames: bool = True
    font: str = "Roboto-Regular.ttf"
    source_fps: float = 24.0
    times: tuple[float, ...] = ()
    given: frozenset[str] = field(default=frozenset(), repr=False, compare=False)


def engine_options(
    default: VideoOptions, checkpoint: Mapping[str, Any], kwargs: Mapping[str, Any]
) -> VideoOptions:
    """Resolves the options of all videos of an engine.

    checkpoint: the video processor's file; unknown names in it are ignored. Raises CheckpointError
    and ConfigError for wrong values, ConfigError for an unknown `video_*` name.
    """
    size = checkpoint.get("size") or {}
    found = {
        "min_pixels": size.get("shortest_edge"),
        "max_pixels": size.get("longest_edge"),
        **{ALIASES.get(name, name): value for name, value in checkpoint.items()},
    }
    known = {name: found[name] for name in NAMES if found.get(name) is not None}
    options = _with(default, _checked(known, CheckpointError, "the model's video options"))
    given = {
        ALIASES.get(name.removeprefix(PREFIX), name.removeprefix(PREFIX)): value
        for name, value in kwargs.items()
        if name.startswith(PREFIX)
    }
    names = tuple(name for name in NAMES if name not in _ITEM_ONLY)
    _check_names(given, names, ConfigError, "mm_processor_kwargs", PREFIX)
    checked = _checked(given, ConfigError, "mm_processor_kwargs", PREFIX)
    options = _given(options, checked, ConfigError)
    if options.min_frames > options.max_frames and {"min_frames", "max_frames"} & given.keys():
        raise ConfigError(
            f"video_min_frames = {options.min_frames} is above video_max_frames = "
            f"{options.max_frames}; change one of them in mm_processor_kwargs"
        )
    if options.min_pixels > options.max_pixels:
        raise ConfigError(
            f"video_min_pixels = {options.min_pixels} is above video_max_pixels = "
            f"{options.max_pixels}; change one of them in mm_processor_kwargs"
        )
    return options


def item_options(options: VideoOptions, given: Mapping[str, Any]) -> VideoOptions:
    """Resolves the options of one video. Raises MediaError for unknown names and wrong values."""
    named = {ALIASES.get(name, name): value for name, value in given.items()}
    allowed = tuple(name for name in NAMES if name not in ENGINE_ONLY)
    _check_names(named, allowed, MediaError, "the video", "")
    found = _given(options, _checked(named, MediaError, "the video"), MediaError)
    if found.min_frames > found.max_frames and {"min_frames", "max_frames"} & named.keys():
        raise MediaError(
            f"min_frames = {found.min_frames} must not be larger than max_frames = "
            f"{found.max_frames}"
        )
    return found


def _given(
    options: VideoOptions, values: Mapping[str, Any], error: type[MMDeployLLMError]
) -> VideoOptions:
    """Returns options with the values that a caller gives. Raises `error` for both of fps and
    target_frames."""
    fps, target = values.get("fps", -1), values.get("target_frames", -1)
    if fps >= 0 and target > 0:
        raise error(
            f"fps must be negative if target_frames is given: fps is {fps:g}; give fps=-1 with "
            f"target_frames={target}, or one of the two"
        )
    return _with(replace(options, given=options.given | values.keys()), values)


def _with(options: VideoOptions, values: Mapping[str, Any]) -> VideoOptions:
    """Returns options with other values, to which those that were not given give way."""
    found = replace(options, **values)
    if values.get("target_frames", -1) > 0 and "fps" not in values:
        found = replace(found, fps=-1.0)
    if values.get("fps", -1) > 0 and "target_frames" not in values:
        found = replace(found, target_frames=-1)
    fixed = options.given or values.keys()
    pairs = [("min_frames", "max_frames")]
    if found.target_frames > 0:
        pairs += [("min_frames", "target_frames"), ("target_frames", "max_frames")]
    for low, high in pairs:
        if getattr(found, low) <= _MOST_FRAMES:
            found = replace(found, **apart(found, low, high, fixed))
    return replace(found, **apart(found, "min_pixels", "max_pixels", fixed, ROUNDED))


def _check_names(
    given: Mapping[str, Any],
    allowed: tuple[str, ...],
    error: type[MMDeployLLMError],
    where: str,
    prefix: str,
) -> None:
    for name in given:
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, n=1)
            known = ", ".join(prefix + other for other in sorted(allowed))
            hint = f"did you mean {prefix + near[0]!r}?" if near else f"known: {known}"
            raise error(f"{where} has no video option {prefix + name!r}; {hint}")


def _checked(
    values: Mapping[str, Any], error: type[MMDeployLLMError], where: str, prefix: str = ""
) -> dict[str, Any]:
    for name, value in values.items():
        rule = RULES[name]
        if not rule.holds(value):
            raise error(f"{where}: {prefix}{name} must be {rule.text}, got {value!r}")
    return {
        name: tuple(map(float, value)) if name == "times" else value
        for name, value in values.items()
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value


def _are_times(value: Any) -> bool:
    """Whether these are seconds that ascend."""
    if not isinstance(value, (list, tuple)) or not all(map(_is_number, value)):
        return False
    return all(0 <= before < after < 1e9 for before, after in pairwise(value)) and (
        len(value) != 1 or 0 <= value[0] < 1e9
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """A requirement of a value: a test, and a text for messages."""

    holds: Callable[[Any], bool]
    text: str


_COUNT = _Rule(holds=_is_count, text="a whole number above 0")
RULES = {
    "fps": _Rule(holds=_is_number, text="a number (negative: target_frames decides)"),
    "min_frames": _COUNT,
    "max_frames": _COUNT,
    "target_frames": _Rule(
        holds=lambda value: value == -1 or _is_count(value), text="a whole number above 0, or -1"
    ),
    "frames_sample": _Rule(
        holds=lambda value: value in SAMPLE_MODES, text=f"one of {', '.join(SAMPLE_MODES)}"
    ),
    "min_pixels": _COUNT,
    "max_pixels": _COUNT,
    "draw_on_frames": _Rule(holds=lambda value: isinstance(value, bool), text="True or False"),
    "font": _Rule(
        holds=lambda value: isinstance(value, str) and bool(value), text="the name of a font file"
    ),
    "source_fps": _Rule(
        holds=lambda value: _is_number(value) and 0 < value < 1e6, text="a number above 0"
    ),
    "times": _Rule(holds=_are_times, text="a list of seconds, of 0 or more, that ascend"),
}
NAMES = tuple(each.name for each in fields(VideoOptions) if each.name != "given")
