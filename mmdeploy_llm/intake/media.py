"""MediaLoader: turns media of any form into model inputs: checked unopened, then fetched,
decoded, processed."""

from __future__ import annotations

import difflib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

from mmdeploy_llm import errors
from mmdeploy_llm.config import EngineConfig
from mmdeploy_llm.errors import (
    ConfigError,
    MediaError,
    MediaLimitError,
    RequestError,
    UnsupportedMediaError,
)
from mmdeploy_llm.hooks import MediaInput, MediaLimits, MediaProcessor, MediaRef
from mmdeploy_llm.hooks.guard import CallGuard
from mmdeploy_llm.hooks.names import error_text, name_file
from mmdeploy_llm.hooks.records import FAULTS
from mmdeploy_llm.messages import MEDIA_KINDS, MediaItem

from .cache import ByteCache, CacheStats

CACHE_BYTES = 64 * 2**20
FETCHED_BYTES = 64 * 2**20
FETCHED_AGE = 60.0  # seconds

Result = TypeVar("Result")
Fetch = Callable[[MediaRef, MediaLimits], bytes]


@runtime_checkable
class HasDigest(Protocol):
    """Decoded media with a digest of their content: the cache is searched before processing."""

    digest: str


@runtime_checkable
class CanPeek(Protocol):
    """A processor that reads what `count_tokens` needs from headers, without a full decode."""

    def peek(self, source: Any, limits: MediaLimits) -> Any:
        """Returns what `count_tokens` accepts in place of a decoded item."""
        ...


@runtime_checkable
class CanPreview(Protocol):
    """A processor, or a maker of previews alone, that shows people a decoded item."""

    kind: ClassVar[str]

    def decode(self, source: Any, limits: MediaLimits) -> Any:
        """Returns what `previews` accepts."""
        ...

    def previews(self, item: Any, options: Mapping[str, Any]) -> Sequence[bytes]:
        """Returns small JPEGs, in order."""
        ...


@runtime_checkable
class KeepsTime(Protocol):
    """A processor with deadlines of its own, such as those of the processes it decodes in."""

    def max_seconds(self, limits: MediaLimits) -> float:
        """Returns the seconds that one call of its methods may take before it counts as hanging."""
        ...


