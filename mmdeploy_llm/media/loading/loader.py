"""MediaLoader: turns media of any form into model inputs: checked unopened, then fetched,
decoded, processed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from mmdeploy_llm import errors
from mmdeploy_llm.errors import (
    MediaError,
    MediaLimitError,
    MediaTimeoutError,
    RequestError,
    UnsupportedMediaError,
)
from mmdeploy_llm.hooks import MediaInput, MediaLimits, MediaProcessor, MediaRef, MediaSplitter
from mmdeploy_llm.hooks.names import error_text, with_file
from mmdeploy_llm.hooks.records import FAULTS
from mmdeploy_llm.media.boxes.reading import sizes_of
from mmdeploy_llm.media.budgets.choice import Budgets
from mmdeploy_llm.media.image.files import DecodedImage
from mmdeploy_llm.messages import MediaItem
from mmdeploy_llm.system.guarding.calls import CallGuard
from mmdeploy_llm.values.deadline import Deadline
from mmdeploy_llm.values.options.budget import TokenBudget

from .cache import ByteCache, CacheStats
from .embeds import EmbedsReader, Grid
from .forms import Embeds, read_file
from .keys import key_of, keyed
from .kinds import ModelMedia
from .notices import PageNotice
from .paths import local_path
from .processed import processed_cache
from .protocols import CanPeek, CanPreview, HasDigest, KeepsTime
from .splitting import Part, Splitting

FETCHED_BYTES = 64 * 2**20
FETCHED_AGE = 60.0  # seconds

Result = TypeVar("Result")
Fetch = Callable[[MediaRef, MediaLimits], bytes]


class MediaLoader:
    """Turns media as the caller gave them into MediaInputs. Safe for use from several threads.

    media: what reads each kind.
    fetch: returns the bytes of a MediaRef within `limits.fetch_timeout`.
    max_items: kind -> maximum number of items per prompt.
    cache_bytes: of processed media that are kept; None: as a run needs.
    guard: runs the processors' methods, each within `limits.decode_timeout`; None: a new one.
    embeds: reads items given as embeddings; None: for a model of unknown size.
    budgets: kind -> the engine's budget, which the processors keep to.
    """

    def __init__(
        self,
        *,
        media: ModelMedia,
        fetch: Fetch,
        limits: MediaLimits,
        max_items: Mapping[str, int],
        cache_bytes: int | None = None,
        guard: CallGuard | None = None,
        embeds: EmbedsReader | None = None,
        budgets: Mapping[str, TokenBudget] | None = None,
    ) -> None:
        self._media, self._processors = media, media.processors
        self._budgets = Budgets(media.processors, budgets or {})
        self._embeds = embeds or EmbedsReader()
        self._guard = guard or CallGuard()
        self._fetch, self._limits, self._max_items = fetch, limits, max_items
        self._file_lock, self._pages = threading.Lock(), PageNotice()
        self._splitting = Splitting(
            media=media, max_items=max_items, open=self._opened, call=self._call
        )
        self._processed = processed_cache(cache_bytes)
        # The content of a URL may change; within one batch it counts as the same.
        self._fetched: ByteCache[bytes] = ByteCache(FETCHED_BYTES, len, max_age=FETCHED_AGE)

    @property
    def stats(self) -> dict[str, CacheStats]:
        """Statistics of the caches of processed media and of bytes fetched by URL."""
        return {"processed": self._processed.stats, "fetched": self._fetched.stats}

    @property
    def limits(self) -> MediaLimits:
        """The limits on one item."""
        return self._limits

    @property
    def media(self) -> ModelMedia:
        """The kinds of media that the model takes."""
        return self._media

    def check(self, items: Sequence[MediaItem]) -> None:
        """Refuses kinds without a processor and too many items of a kind; opens nothing.

        Raises UnsupportedMediaError, MediaLimitError.
        """
        for kind in dict.fromkeys(item.kind for item in items):
            if kind not in self._processors and kind not in self._media.splitters:
                raise UnsupportedMediaError(self._no_processor(kind))
            count = sum(item.kind == kind for item in items)
            limit = self._max_items.get(kind, 1)
            if count > limit:
                raise MediaLimitError(
                    f"Too many {kind} items in prompt, got {count} but limit is {limit}; "
                    f"raise it with limit_mm_per_prompt={{{kind!r}: {count}}}"
                )

    def split(
        self, items: Sequence[MediaItem], deadline: Deadline | None = None
    ) -> list[tuple[MediaItem, ...]]:
        """Returns for each item its parts, not made yet, where its kind yields another, else
        itself. Raises MediaError and its subclasses, and RequestTimeoutError at `deadline`."""
        return self._splitting.split(items, lambda item: self._limits_until(deadline, item))

    def load(
        self, items: Sequence[MediaItem], deadline: Deadline | None = None
    ) -> list[MediaInput]:
        """Returns the items' model inputs. Raises MediaError and its subclasses, naming the item,
        and RequestTimeoutError at `deadline`."""
        return self._each(items, lambda item: self._load(item, self._limits_until(deadline, item)))

    def count(self, items: Sequence[MediaItem]) -> list[MediaInput]:
        """Returns the items as `load` does, but unprocessed: `tensors` and `key` are empty."""
        return self._each(items, self._count)

    def previews(self, item: MediaItem, maker: CanPreview | None = None) -> Sequence[bytes]:
        """Returns JPEGs of what the model sees of the item, which may be a part; none where its
        processor makes none.

        maker: makes the previews instead of the processor. The item is fetched and decoded within
        the same limits as by `load`. Raises MediaError and its subclasses.
        """
        limits = self._limits
        if isinstance(item.source, Part):
            item = item.source.made(item, self._call, limits)
        chosen: MediaProcessor | CanPreview | None = maker
        if maker is None and item.kind in self._processors:
            chosen, item = self._budgets.of(item)
        if not isinstance(chosen, CanPreview) or isinstance(item.source, Embeds):
            return ()
        decoded = self._decode(chosen, self._opened(item, limits), limits)
        return self._call(chosen, lambda: chosen.previews(decoded, item.options), limits)

    def interrupt(self) -> None:
        """Ends all waiting for plugins; loads in progress end with a MediaError."""
        self._guard.close()

    def close(self) -> None:
        """Interrupts loads in progress, closes the processors and empties the caches."""
        self.interrupt()
        self._media.close()
        self._processed.clear()
        self._fetched.clear()

    def _each(
        self, items: Sequence[MediaItem], work: Callable[[MediaItem], MediaInput]
    ) -> list[MediaInput]:
        done = []
        for index, item in enumerate(items):
            try:
                done.append(work(item))
            except RequestError as error:
                source = item.source
                if isinstance(source, Part):
                    raise _own_class(error)(f"{source.name}: {error}") from error
                named = with_file(error, source) if isinstance(source, MediaRef) else error
                if len(items) == 1:
                    raise named from error.__cause__
                number = sum(other.kind == item.kind for other in items[: index + 1])
                raise _own_class(error)(f"{item.kind} {number}: {named}") from error
        return done

    def _limits_until(self, deadline: Deadline | None, item: MediaItem) -> MediaLimits:
        """Returns the limits for an item. Raises RequestTimeoutError after `deadline`."""
        if deadline is None:
            return self._limits
        deadline.check(_preparing(item.kind))
        return self._limits.until(deadline)

    def _described(self, item: MediaItem, given: Embeds, limits: MediaLimits) -> MediaInput:
        """Returns the item of these embeddings, without them."""
        processor, item = self._budgets.of(item)

        def embedded(num_tokens: int, grid: Grid | None) -> MediaInput:
            call = lambda: processor.embedded(num_tokens, grid, item.options)  # noqa: E731
            return self._checked(processor, item, self._call(processor, call, limits))

        return self._embeds.describe(item.kind, given, limits, embedded)

    def _load(self, item: MediaItem, limits: MediaLimits) -> MediaInput:
        if isinstance(item.source, Part):
            return self._load_part(item, item.source, limits)
        if isinstance(item.source, Embeds):
            described = self._described(item, item.source, limits)
            return self._embeds.read(item.source, described)
        source, (processor, own) = self._opened(item, limits), self._budgets.of(item)
        if isinstance(source, bytes):
            self._pages.see(item, source)
            key = key_of(item, "encoded", source)

            def decode_and_process() -> MediaInput:
                decoded = self._decode(processor, source, limits)
                return keyed(key, self._process(processor, own, decoded, limits))

            return self._processed.get_or_make(key, decode_and_process, limits.deadline)
        decoded = self._decode(processor, source, limits)
        if not isinstance(decoded, HasDigest):
            return self._process(processor, own, decoded, limits)
        key = key_of(item, "decoded", decoded.digest.encode())
        make = lambda: self._process(processor, own, decoded, limits)  # noqa: E731
        return self._processed.get_or_make(key, make, limits.deadline)

    def _load_part(self, item: MediaItem, part: Part, limits: MediaLimits) -> MediaInput:
        """Returns the input of a part, which is made only if it is not known yet."""
        key = part.key(item)

        def make() -> MediaInput:
            made = part.made(item, self._call, limits)
            if not key or isinstance(made.source, Embeds):
                return self._load(made, limits)
            processor, own = self._budgets.of(made)
            decoded = self._decode(processor, self._opened(made, limits), limits)
            return keyed(key, self._process(processor, own, decoded, limits))

        return self._processed.get_or_make(key, make, limits.deadline) if key else make()

    def _count(self, item: MediaItem) -> MediaInput:
        limits = self._limits
        if isinstance(item.source, Part):
            item = item.source.made(item, self._call, limits)
        if isinstance(item.source, Embeds):
            return self._described(item, item.source, limits)
        source, (processor, item) = self._opened(item, limits), self._budgets.of(item)
        find = processor.peek if isinstance(processor, CanPeek) else processor.decode
        known = self._call(processor, lambda: find(source, limits), limits)
        count = self._call(processor, lambda: processor.count_tokens(known, item.options), limits)
        text = self._call(processor, lambda: processor.prompt_text(known, item.options), limits)
        sizes = self._call(processor, lambda: sizes_of(processor, known, item.options), limits)
        return MediaInput(
            kind=item.kind, tensors={}, num_tokens=count, key="", prompt_text=text, **sizes
        )

    def _decode(
        self, processor: MediaProcessor | CanPreview, source: Any, limits: MediaLimits
    ) -> Any:
        return self._call(processor, lambda: processor.decode(source, limits), limits)

    def _process(
        self, processor: MediaProcessor, item: MediaItem, decoded: Any, limits: MediaLimits
    ) -> MediaInput:
        made = self._call(processor, lambda: processor.process(decoded, item.options), limits)
        usable = self._checked(processor, item, made)
        if isinstance(decoded, DecodedImage) and decoded.notes:
            usable = replace(usable, notes=(*usable.notes, *decoded.notes))
        self._budgets.check(item, usable)
        if usable.embeds is not None:
            return self._embeds.adopt(usable)
        encoded = self._media.encoded
        if encoded is not None and item.kind not in encoded:
            raise MediaError(
                f"{_owner(processor)} returned the {item.kind} without `embeds`, and the model "
                f"encodes {', '.join(encoded) or 'nothing'} only (its ModelSpec.media): a "
                f"processor that adds a kind to a model encodes it itself"
            )
        return usable

    def _checked(self, processor: MediaProcessor, item: MediaItem, made: Any) -> MediaInput:
        if not _is_usable(made):
            raise MediaError(
                f"{_owner(processor)} returned no usable MediaInput for the {item.kind}"
            )
        usable: MediaInput = made
        return usable

    def _opened(self, item: MediaItem, limits: MediaLimits) -> Any:
        """Returns bytes when the item is encoded or given by name, else the loaded object; the path
        of a local file for a splitter that wants it."""
        if isinstance(item.source, MediaRef):
            splitter = self._media.splitters.get(item.kind)
            if splitter is not None and splitter.wants_path:
                path = local_path(item.source, limits)
                if path is not None:
                    return path
            return self._named(item.source, limits)
        if callable(getattr(item.source, "read", None)):
            with self._file_lock:  # several prompts may share a file object
                return self._read(item, limits)
        if item.kind == "video" and isinstance(item.source, list):
            return self._frames(item.source, limits)
        return item.source

    def _frames(self, frames: Sequence[Any], limits: MediaLimits) -> list[Any]:
        """Returns the frames of a list, named ones as bytes, which are as many together as
        a video may have."""
        limits.check_frames(len(frames))
        found, num_bytes = [], 0
        for frame in frames:
            own = self._frame(frame, limits) if isinstance(frame, MediaRef) else frame
            if own is not frame:
                num_bytes += len(own)
                limits.check_bytes(num_bytes, "the list of frames", is_all=False)
            found.append(own)
        return found

    def _frame(self, ref: MediaRef, limits: MediaLimits) -> bytes:
        try:
            return self._named(ref, limits)
        except RequestError as error:
            raise with_file(error, ref) from error.__cause__

    def _read(self, item: MediaItem, limits: MediaLimits) -> bytes:
        """Reads the item's file object, which may be a pipe or a socket, and hang."""
        seconds = self._limits.fetch_timeout
        with _until(limits, item.kind):
            return self._guard.run(
                lambda: read_file(item.source, item.kind, limits),
                seconds=seconds,
                owner="the file objects' read method",
                timeout_message=f"the {item.kind}'s file object was not read within {seconds:g} s; "
                "raise media_fetch_timeout",
                deadline=limits.deadline,
            )

    def _call(
        self,
        processor: MediaProcessor | MediaSplitter | CanPreview,
        call: Callable[[], Result],
        limits: MediaLimits,
    ) -> Result:
        """Calls a processor's method within its time. Any exception but RequestError becomes a
        MediaError that names the processor."""
        seconds = self._limits.decode_timeout
        if isinstance(processor, KeepsTime):
            seconds = processor.max_seconds(self._limits)
        owner = _owner(processor)
        timeout_message = (
            f"{owner} has not finished with the {processor.kind} within {seconds:g} s; raise "
            "media_timeout or give something simpler"
        )
        try:
            with _until(limits, processor.kind):
                return self._guard.run(
                    call,
                    seconds=seconds,
                    owner=owner,
                    timeout_message=timeout_message,
                    deadline=limits.deadline,
                )
        except RequestError:
            raise
        except FAULTS as error:  # the plugin boundary
            raise MediaError(
                f"{owner} failed on the {processor.kind}: {error_text(error)}"
            ) from error

    def _named(self, ref: MediaRef, limits: MediaLimits) -> bytes:
        """Returns the bytes of a path or URL. A path is read each time: fast and never stale."""

        is_cut = limits.fetch_timeout < self._limits.fetch_timeout

        def fetch() -> bytes:
            with _until(limits, ref.kind, is_cut=is_cut):
                return self._fetch(ref, limits)

        if ref.scheme in ("", "data", "file"):
            return fetch()
        key = f"{ref.kind}\0{ref.caller}\0{ref.uri}"
        return self._fetched.get_or_make(key, fetch, limits.deadline)

    def _no_processor(self, kind: str) -> str:
        if not self._processors:
            return (
                f"the prompt has {kind} items, but this model accepts text only, or no installed "
                f"plugin processes {kind} for it"
            )
        parts = self._media.yields.get(kind)
        if parts is not None and parts not in self._media.read:
            return f"a {kind} is split into items of kind {parts}, which this model does not take"
        return (
            f"no installed plugin processes {kind} for this model; "
            f"it accepts {', '.join(sorted((*self._processors, *self._media.splitters)))}"
        )


@contextmanager
def _until(limits: MediaLimits, kind: str, *, is_cut: bool = False) -> Iterator[None]:
    """Replaces a timeout of the block by the error of the request, where its deadline is the cause:
    it has passed, or has cut the time that the block had, which may give up early then."""
    try:
        yield
    except MediaTimeoutError as error:
        if limits.deadline is None or (limits.deadline.left > 0 and not is_cut):
            raise
        raise limits.deadline.error(_preparing(kind)) from error


def _preparing(kind: str) -> str:
    return f"its {kind} was being prepared"


def _is_usable(made: object) -> bool:
    """Whether a processor returned what every later stage relies on."""
    if not isinstance(made, MediaInput) or made.num_tokens < 1:
        return False
    return all(hasattr(tensor, "nbytes") for tensor in made.tensors.values())


def _owner(processor: MediaProcessor | MediaSplitter | CanPreview) -> str:
    noun = "splitter" if isinstance(processor, MediaSplitter) else "processor"
    return f"media {noun} {type(processor).__name__} (plugin {type(processor).__module__})"


def _own_class(error: RequestError) -> type[RequestError]:
    """Returns the nearest class of errors.py: a plugin's subclass may not accept a message
    alone."""
    return next(kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
