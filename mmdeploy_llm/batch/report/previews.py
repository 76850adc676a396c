"""Makes small previews of a record's media: a picture of an image, the sampled frames of a video,
a clip of a sound."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from mmdeploy_llm.data.outputs.base import Readable
from mmdeploy_llm.data.records.identity import digest_of, file_state
from mmdeploy_llm.data.records.item import Item, Media, kind_of_path
from mmdeploy_llm.data.records.media import media_in
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.errors import ABORTED, RequestError
from mmdeploy_llm.messages import MediaItem, MediaRef

if TYPE_CHECKING:
    from mmdeploy_llm.hooks import MediaLimits
    from mmdeploy_llm.media.loading.protocols import CanPreview

MAX_PARTS = 8  # of a document, such as pages, on a card
# Returns the JPEGs or MP3s of one media item, none without a preview.
MakePreviews = Callable[[Media], Sequence[bytes]]


class HasPreviews(Protocol):
    """The attributes of intake's MediaLoader that previews need."""

    @property
    def limits(self) -> MediaLimits:
        """The limits on one item."""

    def previews(self, item: MediaItem, maker: CanPreview | None = None) -> Sequence[bytes]:
        """Returns JPEGs of a media item, see MediaLoader.previews."""

    def split(self, items: Sequence[MediaItem]) -> list[tuple[MediaItem, ...]]:
        """Returns the parts of items, see MediaLoader.split."""


class FilePreviews:
    """Makes previews of media files. Files are read and decoded as those of prompts are: by the
    same plugins, within the same limits and deadlines. Thread-safe.

    open_reader: returns what reads images and sounds; called once, for the first of them.
    open_media: returns what knows what the model gets of other kinds, such as the frames of a
        video; called once too.
    """

    def __init__(
        self, open_reader: Callable[[], HasPreviews], open_media: Callable[[], HasPreviews]
    ) -> None:
        from mmdeploy_llm.media.image.thumbnail import Thumbnails
        from mmdeploy_llm.media.sound.clip import Clips

        makers: tuple[Any, ...] = (Thumbnails(), Clips())
        self._makers = {maker.kind: maker for maker in makers}
        self._open_reader, self._open_media = open_reader, open_media
        self._lock = threading.Lock()
        self._reader: HasPreviews | None = None
        self._media: HasPreviews | None = None

    @property
    def rules(self) -> str:
        """The limits as text: pictures made under other limits must not be used again."""
        return repr(self._for_any().limits)

    def __call__(self, media: Media) -> Sequence[bytes]:
        """Returns JPEGs; none of a file that the model would not get or that no longer exists."""
        if not media.is_file:
            return ()
        return self.of(media, MediaRef(kind=media.kind, uri=media.name))

    def of(self, media: Media, source: Any) -> Sequence[bytes]:
        """Returns JPEGs of a media item whose bytes are here; none where the model would not get
        it."""
        options = {} if media.pages is None else {"pages": media.pages}
        item = MediaItem(kind=media.kind, source=source, options=options)
        try:
            if media.kind in self._makers:
                return self._for_any().previews(item, self._makers[media.kind])
            return self._of_model(item)
        except RequestError:
            return ()

    def _of_model(self, item: MediaItem) -> tuple[bytes, ...]:
        """Returns previews of what the model gets of an item: of its first parts where it is split,
        such as the pages of a document."""
        loader = self._for_model()
        found: list[bytes] = []
        for part in loader.split([item])[0][:MAX_PARTS]:
            maker = self._makers.get(part.kind)
            found += loader.previews(part) if maker is None else loader.previews(part, maker)
        return tuple(found)

    def _for_any(self) -> HasPreviews:
        with self._lock:
            if self._reader is None:
                self._reader = self._open_reader()
            return self._reader

    def _for_model(self) -> HasPreviews:
        with self._lock:
            if self._media is None:
                self._media = self._open_media()
            return self._media


def bytes_of(item: Item) -> list[bytes | None]:
    """Returns the bytes of an item's media that its prompt holds, None for others, in the order of
    `item.media`."""
    found: list[bytes | None] = [
        bytes(value) if isinstance(value, (bytes, bytearray)) else None for value in media_in(item)
    ]
    return found if len(found) == len(item.media) else [None] * len(item.media)


def media_of(record: Record, roots: Collection[str] = ()) -> tuple[Media, ...]:
    """Returns the media of a record; for a record about a file, that file.

    roots: folders that ids are relative to. A path may be that of a run in another working folder:
    the file is the one that is as it was then, else what its path names here.
    """
    if record.path is None or record.media:
        return record.media
    here, own = os.path.abspath(record.path), str(record.id)
    places = (here, *(os.path.join(root, own) for root in roots))
    same = (place for place in places if digest_of(file_state(place)) == record.item_digest)
    name = next(same, here) if roots and record.item_digest else here
    return (Media(kind=kind_of_path(record.path), name=name),)


def roots_of(*outputs: Readable) -> tuple[str, ...]:
    """Returns the folders that ids of files in these outputs are relative to."""
    found = (output.configurations.root for output in outputs)
    return tuple(root for root in found if root is not None)


def is_refused(record: Record) -> bool:
    """Returns whether the engine refused the item; media of such an item are never shown."""
    error = record.error
    return error is not None and 400 <= error.code < 500 and error.code != ABORTED
