"""MediaSplitter: divides an item of one kind into items of another, such as a PDF into pages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

from .contracts import MediaLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPart:
    """One part of an item that was split.

    source: anything that a prompt may give as an item of the yielded kind: encoded bytes, a loaded
        object such as a PIL image or an array, or a path.
    options: of this part, for the processor of the yielded kind.
    label: names the part in messages, such as "page 3".
    """

    source: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""


@runtime_checkable
class CanLabel(Protocol):
    """Parts that have names before they are made."""

    def label(self, index: int) -> str:
        """Returns the name of part `index`, such as "page 3"."""


class MediaSplitter(ABC):
    """Splits items of one kind into items of the kind that its spec's `yields` names. One instance
    per engine, called from several threads at once.

    markers: texts that represent one whole item in a prompt; each becomes what represents the
        item's parts.
    part_name: what messages call a part, such as "page".
    range_option: the option of an item that chooses parts by numbers, such as "pages" for
        {"pages": "1-5"}; None: there is none.
    drawing_options: those of "dpi", "longest_side" and "password" that an item takes, which
        `mmdeploy-llm read` gives then.
    wants_path: whether `split` takes local files and folders by their path, a Path below
        `limits.allowed_root` that exists, instead of their bytes.
    """

    kind: ClassVar[str]
    markers: tuple[str, ...] = ()
    part_name: str = "part"
    range_option: str | None = None
    drawing_options: tuple[str, ...] = ()
    wants_path: bool = False

    @abstractmethod
    def split(
        self, source: Any, options: Mapping[str, Any], limits: MediaLimits
    ) -> Sequence[SplitPart]:
        """Returns the parts of encoded bytes or a loaded object, in order, as a lazy sequence:
        `len()` reads no more than the item's directory, and `[i]` makes a part when it is needed.
        It may also have the method of CanLabel. A source that is a Drawing of mmdeploy_llm.media is
        drawn only when a model is to see it, not when its tokens are counted.

        options: the item's own, such as {"pages": "1-5"}; raise MediaError for unknown ones. Those
        that begin with the yielded kind, such as "image_tokens", go to the parts instead. Raises
        MediaError and its subclasses, here and where a part is made.
        """

    def close(self) -> None:  # noqa: B027 - optional to override
        """Called when the engine is closed: release processes and files."""
