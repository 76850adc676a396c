"""ImageOptions: how images become patches. Read from the checkpoint's preprocessor_config.json and
overridden by mm_processor_kwargs, the engine's and then the prompt's."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from mmdeploy_llm.errors import CheckpointError, ConfigError, MediaError
from mmdeploy_llm.media import CLIP_MEAN as CLIP_MEAN
from mmdeploy_llm.media import CLIP_STD as CLIP_STD
from mmdeploy_llm.media import PatchOptions

# FastDeploy's names, and those of transformers that differ from ours.
ALIASES = {
    "image_min_pixels": "min_pixels",
    "image_max_pixels": "max_pixels",
    "image_fast_decode": "fast_decode",
    "spatial_conv_size": "merge_size",
}
# Accepted without an effect: every image is decoded to RGB; the temporal size concerns videos.
WITHOUT_EFFECT = frozenset({"do_convert_rgb", "temporal_conv_size"})
USERS_ONLY = frozenset({"fast_decode"})  # not read from a checkpoint's file
OF_BUDGET = frozenset({"max_tokens"})  # has no name in files and mm_processor_kwargs
ROUNDED = 4  # an area may grow by this when both sides are rounded up to whole patches
# One prompt or image can set these; `size` sets both.
OF_ITEMS = ("min_pixels", "max_pixels")
VIDEO_PREFIX = "video_"  # options of a video processor, which checks them


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOptions(PatchOptions):
    """Resolved options, with those of patches.

    min_pixels, max_pixels: bounds of the area after resizing.
    resample: Pillow's number of the filter.
    fast_decode: JPEG files (bytes, paths, URLs) are decoded at draft quality; sizes and token
        counts stay the same, pixel values differ slightly from the exact ones.
    max_tokens: of an image, where there is a budget: it holds for any shape, as max_pixels does
        not.
    given: names of options that the engine was given. A bound of the area that was not gives way to
        one that was.
    """

    min_pixels: int
    max_pixels: int
    merge_size: int = 2
    resample: int = 3
    do_resize: bool = True
    fast_decode: bool = False
    max_tokens: int | None = None
    given: frozenset[str] = field(default=frozenset(), repr=False, compare=False)


def resolve_options(
    default: ImageOptions,
    preprocessor: Mapping[str, Any],
    kwargs: Mapping[str, Any],
    vision_config: Any,
    *,
    reads_pixel_bounds: bool,
) -> ImageOptions:
    """Resolves the options: `default`, overridden by the checkpoint's file, then by the user's.

    reads_pixel_bounds: whether to read the file's `min_pixels` and `max_pixels`, or only its
    `size`. Raises CheckpointError for a wrong value in the file, and ConfigError for an unknown
    name or wrong value of the user's, or for patches that do not fit the vision tower.
    """
    names = [name for name in _NAMES if name not in USERS_ONLY]
    found = {name: preprocessor[name] for name in names if preprocessor.get(name) is not None}
    if not reads_pixel_bounds:
        found = {name: value for name, value in found.items() if not name.endswith("_pixels")}
    from_file = _checked({**_area(preprocessor.get("size")), **found}, CheckpointError, "file")
    given = _checked(_given(kwargs), ConfigError, "mm_processor_kwargs")
    options = replace(default, **{**from_file, **given}, given=frozenset(given))
    options = replace(options, **apart(options, "min_pixels", "max_pixels", given, ROUNDED))
    if options.min_pixels > options.max_pixels:
        raise ConfigError(
            f"min_pixels = {options.min_pixels} is above max_pixels = {options.max_pixels}; "
            "change one of them in mm_processor_kwargs"
        )
    if options.fast_decode and not options.do_resize:
        raise ConfigError(
            "fast_decode needs a size to resize to, but do_resize is off; remove one of the two"
        )
    _check_shape(options, vision_config)
    return options


def item_options(options: ImageOptions, given: Mapping[str, Any]) -> ImageOptions:
    """Resolves the options of one image. Raises MediaError for wrong names and values, and for more
    pixels than the engine allows, since it has measured the memory for these."""
    if not given:
        return options
    try:
        values = _checked(_given(given), ConfigError, "mm_processor_kwargs")
    except ConfigError as error:
        raise MediaError(str(error)) from error
    wrong = [name for name in given if name.startswith(VIDEO_PREFIX)]
    wrong += [name for name in values if name not in OF_ITEMS]
    if wrong:
        raise MediaError(
            f"one prompt or image cannot set {wrong[0]}, only {', '.join(OF_ITEMS)} and size; give "
            "it for all images, in LLM(mm_processor_kwargs=...)"
        )
    if options.fast_decode or not options.do_resize:
        raise MediaError(
            "images have one size for all prompts, because fast_decode is on or do_resize off in "
            f"LLM(mm_processor_kwargs=...); remove {', '.join(values)}"
        )
    found = replace(options, **values)
    fixed = {*values, *options.given, "max_pixels"}  # the engine's upper bound is a limit
    found = replace(found, **apart(found, "min_pixels", "max_pixels", fixed, ROUNDED))
    if found.max_pixels > options.max_pixels:
        raise MediaError(
            f"max_pixels = {found.max_pixels} is above the engine's {options.max_pixels}; raise it "
            "in LLM(mm_processor_kwargs=...)"
        )
    if found.min_pixels > found.max_pixels:
        raise MediaError(
            f"min_pixels = {found.min_pixels} is above max_pixels = {found.max_pixels}; change one "
            "of them in mm_processor_kwargs"
        )
    return found


def apart(
    options: Any, low: str, high: str, fixed: Collection[str], ratio: int = 1
) -> dict[str, Any]:
    """Returns another value for the one of two bounds that is not fixed, where they contradict, a
    `ratio` apart; {} where none is to change."""
    least, most = getattr(options, low), getattr(options, high)
    if least <= most or (low in fixed) == (high in fixed):
        return {}
    return {low: max(1, most // ratio)} if high in fixed else {high: least * ratio}


def normalisation(preprocessor: Mapping[str, Any]) -> dict[str, Any]:
    """Reads image_mean and image_std of a processor's file, as fields of ImageOptions.

    Raises CheckpointError for wrong values.
    """
    names = ("image_mean", "image_std")
    found = {name: preprocessor[name] for name in names if preprocessor.get(name) is not None}
    return _checked(found, CheckpointError, "file")


def _given(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the user's options under our names. Raises ConfigError for an unknown name, and for
    an option that is set twice."""
    values: dict[str, Any] = {}
    for name, value in kwargs.items():
        if name in WITHOUT_EFFECT or name.startswith(VIDEO_PREFIX):
            continue
        settings = _area(value) if name == "size" else {ALIASES.get(name, name): value}
        for own, setting in settings.items():
            if own not in (*_NAMES, "size"):
                raise ConfigError(_unknown(name))
            if own in values:
                raise ConfigError(
                    f"mm_processor_kwargs sets {own} twice, the second time by {name}"
                )
            values[own] = setting
    return values


