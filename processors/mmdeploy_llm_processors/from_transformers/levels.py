"""Bounds the tokens of an image by the options of transformers' image processors."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from mmdeploy_llm_processors.image.budget import too_few
from mmdeploy_llm_processors.sized.pictures import falling

Fields = Mapping[str, Any]
SOFT_TOKENS = (1120, 560, 280, 140, 70)
BOUNDS = frozenset(
    {"size", "max_pixels", "max_patches", "max_slice_nums", "max_image_size", "max_soft_tokens"}
    | {"max_image_tokens", "image_grid_pinpoints"}
)
# Switches that make several parts of an image.
SPLITS = ("do_image_splitting", "split_image", "do_pan_and_scan", "crop_to_patches", "slice_mode")


def levels_of(
    fields: Fields, tokens: int, given: Collection[str], *, may_raise: bool
) -> list[Fields]:
    """Returns options of an image processor that bound the tokens of an image, those with the most
    tokens first.

    fields: all of the processor. given: names of the user's own, which are not raised. Raises
    ConfigError for fewer tokens than the family knows.
    """
    found = [
        *_areas(fields, tokens, may_raise=may_raise and not {"size", "max_pixels"} & set(given))
    ]
    found += _counts(fields)
    if fields.get("max_soft_tokens"):
        most = tokens if may_raise and "max_soft_tokens" not in given else fields["max_soft_tokens"]
        known = [{"max_soft_tokens": n} for n in SOFT_TOKENS if n <= min(most, tokens)]
        if not known:
            raise too_few(tokens, SOFT_TOKENS[-1], "the smallest budget that this model knows")
        found += known
    if fields.get("max_image_tokens"):
        least = min(fields.get("min_image_tokens") or 1, tokens)
        most = min(fields["max_image_tokens"], tokens)
        found += [{"max_image_tokens": most, "min_image_tokens": least}]
    whole = {name: False for name in SPLITS if fields.get(name)}
    return [*(found or [{}]), *([whole] if whole else [])]


def _areas(fields: Fields, tokens: int, *, may_raise: bool) -> Iterator[Fields]:
    """Yields the bounds of processors whose `size` is an area."""
    size, patch, merge = fields.get("size"), fields.get("patch_size"), fields.get("merge_size")
    is_area = isinstance(size, Mapping) and {"shortest_edge", "longest_edge"} <= {
        name for name, value in size.items() if value
    }
    if not is_area or not isinstance(patch, int) or not isinstance(merge, int):
        return
    assert isinstance(size, Mapping)
    # Some count an image once for each frame of a patch; where one does not, the next level fits.
    for times in sorted({int(fields.get("temporal_patch_size") or 1), 1}, reverse=True):
        area = tokens * (patch * merge) ** 2 * times
        most = area if may_raise else min(area, int(size["longest_edge"]))
        least = min(int(size["shortest_edge"]), most)
        yield {"size": {"shortest_edge": least, "longest_edge": most}}
    if area <= int(size["shortest_edge"]):  # a small image, which is enlarged, may have too many
        yield {"size": {"shortest_edge": (patch * merge) ** 2, "longest_edge": most}}


def _counts(fields: Fields) -> Iterator[Fields]:
    """Yields the bounds of processors that cut an image into parts."""
    if "crop_to_patches" in fields and fields.get("max_patches"):  # on by default elsewhere too
        least = fields.get("min_patches") or 1
        for count in falling(int(fields["max_patches"])):
            yield {"max_patches": count, "min_patches": min(least, count)}
    if fields.get("slice_mode") and fields.get("max_slice_nums"):
        yield from ({"max_slice_nums": count} for count in falling(int(fields["max_slice_nums"])))
    if fields.get("do_image_splitting") and isinstance(fields.get("max_image_size"), Mapping):
        side = int(fields["max_image_size"]["longest_edge"])
        for count in range(-(-int(fields["size"]["longest_edge"]) // side), 0, -1):
            yield {"size": {"longest_edge": min(count * side, int(fields["size"]["longest_edge"]))}}
    pinpoints = fields.get("image_grid_pinpoints")
    if pinpoints:
        areas = sorted({height * width for height, width in pinpoints}, reverse=True)
        for area in areas:
            yield {"image_grid_pinpoints": [one for one in pinpoints if one[0] * one[1] <= area]}
