"""Chooses the sink of an output by its name, or by the name of a format.

The formats of this package come through no hook: what a run has written can be read, resumed and
exported whatever plugins are installed, blocked or named, with none of them too. They also do more
than a RecordStore promises: parts, uploads, journals. A plugin of a higher priority takes a suffix.
"""

from __future__ import annotations

import logging
import os
from hashlib import blake2b
from pathlib import Path

from mmdeploy_llm.data.outputs.base import Sink
from mmdeploy_llm.data.outputs.csv_table import CsvSink
from mmdeploy_llm.data.outputs.formats import PartFormat
from mmdeploy_llm.data.outputs.jsonl import JsonlSink
from mmdeploy_llm.data.outputs.lines import LineParts
from mmdeploy_llm.data.outputs.npy import NpyParts
from mmdeploy_llm.data.outputs.openai import OpenAISink
from mmdeploy_llm.data.outputs.parquet import ParquetParts
from mmdeploy_llm.data.outputs.part_writer import PartsSink
from mmdeploy_llm.data.outputs.tars import TarParts
from mmdeploy_llm.data.rows.names import BUILT_IN_KINDS
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import KindTable, OutputSinkSpec
from mmdeploy_llm.hooks.records import PluginOrigin, Provided

from .stored import StoreSink

SUFFIXES = {".parquet": "parquet", ".pq": "parquet", ".tar": "webdataset", ".npy": "npy"}
ALL_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", **SUFFIXES}
FORMATS = ("jsonl", "csv", "openai", "parquet", "webdataset", "npy")
ONE_FILE = {"jsonl": JsonlSink, "csv": CsvSink, "openai": OpenAISink}
OWN_PARTS: dict[str, type[ParquetParts | NpyParts]] = {"parquet": ParquetParts, "npy": NpyParts}
# Its library commits whole versions, so it keeps records as a plugin's format does.
LANCE = Provided(
    spec=OutputSinkSpec(
        name="lance",
        suffixes=(".lance",),
        factory="mmdeploy_llm.data.outputs.opening.lance_store:LanceStore",
    ),
    origin=PluginOrigin(name="lance", module="mmdeploy_llm.data.outputs.opening", is_builtin=True),
)
LOCAL_SCHEMES = ("file", "local")

logger = logging.getLogger(__name__)


def open_sink(
    output: str | os.PathLike[str] | Sink,
    form: str | None = None,
    *,
    part_items: int | None = None,
    journal: str | os.PathLike[str] | None = None,
    kinds: KindTable = BUILT_IN_KINDS,
) -> Sink:
    """Returns the sink of an output; changes nothing.

    output: a file of lines, a table in CSV, a folder of parts, or a URL for parts; a sink is what
        is returned.
    form: one of FORMATS; None decides by the suffix of the name.
    part_items: most items of a part; None is the format's own number.
    journal: folder for the part that grows when the output is a URL; see `journal_of`.
    kinds: has the formats of plugins; `form` may be the name of one.

    Raises ConfigError for an unknown format, an option that does not fit, and a missing library.
    """
    if isinstance(output, Sink):
        return output
    name = os.fspath(output)
    store = stored_format(name, form, kinds)
    if store is not None:
        tell_who_writes(name, form, store)
        return _store(name, store, part_items, journal)
    kind = format_of(name, form, kinds)
    if part_items is not None and part_items < 1:
        raise ConfigError(f"part_items must be at least 1, got {part_items}")
    if is_remote(name):
        if kind in ("csv", "openai"):
            raise ConfigError(
                f"the format {kind} is written on this machine; give a path, or a URL that ends in "
                ".parquet"
            )
        folder = Path(journal_of(name) if journal is None else journal)
        return PartsSink.remote(name, folder, parts_format(kind, part_items))
    if journal is not None:
        raise ConfigError(
            "journal is for an output at a URL; one on this machine has its own beside its parts"
        )
    if kind not in ONE_FILE:
        return PartsSink.local(Path(name), parts_format(kind, part_items))
    if part_items is not None:
        raise ConfigError(f"part_items is for an output of parts; {kind} is one file")
    return ONE_FILE[kind](Path(name))


