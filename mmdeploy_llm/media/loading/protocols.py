"""Protocols of what processors may offer beyond their contract, looked for by their methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

from mmdeploy_llm.hooks import MediaLimits


@runtime_checkable
class HasDigest(Protocol):
    """Decoded media with a digest of their content: the cache is searched before processing."""

    digest: str


@runtime_checkable
class CanPeek(Protocol):
    """A processor that reads what `count_tokens` needs from headers, without a full decode."""

    def peek(self, source: Any, limits: MediaLimits) -> Any:
        """Returns what `count_tokens` accepts in place of a decoded item."""


@runtime_checkable
class CanPreview(Protocol):
    """A processor, or a maker of previews alone, that shows people a decoded item."""

    kind: ClassVar[str]

    def decode(self, source: Any, limits: MediaLimits) -> Any:
        """Returns what `previews` accepts."""

    def previews(self, item: Any, options: Mapping[str, Any]) -> Sequence[bytes]:
        """Returns small JPEGs, in order."""


@runtime_checkable
class KeepsTime(Protocol):
    """A processor with deadlines of its own, such as those of the processes it decodes in."""

    def max_seconds(self, limits: MediaLimits) -> float:
        """Returns the seconds that one call of its methods may take before it counts as hanging."""
