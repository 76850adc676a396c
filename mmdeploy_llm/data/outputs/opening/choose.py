"""Opens outputs of any format, of this package or of a plugin: by a name, or that of a format."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any

from mmdeploy_llm.data.files.chosen_kinds import installed_kinds
from mmdeploy_llm.data.outputs.base import OutputPlace, Sink
from mmdeploy_llm.data.outputs.formats import PartFormat
from mmdeploy_llm.data.outputs.part_writer import PartsSink
from mmdeploy_llm.data.outputs.parts import PART_ITEMS, part_formats
from mmdeploy_llm.errors import ConfigError, PluginContractError
from mmdeploy_llm.hooks import KindTable, OutputSinkSpec, RecordStore
from mmdeploy_llm.hooks.discovery import discover
from mmdeploy_llm.hooks.factories import resolve
from mmdeploy_llm.hooks.files import load_named
from mmdeploy_llm.hooks.records import Provided, describe

from .stored import StoreSink

Format = Provided[OutputSinkSpec]
LOCAL_SCHEMES = ("file", "local")

logger = logging.getLogger(__name__)


def open_sink(
    output: str | os.PathLike[str] | Sink,
    form: str | None = None,
    *,
    part_items: int | None = None,
    journal: str | os.PathLike[str] | None = None,
    kinds: KindTable | None = None,
) -> Sink:
    """Returns the sink of an output; changes nothing.

    output: a file of lines, a table in CSV, a folder of parts, or a URL for parts; a sink is what
        is returned.
    form: the name of a format; None decides by the suffix of the name.
    part_items: most items of a part; None is the format's own number.
    journal: folder for the part that grows when the output is a URL; see `journal_of`.
    kinds: has the formats; None: those of all installed plugins.

    Raises ConfigError for an unknown format, an option that does not fit, and a missing library;
    PluginError when what writes the format cannot be imported.
    """
    if isinstance(output, Sink):
        return output
    name = os.fspath(output)
    kinds = installed_kinds() if kinds is None else kinds
    found = format_of(name, form, kinds)
    if form is None:
        tell_who_writes(name, found, kinds)
    if part_items is not None and part_items < 1:
        raise ConfigError(f"part_items must be at least 1, got {part_items}")
    if not has_parts(found):
        option = None if journal is None else "journal"
        _check_whole(name, found, option if part_items is None else PART_ITEMS)
    folder = None
    if is_remote(name):
        folder = Path(journal_of(name) if journal is None else journal)
    elif journal is not None:
        raise ConfigError(
            "journal is for an output at a URL; one on this machine has its own beside its parts"
        )
    return opened(
        OutputPlace(
            name=name,
            provided=found,
            part_items=part_items,
            journal=folder,
            part_suffixes=part_formats(kinds),
        )
    )


def _check_whole(name: str, found: Format, option: str | None) -> None:
    """Raises ConfigError for a URL, and an option of parts, of an output that has none."""
    own = f"the format {found.spec.name}" + (
        "" if found.origin.is_builtin else f" of {found.origin}"
    )
    if is_remote(name):
        raise ConfigError(
            f"{own} is written on this machine; give a path, or a URL that ends in .parquet"
        )
    if option is not None:
        raise ConfigError(f"{option} has no effect on {own}; leave it out")


def opened(place: OutputPlace) -> Sink:
    """Returns the sink of an output, whatever its factory is. Raises PluginError, naming the
    plugin, when that cannot be imported or is of no kind that OutputSinkSpec knows."""
    found = place.provided
    factory = _factory(found)
    if _is_of(factory, PartFormat):
        return PartsSink(place, factory(place.part_items))
    if _is_of(factory, RecordStore):
        return StoreSink(place)
    sink = factory(place)
    if not isinstance(sink, Sink):
        raise PluginContractError(
            f"{found.origin}: {found.spec.factory}, the factory of {describe(found.spec)}, must be "
            "a class that derives from RecordStore or PartFormat"
        )
    return sink


def part_format(found: Format) -> PartFormat | None:
    """Returns the format of the parts of an output; None where it has others, or none."""
    factory = _factory(found)
    if not _is_of(factory, PartFormat):
        return None
    form: PartFormat = factory(None)
    return form


def _factory(found: Format) -> Callable[..., Any]:
    if found.origin.file is not None:
        load_named(found.origin.file, found.spec.factory.partition(":")[0])
    return resolve(found.spec, found.origin)


def _is_of(factory: object, kind: type) -> bool:
    return isinstance(factory, type) and issubclass(factory, kind)


def has_parts(found: Format) -> bool:
    """Returns whether outputs of a format are folders of parts, or URLs."""
    return PART_ITEMS in found.spec.options


def known_format(name: str, form: str | None, kinds: KindTable) -> Format | None:
    """Returns the format of an output, by the name of the format or the longest suffix of the
    output's; None without one."""
    if form is not None:
        return next((own for own in kinds.output_formats if own.spec.name == form), None)
    lower = name.rstrip("/").lower()
    suffix = max(filter(lower.endswith, kinds.outputs), key=len, default=None)
    return None if suffix is None else kinds.output_of(suffix)