def _store(
    name: str,
    found: Provided[OutputSinkSpec],
    part_items: int | None,
    journal: str | os.PathLike[str] | None,
) -> StoreSink:
    """Returns the sink of a plugin's format. Raises ConfigError for what it does not have."""
    own = f"the format {found.spec.name} of {found.origin}"
    if is_remote(name):
        raise ConfigError(f"{own} is written on this machine; give a path")
    if part_items is not None or journal is not None:
        option = "journal" if part_items is None else "part_items"
        raise ConfigError(f"{option} has no effect on {own}; leave it out")
    return StoreSink(Path(name), found)


def stored_format(name: str, form: str | None, kinds: KindTable) -> Provided[OutputSinkSpec] | None:
    """Returns the format of a plugin that an output has, by its name or the longest suffix. Of a
    suffix that is written without plugins it is the plugin's unless its priority is below 0."""
    if form is not None:
        if form in FORMATS:
            return None
        if form == LANCE.spec.name:
            return LANCE
        named = (own for own in kinds.outputs.values() if own.spec.name == form)
        return next(named, None)
    lower = name.rstrip("/").lower()
    suffixes = sorted(kinds.outputs, key=len, reverse=True)
    suffix = next((own for own in suffixes if lower.endswith(own)), None)
    found = None if suffix is None else kinds.output_of(suffix)
    if suffix is None and lower.endswith(LANCE.spec.suffixes):
        return LANCE
    if found is None or suffix not in ALL_SUFFIXES:
        return found
    return None if found.spec.priority < 0 else found


def tell_who_writes(name: str, form: str | None, store: Provided[OutputSinkSpec]) -> None:
    """Warns where a plugin writes an output that this package would write without it, unless its
    format was named."""
    suffix = next(filter(name.rstrip("/").lower().endswith, ALL_SUFFIXES), None)
    if form is None and suffix is not None:
        logger.warning(
            "%s outputs are written by %s, not by what is built in; "
            "to choose: blocked_plugins=(%r,)",
            suffix,
            store.origin,
            store.origin.name,
        )


def format_of(name: str, form: str | None, kinds: KindTable = BUILT_IN_KINDS) -> str:
    """Returns the format of an output. Raises ConfigError for a suffix of no format, unless the
    format is named, and for one of another format."""
    formats = ", ".join((*FORMATS, *{own.spec.name: own for own in kinds.outputs.values()}))
    if form is not None and form not in FORMATS:
        raise ConfigError(f"the format must be one of {formats}, got {form[:40]!r}")
    suffix = os.path.splitext(name.rstrip("/"))[1].lower()
    found = ALL_SUFFIXES.get(suffix)
    if form is not None:
        is_fit = found in (None, form) or (form, found) == ("openai", "jsonl")
        if not is_fit and not os.path.lexists(name):
            raise ConfigError(f"{name!r} ends in {suffix}, which is {found}, and not {form}")
        return form
    if found is None:
        ends = f"ends in {suffix}" if suffix else "has no suffix"
        raise ConfigError(
            f"the output {name!r} {ends}, which names no format: known are "
            f"{' '.join((*ALL_SUFFIXES, *kinds.outputs))}; "
            f"or give the format, one of {formats} (--format)"
        )
    return found


def check_holds(sink: Sink, *, vectors: bool) -> None:
    """Raises ConfigError for an output whose format does not hold what is written: vectors, or
    answers."""
    if vectors and isinstance(sink, (CsvSink, OpenAISink)):
        raise ConfigError(
            f"{sink.name!r} holds no vectors: write NAME.parquet, NAME.npy (arrays of numpy) "
            "or NAME.jsonl"
        )
    is_npy = isinstance(sink, PartsSink) and sink.form.name == "npy"
    if not vectors and (is_npy or (isinstance(sink, StoreSink) and sink.provided is LANCE)):
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


def parts_format(kind: str, part_items: int | None = None) -> PartFormat:
    """Returns a format of parts, by its name."""
    if kind in OWN_PARTS:
        return OWN_PARTS[kind](part_items)
    return TarParts(part_items) if kind == "webdataset" else LineParts(part_items)
