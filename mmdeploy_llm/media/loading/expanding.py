"""PartExpander: writes parts of messages whose types plugins add as the parts that they become.

{"type": "location", "lat": 47.4, "lon": 8.5}  -->  {"type": "text", "text": "47.4 N, 8.5 E"}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

from mmdeploy_llm import errors
from mmdeploy_llm.errors import MediaTimeoutError, PluginConflictError, RequestError
from mmdeploy_llm.hooks import ChatPartContext, ChatPartSpec, KindTable, MediaLimits, MediaRef
from mmdeploy_llm.hooks.factories import resolve
from mmdeploy_llm.hooks.names import did_you_mean
from mmdeploy_llm.hooks.records import FAULTS, Provided
from mmdeploy_llm.messages import MediaItem
from mmdeploy_llm.system.guarding.calls import CallGuard
from mmdeploy_llm.values.deadline import Deadline
from mmdeploy_llm.values.text.display import error_text, shown

MAX_DEPTH = 8  # parts that become parts of plugins
MAX_PARTS = 10_000  # that one part may become
Fetch = Callable[[MediaRef, MediaLimits], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A part, and the path of the one that the caller wrote, such as "messages[2].content[1]"."""

    part: Any
    path: str


class PartExpander:
    """Expands the parts of messages. Safe for use from several threads.

    kinds: which plugin has a type of parts. model: name of the model's family; None: it is not
    known yet, and parts that need it stay as they are. takes: the kinds of media that it takes.
    fetch, limits, guard: as of media.
    """

    def __init__(
        self,
        kinds: KindTable,
        *,
        model: str | None = None,
        takes: tuple[str, ...] = (),
        fetch: Fetch | None = None,
        limits: MediaLimits | None = None,
        guard: CallGuard | None = None,
    ) -> None:
        self._kinds, self._model, self._fetch = kinds, model, fetch
        self._limits, self._guard = limits or MediaLimits(), guard or CallGuard()
        self._about = ChatPartContext(kinds=kinds.kinds, kind_of=kinds.of_name, takes=takes)
        self._functions: dict[tuple[str, str], Callable[..., Any]] = {}

    def check(self) -> None:
        """Raises PluginError for a function that cannot be imported, PluginConflictError for a type
        that two plugins have."""
        for part_type in {name for _, name in self._kinds.parts}:
            found = self._found(part_type)
            if found is not None:
                self._function(found)

    def expanded(
        self, placed: Sequence[Placed], deadline: Deadline | None = None
    ) -> Sequence[Placed]:
        """Returns parts of messages with those of plugins expanded. Raises RequestError."""
        if not any(self._found_for(own.part) for own in placed):
            return placed
        limits = self._limits
        if deadline is not None:
            deadline.check("its parts were written")
            limits = limits.until(deadline)
        return [own for each in placed for own in self._expanded(each, limits)]

    def files(self, part: Any) -> dict[str, MediaItem]:
        """Returns the files that a part names which stays as it is for now, by their keys."""
        part_type = part.get("type") if isinstance(part, Mapping) else None
        specs = [own.spec for (_, name), own in self._kinds.parts.items() if name == part_type]
        names = dict.fromkeys(key for spec in specs for key in spec.files)
        return {
            key: MediaItem(kind=self._kinds.of_name(name) or "file", source=name, options={})
            for key in names
            if isinstance(name := part.get(key), str)
        }

    def providers(self) -> str:
        """Returns the types of parts that plugins have, for messages; "" without any."""
        by_plugin: dict[str, list[str]] = {}
        for part_type in sorted({name for _, name in self._kinds.parts}):
            found = self._found(part_type)
            if found is not None:
                by_plugin.setdefault(str(found.origin), []).append(part_type)
        return "".join(f"; of {own}: {', '.join(types)}" for own, types in by_plugin.items())

    def _expanded(self, placed: Placed, limits: MediaLimits) -> Iterator[Placed]:
        """Yields what a part becomes, in the end. Raises RequestError where there is no end."""
        left: list[tuple[Any, tuple[str, ...]]] = [(placed.part, ())]  # the last one comes first
        count = 0
        while left:
            part, types = left.pop()
            found = self._found_for(part)
            if found is None:
                yield replace(placed, part=part)
                continue
            types = (*types, part["type"])
            if len(types) > MAX_DEPTH:
                raise RequestError(
                    f"{placed.path}: parts become parts without an end: {' > '.join(types)}"
                )
            parts = self._called(part, found, placed.path, limits)
            count += len(parts)
            if count > MAX_PARTS:
                raise RequestError(
                    f"{placed.path}: the part becomes more than {MAX_PARTS} parts ({found.origin})"
                )
            left += [(own, types) for own in reversed(parts)]

    def _found_for(self, part: Any) -> Provided[ChatPartSpec] | None:
        part_type = part.get("type") if isinstance(part, Mapping) else None
        return self._found(part_type) if isinstance(part_type, str) else None

    def _found(self, part_type: str) -> Provided[ChatPartSpec] | None:
        """Returns what expands parts of this type; None where it is not known, or needs a model."""
        if self._model is not None:
            return self._kinds.chat_part(part_type, self._model)
        families = {family for family, name in self._kinds.parts if name == part_type}
        try:
            found = self._kinds.chat_part(part_type) if families == {"*"} else None
        except PluginConflictError:
            return None  # the model's intake says so
        return None if found is None or found.spec.late else found

    def _called(
        self, part: Mapping[str, Any], found: Provided[ChatPartSpec], path: str, limits: MediaLimits
    ) -> list[Any]:
        """Returns what the plugin makes of one part. Raises RequestError, with the path."""
        spec, origin = found.spec, found.origin
        values = {name: value for name, value in part.items() if name != "type"}
        check_keys(spec, values, path)
        values = {"type": part["type"], **values}
        about = self._about
        if spec.late and self._fetch is not None:
            about = replace(about, fetch=partial(self._fetched, limits=limits, kind=part["type"]))
        function = self._function(found)
        try:
            made = self._guard.run(
                lambda: _listed(function(values, about)),
                seconds=limits.decode_timeout,
                owner=str(origin),
                timeout_message=f"{origin} has not written the part within "
                f"{limits.decode_timeout:g} s; raise media_timeout",
                deadline=limits.deadline,
            )
        except RequestError as error:
            hint = f" ({origin})" if isinstance(error, MediaTimeoutError) else ""
            raise _own_class(error)(f"{path}: {error}{hint}") from error
        except ValueError as error:
            raise RequestError(f"{path}: {error}") from error
        except FAULTS as error:
            raise RequestError(
                f"{path}: {origin} failed on a part of type {part['type']!r}: {error_text(error)}"
            ) from error
        problem = _problem(made)
        if problem is not None:
            raise RequestError(f"{path}: {origin} must return parts of {path}, {problem}")
        return [{"type": "text", "text": own} if isinstance(own, str) else own for own in made]

    def _function(self, found: Provided[ChatPartSpec]) -> Callable[..., Any]:
        """Returns the function of a spec. Raises PluginError."""
        key = (found.origin.name, found.spec.factory)
        if key not in self._functions:
            self._functions[key] = resolve(found.spec, found.origin)
        return self._functions[key]

    def _fetched(self, uri: str, *, limits: MediaLimits, kind: str) -> bytes:
        assert self._fetch is not None
        return self._fetch(MediaRef(kind=kind, uri=uri, caller="chat"), limits)


