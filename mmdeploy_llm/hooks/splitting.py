"""MediaSplitter: divides an item of one kind into items of another, such as a PDF into pages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from .contracts import MediaLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPart:
    """One part of an item that was split.

    source: anything that a processor of the yielded kind decodes: encoded bytes, or a loaded object
        such as a PIL image or an array.
    options: of this part, for that processor.
    label: names the part in messages, such as "page 3".
    """

    source: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""


class MediaSplitter(ABC):
    """Splits items of one kind into items of the kind that its spec's `yields` names. One instance
    per engine, called from several threads at once.

    markers: texts that represent one whole item in a rendered prompt; each becomes the first marker
        of the yielded kind, once for every part.
    """

    kind: ClassVar[str]
    markers: tuple[str, ...] = ()

    @abstractmethod
    def split(
        self, source: Any, options: Mapping[str, Any], limits: MediaLimits
    ) -> Sequence[SplitPart]:
        """Returns the parts of encoded bytes or a loaded object, in order, as a lazy sequence:
        `len()` reads no more than the item's directory, and `[i]` makes a part when it is needed.

        options: the item's own, such as {"pages": "1-5"}; the splitter refuses those that it does
        not know. Raises MediaError and its subclasses, here and where a part is made.

        A sequence with a method `outline(i)` also returns a part of the same size whose content is
        not made, such as a blank picture: tokens are counted with it.
        """

    def close(self) -> None:  # noqa: B027 - optional to override
        """Called when the engine is closed: release processes and files."""