class MediaLoader:
    """Turns media as the caller gave them into MediaInputs. Safe for use from several threads.

    processors: kind -> processor.
    fetch: returns the bytes of a MediaRef within `limits.fetch_timeout`.
    max_items: kind -> maximum number of items per prompt.
    guard: runs the processors' methods, each within `limits.decode_timeout`; None: a new one.
    """

    def __init__(
        self,
        *,
        processors: Mapping[str, MediaProcessor],
        fetch: Fetch,
        limits: MediaLimits,
        max_items: Mapping[str, int],
        cache_bytes: int = CACHE_BYTES,
        guard: CallGuard | None = None,
    ) -> None:
        self._guard = guard or CallGuard()
        self._processors = processors
        self._fetch = fetch
        self._limits = limits
        self._max_items = max_items
        self._file_lock = threading.Lock()
        self._processed: ByteCache[MediaInput] = ByteCache(cache_bytes, num_bytes)
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
    def kinds(self) -> tuple[str, ...]:
        """MEDIA_KINDS and the kinds of the model's processors."""
        return tuple(dict.fromkeys((*MEDIA_KINDS, *self._processors)))

    def check(self, items: Sequence[MediaItem]) -> None:
        """Refuses kinds without a processor and too many items of a kind; opens nothing.

        Raises UnsupportedMediaError, MediaLimitError.
        """
        for kind in dict.fromkeys(item.kind for item in items):
            if kind not in self._processors:
                raise UnsupportedMediaError(self._no_processor(kind))
            count = sum(item.kind == kind for item in items)
            limit = self._max_items.get(kind, 1)
            if count > limit:
                raise MediaLimitError(
                    f"Too many {kind} items in prompt, got {count} but limit is {limit}; "
                    f"raise it with limit_mm_per_prompt={{{kind!r}: {count}}}"
                )

    def load(self, items: Sequence[MediaItem]) -> list[MediaInput]:
        """Returns the items' model inputs. Raises MediaError and its subclasses, naming the
        item."""
        return self._each(items, self._load)

    def count(self, items: Sequence[MediaItem]) -> list[MediaInput]:
        """Returns the items as `load` does, but unprocessed: `tensors` and `key` are empty."""
        return self._each(items, self._count)

    def previews(self, item: MediaItem, maker: CanPreview | None = None) -> Sequence[bytes]:
        """Returns JPEGs of what the model sees of the item; none where its processor makes none.

        maker: makes the previews instead of the processor. The item is fetched and decoded within
        the same limits as by `load`. Raises MediaError and its subclasses.
        """
        chosen = maker or self._processors.get(item.kind)
        if not isinstance(chosen, CanPreview):
            return ()
        decoded = self._decode(chosen, self._opened(item))
        return self._call(chosen, lambda: chosen.previews(decoded, item.options))

    def interrupt(self) -> None:
        """Ends all waiting for plugins; loads in progress end with a MediaError."""
        self._guard.close()

    def close(self) -> None:
        """Interrupts loads in progress and closes the processors."""
        self.interrupt()
        for processor in self._processors.values():
            processor.close()

    def _each(
        self, items: Sequence[MediaItem], work: Callable[[MediaItem], MediaInput]
    ) -> list[MediaInput]:
        done = []
        for index, item in enumerate(items):
            try:
                done.append(work(item))
            except RequestError as error:
                if isinstance(item.source, MediaRef):
                    name_file(error, item.source)
                if len(items) == 1:
                    raise
                number = sum(other.kind == item.kind for other in items[: index + 1])
                raise _own_class(error)(f"{item.kind} {number}: {error}") from error
        return done

    def _load(self, item: MediaItem) -> MediaInput:
        source, processor = self._opened(item), self._processors[item.kind]
        if isinstance(source, bytes):
            key = _key(item, "encoded", source)
            return self._processed.get_or_make(
                key, lambda: self._process(processor, item, self._decode(processor, source))
            )
        decoded = self._decode(processor, source)
        if not isinstance(decoded, HasDigest):
            return self._process(processor, item, decoded)
        key = _key(item, "decoded", decoded.digest.encode())
        return self._processed.get_or_make(key, lambda: self._process(processor, item, decoded))

    def _count(self, item: MediaItem) -> MediaInput:
        source, processor = self._opened(item), self._processors[item.kind]
        find = processor.peek if isinstance(processor, CanPeek) else processor.decode
        known = self._call(processor, lambda: find(source, self._limits))
        count = self._call(processor, lambda: processor.count_tokens(known, item.options))
        text = self._call(processor, lambda: processor.prompt_text(known, item.options))
        return MediaInput(kind=item.kind, tensors={}, num_tokens=count, key="", prompt_text=text)

    def _decode(self, processor: MediaProcessor | CanPreview, source: Any) -> Any:
        return self._call(processor, lambda: processor.decode(source, self._limits))

    def _process(self, processor: MediaProcessor, item: MediaItem, decoded: Any) -> MediaInput:
        made = self._call(processor, lambda: processor.process(decoded, item.options))
        if not _is_usable(made):
            raise MediaError(
                f"{_owner(processor)} returned no usable MediaInput for the {item.kind}"
            )
        return made

    def _opened(self, item: MediaItem) -> Any:
        """Returns bytes when the item is encoded or given by name, else the loaded object."""
        if isinstance(item.source, MediaRef):
            return self._named(item.source)
        if callable(getattr(item.source, "read", None)):
            with self._file_lock:  # several prompts may share a file object
                return self._read(item)
        return item.source

    def _read(self, item: MediaItem) -> bytes:
        """Reads the item's file object, which may be a pipe or a socket, and hang."""
        seconds = self._limits.fetch_timeout
        return self._guard.run(
            lambda: _read(item.source, item.kind, self._limits),
            seconds=seconds,
            owner="the file objects' read method",
            timeout_message=f"the {item.kind}'s file object was not read within {seconds:g} s; "
            "raise media_fetch_timeout",
        )

    def _call(self, processor: MediaProcessor | CanPreview, call: Callable[[], Result]) -> Result:
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
            return self._guard.run(
                call, seconds=seconds, owner=owner, timeout_message=timeout_message
            )
        except RequestError:
            raise
        except FAULTS as error:  # the plugin boundary
            raise MediaError(
                f"{owner} failed on the {processor.kind}: {error_text(error)}"
            ) from error

    def _named(self, ref: MediaRef) -> bytes:
        """Returns the bytes of a path or URL. A path is read each time: fast and never stale."""
        if ref.scheme in ("", "data", "file"):
            return self._fetch(ref, self._limits)
        key = f"{ref.kind}\0{ref.caller}\0{ref.uri}"
        return self._fetched.get_or_make(key, lambda: self._fetch(ref, self._limits))

    def _no_processor(self, kind: str) -> str:
        if not self._processors:
            return (
                f"the prompt has {kind} items, but this model accepts text only, or no installed "
                f"plugin processes {kind} for it"
            )
        return (
            f"no installed plugin processes {kind} for this model; "
            f"it accepts {', '.join(sorted(self._processors))}"
        )