def check_keys(spec: ChatPartSpec, values: Mapping[str, Any], path: str) -> None:
    """Raises RequestError for a part without a key of `spec`, with an unknown one, or with a value
    of another type."""
    known = {**spec.keys, **spec.optional}
    for name, value in values.items():
        if name not in known and "*" not in spec.optional:
            hint = did_you_mean(str(name), known)
            own = ", ".join(known) or "none but 'type'"
            raise RequestError(f"{path}: unknown key {shown(name)}{hint}; known: {own}")
        wanted = known.get(name, known.get("*", object))
        if not is_of(value, wanted):
            raise RequestError(f"{path}.{name}: must be {NAMES[wanted]}, got {shown(value)}")
    missing = [name for name in spec.keys if name not in values]
    if missing:
        raise RequestError(f"{path}: a {spec.types[0]} part needs {', '.join(map(repr, missing))}")


NAMES = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
    object: "anything",
}


def is_of(value: Any, wanted: type) -> bool:
    """Whether a value may stand under a key of this type."""
    if wanted is object:
        return True
    if isinstance(value, bool) and wanted is not bool:
        return False
    wider: dict[type, tuple[type, ...]] = {
        float: (int, float),
        list: (list, tuple),
        dict: (Mapping,),
    }
    return isinstance(value, wider.get(wanted, (wanted,)))


def _own_class(error: RequestError) -> type[RequestError]:
    """Returns the nearest class of errors.py, which accepts a message alone."""
    return next(kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)


def _listed(made: Any) -> Any:
    """Returns a sequence or an iterator of parts as a list, with one part more than may be; runs
    within the plugin's time."""
    if isinstance(made, (str, Mapping)) or not isinstance(made, Iterable):
        return made
    return list(islice(made, MAX_PARTS + 1))


def _problem(made: Any) -> str | None:
    """Says what is wrong with what a function returned; None for parts."""
    if not isinstance(made, list):
        return f"got {type(made).__name__}"
    for index, part in enumerate(made):
        if not isinstance(part, str) and not (
            isinstance(part, Mapping) and isinstance(part.get("type"), str)
        ):
            return f"got {shown(part)} at {index}"
    return None
