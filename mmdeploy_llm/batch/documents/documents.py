"""Opens documents with the splitters of plugins: how many pages there are, their text and size."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from mmdeploy_llm.errors import ConfigError, MediaError
from mmdeploy_llm.hooks import KindTable, MediaLimits, MediaSplitter, PluginManager, SplitPart
from mmdeploy_llm.media import ImageDecoder
from mmdeploy_llm.media.loading.reader import media_limits
from mmdeploy_llm.messages import MediaRef
from mmdeploy_llm.values.closing import Closing
from mmdeploy_llm.values.options.config import EngineConfig

if TYPE_CHECKING:
    from mmdeploy_llm.engine.startup.model_files import ModelFiles

IMAGE, TURN = "image", "turn"


@runtime_checkable
class HasText(Protocol):
    """Parts of a document that have a text of their own."""

    def text(self, place: int) -> str:
        """Returns the text that the document itself holds for a part, "" for none."""


@runtime_checkable
class HasNotes(Protocol):
    """Parts of a document of which there is something to tell."""

    notes: Sequence[str]


class Documents(Closing):
    """Documents of all kinds that plugins split. Not thread-safe.

    splitters: by kind. The document that was opened last is kept.
    """

    def __init__(
        self,
        plugins: PluginManager,
        kinds: KindTable,
        splitters: Mapping[str, MediaSplitter],
        limits: MediaLimits,
    ) -> None:
        self._plugins, self.table, self._splitters = plugins, kinds, splitters
        self._limits = limits
        self._last: tuple[object, Sequence[SplitPart]] | None = None
        self._decoder = ImageDecoder()

    @classmethod
    def of(
        cls, files: ModelFiles, config: EngineConfig, yielded: Collection[str] = (IMAGE,)
    ) -> Documents:
        """Builds the splitters that a model's engine has, of kinds that yield one of `yielded`.
        Raises PluginError."""
        table, splitters = files.plugins.kinds, {}
        for kind, own in table.yields.items():
            spec = files.plugins.media_processor(kind, files.spec.name)
            if own in yielded and spec is not None:
                splitters[kind] = files.plugins.build_splitter(spec, files.checkpoint, {})
        return cls(files.plugins, table, splitters, media_limits(config))

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that are read: pictures, and those whose parts are pictures."""
        return (IMAGE, *self._splitters)

    @property
    def split_kinds(self) -> tuple[str, ...]:
        """The kinds of documents, of which plugins know the parts."""
        return tuple(self._splitters)

    def part_name(self, kind: str) -> str:
        """Returns what a part of such a document is called, such as "page"."""
        return self._splitters[kind].part_name

    def is_paged(self, kind: str) -> bool:
        """Returns whether a page of such a document can be asked for alone."""
        return kind in self._splitters and self._splitters[kind].range_option is not None

    def options(self, kind: str, index: int, options: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the options of an item that is one page. index: from 0."""
        name = self._splitters[kind].range_option
        own = self._own(kind, options)
        return {**({} if name is None else {name: str(index + 1)}), **own}

    def _own(self, kind: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the options that items of a kind take."""
        known = self._splitters[kind].drawing_options
        return {name: value for name, value in options.items() if name in known}

    def count(self, kind: str, path: str, options: Mapping[str, Any]) -> int:
        """Returns the number of pages of a document. Raises MediaError and its subclasses."""
        return len(self._opened(kind, path, options))

    def notes(self, kind: str, path: str, options: Mapping[str, Any]) -> Sequence[str]:
        """Returns what a reader should know of a document, such as a number of pages that is a lie.
        Raises MediaError and its subclasses."""
        pages = self._opened(kind, path, options)
        return pages.notes if isinstance(pages, HasNotes) else ()

    def size(self, kind: str, path: str, index: int, options: Mapping[str, Any]) -> tuple[int, int]:
        """Returns the pixels, width and height, at which a page is drawn. Raises MediaError and its
        subclasses."""
        width, height = getattr(self._opened(kind, path, options)[index].source, "size", (0, 0))
        return width, height

    def text(self, kind: str, path: str, index: int, options: Mapping[str, Any]) -> str:
        """Returns the text that a document itself holds for a page. Raises MediaError and its
        subclasses."""
        pages = self._opened(kind, path, options)
        return pages.text(index) if isinstance(pages, HasText) else ""

    def picture(
        self,
        kind: str,
        path: str,
        index: int | None,
        options: Mapping[str, Any],
        short_side: int | None = None,
    ) -> Any:
        """Returns a page as an RGB picture. index: None for a picture, which is one page.
        short_side: pixels of its shorter side at least, where fewer are enough; None: all. Raises
        MediaError and its subclasses."""
        if index is None:
            ref = MediaRef(kind=kind, uri=path)
            source: Any = self._plugins.fetch_media(ref, self._limits)
        else:
            source = self._opened(kind, path, options)[index].source

        def small(height: int, width: int) -> tuple[int, int]:
            scale = 1.0 if short_side is None else min(1.0, short_side / min(height, width))
            return max(1, round(height * scale)), max(1, round(width * scale))

        wanted = None if short_side is None else small
        return self._decoder.decode(source, self._limits, wanted, fit=wanted).image

    def can_turn(self, kind: str) -> bool:
        """Returns whether a page of such a document, or a picture, can be turned."""
        return kind == IMAGE or TURN in self._splitters[kind].drawing_options

    def whole_text(self, kind: str, path: str, options: Mapping[str, Any], most: int) -> str:
        """Returns the text of a document, page by page until it has more than `most` characters; ""
        for a file that is no document. Raises MediaError and its subclasses."""
        if kind not in self.split_kinds:
            return ""
        pages, found = self._opened(kind, path, options), ""
        if isinstance(pages, HasText):
            for index in range(len(pages)):
                text = pages.text(index)
                found += f"\n\n{text}" if found and text else text
                if len(found) > most:
                    break
        return found

    def close(self) -> None:
        """Ends the processes of the splitters."""
        self._decoder.close()
        for splitter in self._splitters.values():
            splitter.close()

    def _opened(self, kind: str, path: str, options: Mapping[str, Any]) -> Sequence[SplitPart]:
        key = (kind, path, repr(options))
        if self._last is None or self._last[0] != key:
            self._last = None  # two large documents are not held at once
            splitter = self._splitters[kind]
            source: Any = Path(path)
            if not splitter.wants_path:
                source = self._plugins.fetch_media(MediaRef(kind=kind, uri=path), self._limits)
            try:
                found = splitter.split(source, self._own(kind, options), self._limits)
            except (MediaError, ConfigError):
                raise
            except Exception as error:  # the plugin boundary
                raise MediaError(
                    f"the {kind} cannot be opened by {type(splitter).__name__} "
                    f"({type(error).__name__})"
                ) from error
            self._last = (key, found)
        return self._last[1]