def num_bytes(item: MediaInput) -> int:
    """Returns the bytes of an item's tensors."""
    return sum(tensor.nbytes for tensor in item.tensors.values())


def media_items(data: Any, kinds: Sequence[str] = MEDIA_KINDS) -> list[MediaItem]:
    """Returns the items of a prompt's `multimodal_data`, kind by kind, unopened.

    data: {"image": one item or a list, "video": ...} or None. Raises RequestError for another shape
        and for a kind that is not in `kinds`.
    """
    if data is None:
        return []
    if not isinstance(data, Mapping):
        raise RequestError(
            "multimodal_data must be a dict such as {'image': [...]}, got " + type(data).__name__
        )
    items = []
    for kind, values in data.items():
        if kind not in kinds:
            near = difflib.get_close_matches(str(kind), kinds, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(kinds)}"
            raise RequestError(f"multimodal_data has an unknown kind {kind!r}; {hint}")
        single = not isinstance(values, (list, tuple))
        values = ([] if values is None else [values]) if single else values
        items += [
            normalised(MediaItem(kind=kind, source=value, options={}), "generate")
            for value in values
        ]
    return items


def normalised(item: MediaItem, caller: str) -> MediaItem:
    """Returns the item with names as MediaRef, bytes-like objects as bytes. Raises RequestError."""
    source, options = item.source, item.options
    if item.kind == "video" and isinstance(source, Mapping) and "video" in source:
        options = {**options, **{key: source[key] for key in source if key != "video"}}
        source = source["video"]
    if source is None:
        raise MediaError(f"the {item.kind} is None; give a path, bytes or a loaded object")
    if isinstance(source, os.PathLike):
        source = os.fsdecode(source)
    if isinstance(source, str):
        source = MediaRef(kind=item.kind, uri=source, caller=caller)
    if isinstance(source, (bytearray, memoryview)):
        source = bytes(source)
    return MediaItem(kind=item.kind, source=source, options=options)


def _read(file: Any, kind: str, limits: MediaLimits) -> bytes:
    """Reads a file object, from its start if it can seek; its position is restored."""
    try:
        can_seek = callable(getattr(file, "seekable", None)) and file.seekable()
        position = file.tell() if can_seek else None
        if can_seek:
            file.seek(0)
        blob = file.read(limits.max_bytes + 1)
        if can_seek:
            file.seek(position)
    except (OSError, ValueError) as error:
        raise MediaError(
            f"the {kind}'s file object cannot be read: {type(error).__name__}"
        ) from error
    if not isinstance(blob, bytes):
        raise UnsupportedMediaError(
            f"the {kind}'s file object returns {type(blob).__name__}, not bytes; open it in mode "
            "'rb'"
        )
    limits.check_bytes(len(blob), f"the {kind}'s file object", is_all=False)
    return blob


def _key(item: MediaItem, form: str, content: bytes) -> str:
    """Returns a key for content and options, distinct for encoded and decoded items."""
    options = sorted(item.options.items())
    digest = blake2b(f"{item.kind}\0{form}\0{options!r}\0".encode(), digest_size=20)
    digest.update(content)
    return digest.hexdigest()


def _is_usable(made: object) -> bool:
    """Whether a processor returned what every later stage relies on."""
    if not isinstance(made, MediaInput) or made.num_tokens < 1:
        return False
    return all(hasattr(tensor, "nbytes") for tensor in made.tensors.values())


def _owner(processor: MediaProcessor | CanPreview) -> str:
    return f"media processor {type(processor).__name__} (plugin {type(processor).__module__})"


def _own_class(error: RequestError) -> type[RequestError]:
    """Returns the nearest class of errors.py: a plugin's subclass may not accept a message
    alone."""
    return next(kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)


def media_limits(config: EngineConfig) -> MediaLimits:
    """Returns the limits on one item that the options set."""
    root = config.allowed_media_root
    try:
        root = root.resolve() if root is not None else None
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a lone surrogate
        raise ConfigError(f"allowed_media_root {str(root)!r} is not a usable path") from error
    return MediaLimits(
        max_bytes=config.max_media_bytes,
        max_pixels=config.max_image_pixels,
        fetch_timeout=config.media_fetch_timeout,
        allowed_root=root,
        allow_urls=config.allow_media_urls or bool(config.allowed_media_domains),
        allowed_domains=config.allowed_media_domains,
        allow_private_addresses=config.allow_private_media_addresses,
        allowed_schemes=config.allowed_media_schemes,
        max_duration=config.max_video_seconds,
        max_frames=config.max_video_frames,
        isolation=config.media_isolation,
        decode_timeout=config.media_timeout,
        decode_memory=config.media_process_memory,
    )
