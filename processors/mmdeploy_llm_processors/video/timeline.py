"""Deprecated: the times of a video's frames moved to mmdeploy_llm.media."""

from typing import Any

from mmdeploy_llm.media.moved import moved

_HOMES = dict.fromkeys(
    ["UNKNOWN_RATE", "OpenVideo", "Timeline", "check_duration", "check_size", "constant_timeline"],
    "media.video.timeline",
)
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    return moved(__name__, _HOMES, name)