def _unknown(name: str) -> str:
    known = sorted({*_NAMES, *ALIASES, *WITHOUT_EFFECT, "size"})
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    return f"mm_processor_kwargs has no image option {name!r}; {hint}"


def _area(size: Any) -> dict[str, Any]:
    """Reads transformers' `size`, whose edges are areas: {"shortest_edge": min_pixels, ...}."""
    if size is None:
        return {}
    names = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
    named: Mapping[str, Any] = size if isinstance(size, Mapping) else {}
    found: dict[str, Any] = {
        names.get(name, name): value for name, value in named.items() if value is not None
    }
    is_area = found and set(found) <= set(names.values())
    return found if is_area else {"size": size}  # has no rule, so `_checked` refuses it


def _checked(
    values: Mapping[str, Any], error: type[ConfigError] | type[CheckpointError], where: str
) -> dict[str, Any]:
    """Checks `values` and expands means and deviations to three channels.

    Raises `error` for a value of the wrong type or range.
    """
    source = "preprocessor_config.json" if where == "file" else where
    checked = {}
    for name, value in values.items():
        rule = _RULES.get(name)
        if rule is None or not rule.holds(value):
            wanted = (
                "{'shortest_edge': pixels, 'longest_edge': pixels}" if rule is None else rule.text
            )
            raise error(f"{source}: {name} must be {wanted}, got {value!r}")
        checked[name] = _three(value) if name in ("image_mean", "image_std") else value
    return checked


def _check_shape(options: ImageOptions, vision_config: Any) -> None:
    """Raises ConfigError for patches that the vision tower cannot read."""
    theirs = {
        "patch_size": getattr(vision_config, "patch_size", None),
        "merge_size": merge_size(vision_config),
    }
    for name, value in theirs.items():
        own = getattr(options, name)
        if isinstance(value, int) and own != value:
            raise ConfigError(
                f"image {name} = {own}, but the model's vision tower was made for {value}; "
                "remove the option"
            )


def merge_size(vision_config: Any) -> Any:
    """Returns the patches along a side of the block that becomes a token; None if the config does
    not say."""
    pooled = getattr(vision_config, "pooling_kernel_size", None)
    return getattr(vision_config, "spatial_merge_size", pooled)


def _three(value: Any) -> tuple[float, ...]:
    return (float(value),) * 3 if _is_number(value) else tuple(float(part) for part in value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_channels(value: Any) -> bool:
    if _is_number(value):
        return True
    return isinstance(value, (list, tuple)) and len(value) == 3 and all(map(_is_number, value))


def _is_deviation(value: Any) -> bool:
    return _is_channels(value) and 0 not in _three(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """A requirement of a value: a test, and a text for messages."""

    holds: Callable[[Any], bool]
    text: str


_COUNT = _Rule(holds=_is_count, text="a whole number above 0")
_FLAG = _Rule(holds=lambda value: isinstance(value, bool), text="True or False")
_FILTER = _Rule(
    holds=lambda value: isinstance(value, int) and value in range(6), text="a Pillow filter, 0 to 5"
)
_RULES = {
    "min_pixels": _COUNT,
    "max_pixels": _COUNT,
    "patch_size": _COUNT,
    "merge_size": _COUNT,
    "temporal_patch_size": _COUNT,
    "resample": _FILTER,
    "do_resize": _FLAG,
    "do_rescale": _FLAG,
    "rescale_factor": _Rule(holds=_is_number, text="a number"),
    "do_normalize": _FLAG,
    "image_mean": _Rule(holds=_is_channels, text="a number or three"),
    "fast_decode": _FLAG,
    "image_std": _Rule(holds=_is_deviation, text="a number or three, none of them 0"),
}
_NAMES = tuple(each.name for each in fields(ImageOptions) if each.name not in {*OF_BUDGET, "given"})
