"""KindTable: what the kinds of media are called and how their files begin, from all loaded specs.

Everything that reads files, columns of tables or parts of messages asks this table for their kind.
Images, videos and sounds are in it whatever is loaded.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from mmdeploy_llm.errors import PluginConflictError
from mmdeploy_llm.hooks.objects.chat_parts import ChatPartSpec
from mmdeploy_llm.hooks.objects.declared import BUILT_IN, Declared
from mmdeploy_llm.hooks.objects.store import CorpusFormatSpec, OutputSinkSpec

from .contracts import MediaProcessorSpec
from .names import normalise
from .records import PluginOrigin, Provided, describe
from .selection import Chooser

T = TypeVar("T")
# Has the hooks of what is there whatever plugins are installed, blocked or named; imported by name,
# as entry points are.
ALWAYS = "mmdeploy_llm.data.outputs.own_formats"


@dataclass(frozen=True, slots=True, kw_only=True)
class KindTable:
    """The kinds of media of all loaded plugins. What two kinds claim at one priority belongs to
    neither: looking it up raises PluginConflictError.

    kinds: image, video, audio, then others in load order.
    suffixes: ".wav" -> kind. columns: name of a table's column, in small letters -> kind.
    first_bytes: (offset, bytes) -> kind, the longest first: the first that fits a file counts.
    part_types: type of a message's part -> kind; "audio" and "audio_url" are those of a kind
        "audio" without being declared.
    yields: kind -> the kind of its parts, for kinds that are split.
    formats: ".warc" -> the format of corpora that a plugin reads. format_bytes: (offset, bytes) ->
        the format, the longest first.
    parts: (family or "*", type of a message's part) -> what it becomes.
    outputs: ".sqlite" -> the format of outputs.
    output_formats: all of these, those that no suffix names too; this package's come first.
    conflicts: (field, name) -> what is wrong and how to decide.
    """

    kinds: tuple[str, ...]
    suffixes: Mapping[str, str]
    columns: Mapping[str, str]
    first_bytes: Mapping[tuple[int, bytes], str]
    part_types: Mapping[str, str]
    yields: Mapping[str, str]
    formats: Mapping[str, Provided[CorpusFormatSpec]]
    format_bytes: Mapping[tuple[int, bytes], Provided[CorpusFormatSpec]]
    parts: Mapping[tuple[str, str], Provided[ChatPartSpec]]
    outputs: Mapping[str, Provided[OutputSinkSpec]]
    output_formats: tuple[Provided[OutputSinkSpec], ...]
    conflicts: Mapping[tuple[str, Any], str]

    def of_name(self, name: str) -> str | None:
        """Returns the kind of a file of this name or path, None for an unknown suffix. Of suffixes
        such as ".nii.gz" and ".gz" the longest that a kind claims counts."""
        parts = Path(name).suffixes
        ends = ("".join(parts[at:]).lower() for at in range(len(parts)))
        return next((kind for end in ends if (kind := self._found("suffixes", end))), None)

    def of_bytes(self, head: bytes) -> str | None:
        """Returns the kind of a file that begins with `head`, None for an unknown beginning.

        HEAD bytes are enough. Formats that need more than a comparison are not found here: see
        `values.first_bytes`.
        """
        for offset, begin in self.first_bytes:
            if head.startswith(begin, offset):
                return self._found("first_bytes", (offset, begin))
        return None

    def format_of(self, suffix: str | None, head: bytes = b"") -> Provided[CorpusFormatSpec] | None:
        """Returns the format of corpora with this suffix, without one of files that begin so; None
        where no plugin reads it."""
        if suffix is not None:
            if ("suffixes", suffix) in self.conflicts:
                raise PluginConflictError(self.conflicts["suffixes", suffix])
            return self.formats.get(suffix)
        for offset, begin in self.format_bytes:
            if head.startswith(begin, offset):
                if ("first_bytes", (offset, begin)) in self.conflicts:
                    raise PluginConflictError(self.conflicts["first_bytes", (offset, begin)])
                return self.format_bytes[offset, begin]
        return None

    def output_of(self, suffix: str) -> Provided[OutputSinkSpec] | None:
        """Returns the format of outputs with this suffix; None where nothing writes it."""
        if ("outputs", suffix) in self.conflicts:
            raise PluginConflictError(self.conflicts["outputs", suffix])
        return self.outputs.get(suffix)

    def of_column(self, name: str) -> str | None:
        """Returns the kind of media in a column of this name, None for another name. A column may
        also be called like a suffix, such as "jpg"."""
        own = name.lower()
        return self._found("columns", own) or self._found("suffixes", f".{own}")

    def of_part(self, part_type: str) -> str | None:
        """Returns the kind of a message's part of this type, None for another type."""
        return self._found("part_types", part_type)

    def chat_part(self, part_type: str, model: str = "*") -> Provided[ChatPartSpec] | None:
        """Returns what a message's part of this type becomes for a family, None for a part that is
        no plugin's. A kind's own part types are nobody else's."""
        if part_type.removesuffix("_url") in self.kinds:
            return None
        for family in dict.fromkeys((normalise(model), "*")):
            if ("parts", (family, part_type)) in self.conflicts:
                raise PluginConflictError(self.conflicts["parts", (family, part_type)])
            if (family, part_type) in self.parts:
                return self.parts[family, part_type]
        return None

    def _found(self, field: str, name: object) -> str | None:
        if (field, name) in self.conflicts:
            raise PluginConflictError(self.conflicts[field, name])
        found: str | None = getattr(self, field).get(name)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Claim:
    """A kind, or a format of corpora or chat part, that claims a name. rank: the highest has it;
    choices of the caller come first. origin: None for the engine itself."""

    kind: str
    rank: tuple[bool, int, int]
    origin: PluginOrigin | None
    format: Provided[Any] | None = None


def table_of(
    provided: Iterable[Provided[Any]],
    chooser: Chooser | None = None,
) -> KindTable:
    """Builds the table from the specs of ALWAYS and of all plugins, in load order. chooser: decides
    which plugin reads a format, and which has a type of parts."""
    found = (*_always(), *provided)
    specs: list[tuple[Declared | MediaProcessorSpec, PluginOrigin | None]]
    specs = [(own, None) for own in BUILT_IN]
    specs += [(own.spec, own.origin) for own in found if isinstance(own.spec, MediaProcessorSpec)]
    claims: dict[tuple[str, Any], list[_Claim]] = {}
    for spec, origin in specs:
        # What somebody has installed wins over what is built in.
        rank = (False, spec.priority, 0 if origin is None else origin.standing)
        for name in claimed(spec):
            claims.setdefault(name, []).append(_Claim(kind=spec.kind, rank=rank, origin=origin))
    for other in found:
        for name, claim in _other_claims(other, chooser or Chooser({})):
            claims.setdefault(name, []).append(claim)
    kinds = tuple(dict.fromkeys(spec.kind for spec, _ in specs))
    for kind in kinds:  # nobody else's, whatever the priority
        for own in (kind, f"{kind}_url"):
            claims["part_types", own] = [_Claim(kind=kind, rank=(False, 0, 1), origin=None)]
    best = {name: _best(own) for name, own in claims.items()}

    def of_field(field: str) -> dict[Any, _Claim]:
        return {name: own[0] for (theme, name), own in best.items() if theme == field}

    def decided(field: str) -> dict[Any, str]:
        return {name: own.kind for name, own in of_field(field).items() if own.format is None}

    def of_others(field: str) -> dict[Any, Any]:
        return {name: own.format for name, own in of_field(field).items() if own.format}

    return KindTable(
        kinds=kinds,
        suffixes=MappingProxyType(decided("suffixes")),
        columns=MappingProxyType(decided("columns")),
        first_bytes=MappingProxyType(_longest_first(decided("first_bytes"))),
        part_types=MappingProxyType(decided("part_types")),
        yields=MappingProxyType({spec.kind: spec.yields for spec, _ in specs if spec.yields}),
        formats=MappingProxyType(of_others("suffixes")),
        format_bytes=MappingProxyType(_longest_first(of_others("first_bytes"))),
        parts=MappingProxyType(of_others("parts")),
        outputs=MappingProxyType(of_others("outputs")),
        output_formats=_ours_first(found),
        conflicts=MappingProxyType(
            {name: _conflict(*name, own) for name, own in best.items() if len(own) > 1}
        ),
    )


def _always() -> Iterator[Provided[Any]]:
    """Yields the formats of outputs that need no plugin: what a run has written can be read with
    none of them too."""
    origin = PluginOrigin(name="core", module=ALWAYS, is_builtin=True)
    for spec in importlib.import_module(ALWAYS).provide_output_sinks():
        yield Provided(spec=spec, origin=origin)


def _ours_first(found: Iterable[Provided[Any]]) -> tuple[Provided[OutputSinkSpec], ...]:
    """Returns the formats of outputs, those of this package before others."""
    formats = (own for own in found if isinstance(own.spec, OutputSinkSpec))
    return tuple(sorted(formats, key=lambda own: not own.origin.is_builtin))


def _other_claims(
    provided: Provided[Any], chooser: Chooser
) -> Iterator[tuple[tuple[str, Any], _Claim]]:
    """Yields what a format claims, or a chat part; `use` may name the suffix or the type, or the
    spec."""
    spec, origin = provided.spec, provided.origin
    if not isinstance(spec, CorpusFormatSpec | ChatPartSpec | OutputSinkSpec):
        return
    for field, name in claimed(spec):
        own = {"first_bytes": spec.name, "parts": name[-1]}.get(field, name)
        keys = (spec.name, own)
        is_chosen = any(chooser.is_chosen(key, origin) for key in keys)
        rank = (is_chosen, spec.priority, origin.standing)
        yield (field, name), _Claim(kind=spec.name, rank=rank, origin=origin, format=provided)


def _longest_first(begins: Mapping[tuple[int, bytes], T]) -> dict[tuple[int, bytes], T]:
    ordered = sorted(begins, key=lambda begin: (-len(begin[1]), begin))
    return {begin: begins[begin] for begin in ordered}


def claimed(
    spec: Declared | MediaProcessorSpec | CorpusFormatSpec | ChatPartSpec | OutputSinkSpec,
) -> Iterator[tuple[str, Any]]:
    """Yields the names that a spec declares, as (field, name)."""
    if isinstance(spec, ChatPartSpec):
        for model in map(normalise, spec.models):
            yield from (("parts", (model, name)) for name in spec.types)
        return
    if isinstance(spec, OutputSinkSpec):
        yield from (("outputs", name) for name in spec.suffixes)
        return
    yield from (("suffixes", name) for name in spec.suffixes)
    if not isinstance(spec, CorpusFormatSpec):
        yield from (("columns", name.lower()) for name in spec.columns)
        yield from (("part_types", name) for name in spec.part_types)
    for begin in spec.first_bytes:
        yield "first_bytes", (0, begin) if isinstance(begin, bytes) else begin


def _best(claims: Sequence[_Claim]) -> list[_Claim]:
    """Returns a claim of each kind that has the highest rank: several are a conflict."""
    highest = max(claim.rank for claim in claims)
    by_kind = {
        claim.kind if claim.format is None else id(claim.format): claim
        for claim in claims
        if claim.rank == highest
    }
    return list(by_kind.values())


def _conflict(field: str, name: object, claims: Sequence[_Claim]) -> str:
    said = " and ".join(f"{_what(claim)} {claim.kind!r} of {claim.origin}" for claim in claims)
    others = [claim.origin.name for claim in claims[1:] if claim.origin is not None]
    return (
        f"{name!r} is claimed in `{field}` by {said}, all at priority {claims[0].rank[1]}; decide "
        f"with blocked_plugins={others!r}, or name those to load in `plugins`"
    )


def _what(claim: _Claim) -> str:
    found = "kind" if claim.format is None else describe(claim.format.spec)
    return found.removesuffix(f" {claim.kind}")
