"""Deprecated: opening videos moved to mmdeploy_llm.media."""

from typing import Any

from mmdeploy_llm.media.moved import moved

_HOMES = dict.fromkeys(["IsolatedVideo", "open_video"], "media.video.opening")
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    return moved(__name__, _HOMES, name)
