"""Reads options of videos, and chooses frames by transformers' own rule."""

from __future__ import annotations

import copy
import difflib
import dis
import math
from collections.abc import Mapping, Sequence
from typing import Any

from transformers.video_utils import VideoMetadata

from mmdeploy_llm.errors import ConfigError, MediaError, MMDeployLLMError
from mmdeploy_llm.media import Timeline, constant_timeline

VIDEO_PREFIX = "video_"  # options of videos in mm_processor_kwargs
ALIASES = {"target_frames": "num_frames"}
COUNTS = ("num_frames", "min_frames", "max_frames", "max_num_frames")
RATES = ("fps", "max_fps")
SOURCE_RATE = "source_fps"
DEFAULT_RATE = 24.0  # frames per second of a list of frames
EITHER = frozenset({"fps", "num_frames"})  # one of them says how many frames
# Of a processor's call, and not an option of videos.
OF_CALL = frozenset(
    {"do_convert_rgb", "input_data_format", "data_format", "device"}
    | {"return_tensors", "return_metadata", "video_metadata", "disable_grouping"}
)
NOT_OF_RULE = frozenset({"do_convert_rgb", "do_sample_frames", "device"}) | {
    "input_data_format",
    "video_metadata",
}


class Sampling:
    """Chooses frames by the sample_frames method of a video processor of transformers.

    component: the video processor, whose fields are the defaults. given: options of the engine, of
    which those of the rule are kept. defaults: options that the processor around it passes to its
    video processor. Raises ConfigError for options that exclude each other.
    """

    def __init__(
        self, component: Any, given: Mapping[str, Any], defaults: Mapping[str, Any]
    ) -> None:
        self._component, self._defaults = component, defaults
        self._is_default = bool(component.do_sample_frames)
        self._names = names_of_rule(component)
        self._needs_both = self._asks_for_both()
        self._given = {
            name: value for name, value in given.items() if name in (*self._names, SOURCE_RATE)
        }
        self._check_given(self._given, ConfigError, "mm_processor_kwargs")

    def of_item(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the options of one video, those of the engine included. Raises MediaError for
        unknown names and wrong values."""
        known = with_aliases(self._names)
        check_names(options, (*known, SOURCE_RATE), MediaError, "the video", "")
        own = checked(options, MediaError, "the video", "")
        left = EITHER if EITHER & set(own) and not self._needs_both else frozenset()
        found = {name: value for name, value in self._given.items() if name not in left}
        self._check_given({**found, **own}, MediaError, "the video")
        return {**found, **own}

    def choose(
        self, timeline: Timeline, options: Mapping[str, Any], *, is_chosen: bool
    ) -> list[int]:
        """Returns the indices of the frames to use, ascending.

        options: from `of_item`. is_chosen: the caller gave a list of frames, which is used as it
        is where no option says otherwise. Raises MediaError where the rule has no answer.
        """
        given = {name: value for name, value in options.items() if name != SOURCE_RATE}
        if not given and (is_chosen or not self._is_default):
            return list(range(timeline.num_frames))
        try:
            found = self._by_rule(timeline, given)
        except (ValueError, TypeError, ArithmeticError, AttributeError) as error:
            raise MediaError(
                f"{self._name}.sample_frames cannot choose frames of a video of "
                f"{timeline.num_frames} frames and {timeline.duration:.2f} seconds with "
                f"{given or 'its own options'}: {error}"
            ) from error
        if not found or found != sorted(found) or found[0] < 0:
            raise MediaError(
                f"{self._name}.sample_frames chose the frames {found[:8]} of {timeline.num_frames};"
                " give other options"
            )
        return [min(index, timeline.num_frames - 1) for index in found]

    @property
    def _name(self) -> str:
        return f"transformers' {type(self._component).__name__}"

    def _check_given(
        self, given: Mapping[str, Any], error: type[MMDeployLLMError], where: str
    ) -> None:
        if set(given) >= EITHER and not self._needs_both:
            raise error(f"{where}: fps and num_frames of a video exclude each other; remove one")
        least, most = given.get("min_frames", 0), given.get("max_frames", math.inf)
        if least > most:
            raise error(f"{where}: min_frames = {least} is above max_frames = {most}; change one")

    def _asks_for_both(self) -> bool:
        """Whether the rule computes with fps and num_frames at once."""
        if not set(self._names) >= EITHER:
            return False
        rules = copy.copy(self._component)
        rules.fps, rules.num_frames = 1.0, None
        try:
            self._sampled(rules, constant_timeline(64, 64, 100, 10.0))
        except TypeError:
            return True
        return False

    def _by_rule(self, timeline: Timeline, given: Mapping[str, Any]) -> list[int]:
        """Calls the rule with the options as the fields of a processor. A rule for more frames than
        the video has is asked for all of them."""
        rules = copy.copy(self._component)
        for name, value in given.items():
            setattr(rules, name, value)
        for name in EITHER - set(given) if EITHER & set(given) and not self._needs_both else ():
            setattr(rules, name, None)
        least, most = (getattr(rules, name, None) for name in ("min_frames", "max_frames"))
        if least is not None and most is not None and least > most:  # the default gives way
            rules.min_frames = rules.max_frames = most if "max_frames" in given else least
        count = getattr(rules, "num_frames", None)
        try:
            return self._sampled(rules, timeline)
        except ValueError:
            if count is None or count <= timeline.num_frames:
                raise
        rules.num_frames = timeline.num_frames
        return self._sampled(rules, timeline)

    def _sampled(self, rules: Any, timeline: Timeline) -> list[int]:
        names = [name for name in rules.valid_kwargs.__annotations__ if name not in NOT_OF_RULE]
        own = {name: getattr(rules, name, None) for name in names}
        more = {name: value for name, value in self._defaults.items() if name in own}
        found = rules.sample_frames(metadata=metadata_of(timeline, None), **{**own, **more})
        return [int(index) for index in found]


def names_of_rule(component: Any) -> tuple[str, ...]:
    """Returns the options by which the rule of a video processor, or of its class, chooses."""
    read = _names_read(component.sample_frames)
    return tuple(name for name in (*RATES, *COUNTS) if name in read)


def with_aliases(names: Sequence[str]) -> tuple[str, ...]:
    """Returns names of options with our own names for them."""
    return (*names, *(alias for alias, name in ALIASES.items() if name in names))


def metadata_of(timeline: Timeline, indices: Sequence[int] | None) -> VideoMetadata:
    """Returns transformers' description of a video and of the frames that are used."""
    return VideoMetadata(
        total_num_frames=timeline.num_frames,
        fps=timeline.fps,
        width=timeline.width,
        height=timeline.height,
        duration=timeline.duration,
        frames_indices=None if indices is None else list(indices),
    )


def engine_options(component: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of all videos: those of mm_processor_kwargs whose names begin with
    "video_", which is cut off. Raises ConfigError for unknown names and wrong values."""
    given = {
        name.removeprefix(VIDEO_PREFIX): value
        for name, value in options.items()
        if name.startswith(VIDEO_PREFIX)
    }
    known = set(component.valid_kwargs.__annotations__) - OF_CALL - {*RATES, *COUNTS}
    known |= {*with_aliases(names_of_rule(component)), SOURCE_RATE}
    where = f"mm_processor_kwargs (transformers' {component.__name__})"
    check_names(given, sorted(known), ConfigError, where, VIDEO_PREFIX)
    return checked(given, ConfigError, where, VIDEO_PREFIX)


def check_names(
    given: Mapping[str, Any],
    known: Sequence[str],
    error: type[MMDeployLLMError],
    where: str,
    prefix: str,
) -> None:
    """Raises `error` for a name that is not known. prefix: of names where they are written."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            every = ", ".join(f"{prefix}{other}" for other in sorted(known))
            hint = f"did you mean {prefix + near[0]!r}?" if near else f"known: {every}"
            raise error(f"{where} has no video option {prefix + name!r}; {hint}")


def checked(
    given: Mapping[str, Any], error: type[MMDeployLLMError], where: str, prefix: str
) -> dict[str, Any]:
    """Returns the options by transformers' names; a rate or a number of frames of -1, which leaves
    the choice to the other, is left out. Raises `error` for wrong values."""
    found = {}
    for name, value in given.items():
        own = ALIASES.get(name, name)
        if own in EITHER and value == -1:
            continue
        if own in COUNTS and not (type(value) is int and value > 0):
            raise error(f"{where}: {prefix}{name} must be a whole number above 0, got {value!r}")
        if own in (*RATES, SOURCE_RATE) and not _is_rate(value):
            raise error(f"{where}: {prefix}{name} must be a number above 0, got {value!r}")
        if own in found:
            raise error(f"{where}: {prefix}{name} and {prefix}{own} are one option; remove one")
        found[own] = value
    return found


def _is_rate(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _names_read(method: Any) -> set[str]:
    """Returns the names that the code of a method reads: of arguments, variables, attributes."""
    found: set[str] = set()
    for step in dis.get_instructions(method):
        if step.opname.startswith("LOAD"):
            found.update(step.argval if isinstance(step.argval, tuple) else [step.argval])
    return {name for name in found if isinstance(name, str)}