def tell_who_writes(name: str, found: Format, kinds: KindTable) -> None:
    """Warns where a plugin writes an output that this package would write without it."""
    if found.origin.is_builtin:
        return
    ours = (own.spec.suffixes for own in kinds.output_formats if own.origin.is_builtin)
    every = (suffix for suffixes in ours for suffix in suffixes)
    suffix = next(filter(name.rstrip("/").lower().endswith, every), None)
    if suffix is not None:
        logger.warning(
            "%s outputs are written by %s, not by what is built in; "
            "to choose: blocked_plugins=(%r,)",
            suffix,
            found.origin,
            found.origin.name,
        )


def format_of(name: str, form: str | None, kinds: KindTable) -> Format:
    """Returns the format of an output. Raises ConfigError for a suffix of no format, unless the
    format is named, and for one of another format."""
    found = known_format(name, form, kinds)
    formats = ", ".join(dict.fromkeys(own.spec.name for own in kinds.output_formats))
    if found is None:
        check_left_out(name, form)
    if found is None and form is not None:
        raise ConfigError(f"the format must be one of {formats}, got {form[:40]!r}")
    suffix = os.path.splitext(name.rstrip("/"))[1].lower()
    if found is None:
        ends = f"ends in {suffix}" if suffix else "has no suffix"
        raise ConfigError(
            f"the output {name!r} {ends}, which names no format: known are "
            f"{' '.join(kinds.outputs)}; or give the format, one of {formats} (--format)"
        )
    is_fit = name.rstrip("/").lower().endswith(found.spec.suffixes) or os.path.lexists(name)
    other = None if is_fit else known_format(name, None, kinds)
    if other is not None:
        raise ConfigError(f"{name!r} ends in {suffix}, which is {other.spec.name}, and not {form}")
    return found


def check_left_out(name: str, form: str | None, files: Iterable[str] = ()) -> None:
    """Raises ConfigError where the format of an output, which is not loaded, is that of a plugin of
    this package. form: its name, or that of the output tells it, or its files do."""
    ends = [own.rstrip("/").lower() for own in (name, *files)]
    for plugin in discover().plugins:
        if not plugin.is_core:
            continue
        for spec in getattr(plugin.entry_point.load(), "provide_output_sinks", tuple)():
            is_meant = any(own.endswith(spec.suffixes) for own in ends)
            if spec.name == form or (form is None and is_meant):
                raise ConfigError(
                    f"{name!r}: the format {spec.name} is that of {plugin.origin}, which is not "
                    f"loaded: take {plugin.origin.name!r} out of blocked_plugins "
                    "(MMDEPLOY_LLM_BLOCKED_PLUGINS), or use another format"
                )


def check_holds(sink: Sink, *, vectors: bool) -> None:
    """Raises ConfigError for an output whose format does not hold what is written: vectors, or
    answers."""
    holds = sink.place.provided.spec.holds
    if vectors and "vectors" not in holds:
        raise ConfigError(
            f"{sink.name!r} holds no vectors: write NAME.parquet, NAME.npy (arrays of numpy) "
            "or NAME.jsonl"
        )
    if not vectors and "answers" not in holds:
        raise ConfigError(
            f"{sink.name!r} holds vectors, which `mmdeploy-llm embed` writes, and no answers: "
            "write NAME.jsonl or NAME.parquet"
        )


def is_remote(name: str) -> bool:
    """Returns whether an output is at a URL. Raises ConfigError for one of a file."""
    scheme, separator, _ = name.partition("://")
    if separator and scheme.lower() in LOCAL_SCHEMES:
        raise ConfigError(f"{name!r} is on this machine; give its path without {scheme}://")
    return bool(separator) and scheme.isascii() and scheme.replace("+", "").isalnum()


def journal_of(url: str) -> str:
    """Returns the folder in the working folder that has the part that grows of an output at a URL,
    until it is uploaded."""
    name = url.rstrip("/").rpartition("/")[2]
    return f"{name}-{blake2b(url.rstrip('/').encode(), digest_size=4).hexdigest()}.journal"
