"""Export: the records of one or several outputs, on their way to a file or folder of another
format, counted: each is written, or left out for a reason."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from mmdeploy_llm.data.files.chosen_kinds import installed_kinds
from mmdeploy_llm.data.outputs.base import Readable, Sink
from mmdeploy_llm.data.outputs.opening.merged import MergedOutputs
from mmdeploy_llm.data.outputs.sidecars.options import SidecarOptions
from mmdeploy_llm.data.records.files import Folder
from mmdeploy_llm.data.records.item import Item
from mmdeploy_llm.data.records.media import Blob, LeftOutError, OpenMedia, first_media
from mmdeploy_llm.data.records.outcome import OUTCOMES
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.data.rows.names import is_url
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import KindTable
from mmdeploy_llm.messages import MediaItem
from mmdeploy_llm.system.guarding.claims import claimed
from mmdeploy_llm.system.portable.files import is_same_file
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.prompt import PromptParts

SUPERSEDED = "an older record of an item that has a newer one"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Says which records are exported, and how.

    outcomes: of the records that are exported; None exports all.
    media_root: folder that relative paths of pictures are relative to; None: the working folder.
    part_items: most items of a part, in formats that have parts.
    is_overwritten: whether an existing file is replaced.
    sidecar: of formats with a text beside each picture: the suffix, what happens to a text that is
        there, how it is built.
    kinds: of media, whose files formats with pictures hold.
    repeats: of "kohya": how often a trainer shows each picture in an epoch.
    """

    outcomes: frozenset[str] | None = None
    media_root: str | os.PathLike[str] | None = None
    part_items: int | None = None
    is_overwritten: bool = False
    sidecar: SidecarOptions = field(default_factory=SidecarOptions)
    kinds: KindTable = field(default_factory=installed_kinds)
    repeats: int = 10

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ConfigError(f"repeats must be at least 1, got {self.repeats}")
        for name in self.outcomes or ():
            if name not in OUTCOMES:
                raise ConfigError(
                    f"{name[:40]!r} is no outcome of an item; they are {', '.join(OUTCOMES)}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSummary:
    """Counts what an export has done.

    left_out: records that were not written, by the reason. num_lost: those of them that no option
        leaves out: they lack what the format needs. notes: what else a reader of the output
    should know.
    """

    output: str
    format: str
    num_in: int
    num_out: int
    left_out: Counter[str] = field(default_factory=Counter)
    num_lost: int = 0
    notes: tuple[str, ...] = ()

    @property
    def num_left_out(self) -> int:
        """Records that were not written."""
        return self.left_out.total()


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A record that is exported. stored: opens the media that its output itself holds."""

    record: Record
    number: int
    media_root: str = ""
    stored: OpenMedia = nullcontext

    @property
    def path(self) -> str | None:
        """The path of its first media item; None for one without a file."""
        named = self.record.path
        if named is None:
            named = next((own.name for own in self.record.media[:1] if own.is_file), None)
        return None if named is None else os.path.join(self.media_root, named)

    @property
    def relative(self) -> str:
        """A path for a copy of its picture: the id where that is one, else the name of the file."""
        own = str(self.record.id)
        is_path = self.record.path is not None and not os.path.isabs(own)
        if is_path and os.pardir not in own.split("/"):
            return own
        return os.path.basename(self.path or own)

    @contextmanager
    def media(self) -> Iterator[tuple[Blob, str | None]]:
        """Opens its first media item, with the path of the file: None of what its output holds.
        Raises LeftOutError where there is none."""
        with self.stored() as blob:
            if blob is not None:
                yield blob, None
                return
        if self.path is None:
            raise LeftOutError("it has no file of its own")
        with first_media(self._item_of(self.path)) as blob:
            assert blob is not None
            yield blob, self.path

    def item(self) -> Item:
        """Returns the item, for formats that hold its media."""
        with self.stored() as blob:
            if blob is not None:
                kind = next((own.kind for own in self.record.media), "image")
                source = blob.file.read(blob.size)
                return self._item_of(None, (MediaItem(kind=kind, source=source, options={}),))
        return self._item_of(self.path)

    def _item_of(self, path: str | None, media: tuple[MediaItem, ...] = ()) -> Item:
        record = self.record
        return Item(
            line=record.line or self.number,
            id=self.number if record.id is None else record.id,
            path=path,
            prompt=PromptParts(media=media),
            params=SamplingParams(),
        )


class Export:
    """One export. Formats read `items` (as often as they need) and write them to `output`.

    notes: filled by the format, for the summary.
    """

    def __init__(self, inputs: Collection[str], output: str, options: ExportOptions) -> None:
        """Raises ConfigError for what is no output of a batch, and for an output that is one of the
        inputs."""
        self.inputs, self.output, self.options = tuple(inputs), output, options
        self.notes: list[str] = []
        self._merged = MergedOutputs(list(inputs), options.kinds)
        self.check_apart([output])
        self._left_out: Counter[str] = Counter()
        self._num_met = self._num_lost = 0

    @property
    def mode(self) -> str:
        """How an existing output is treated, as in a run: "new" or "overwrite"."""
        return "overwrite" if self.options.is_overwritten else "new"

    @property
    def sources(self) -> tuple[Readable, ...]:
        """The outputs that are read."""
        return self._merged.sinks

    @property
    def is_complete(self) -> bool:
        """Whether the runs of all outputs have done all of their items."""
        return not self._merged.missing()

    def items(self) -> Iterator[Exported]:
        """Yields the records that are exported in the order of the input, from the first one again
        with each call; counts those that the filter leaves out."""
        self._left_out, self._num_met, self._num_lost = Counter(), 0, 0
        superseded = self._merged.num_read - len(self._merged.index)
        if superseded:
            self._left_out[SUPERSEDED] = superseded
        root = os.fspath(self.options.media_root or "")
        for number, (record, stored) in enumerate(self._merged.stored_records(), 1):
            self._num_met += 1
            if self.options.outcomes is not None and record.outcome not in self.options.outcomes:
                self.leave_out(f"its outcome is {record.outcome}", is_lost=False)
            else:
                yield Exported(record=record, number=number, media_root=root, stored=stored)

    def leave_out(self, reason: str, *, is_lost: bool = True) -> None:
        """Counts a record of `items` that the format does not write. Called once for a record.
        is_lost: whether it lacks something; False: it is not wanted."""
        self._left_out[reason] += 1
        self._num_lost += is_lost

    def write_file(self, pieces: Iterable[bytes]) -> None:
        """Writes the output as one file: whole, or not at all."""
        path = Path(self.output)
        self.check_new(path)  # before its folder is made
        with claimed(path), Folder.open(path.parent) as folder:
            self.check_new(path)
            folder.write(path.name, pieces)

    def check_apart(self, places: Iterable[str | Path]) -> None:
        """Raises ConfigError where one of the places that are written belongs to an output that is
        read, such as the records beside a table, or lies in it."""
        for source in self.sources:
            read = source.places if isinstance(source, Sink) else (source.name,)
            for place, own in product(map(str, places), map(str, read)):
                _check_apart(place, own, source.name)

    def check_local(self) -> None:
        """Raises ConfigError for an output at a URL."""
        if is_url(self.output):
            raise ConfigError(f"{self.output!r} is a URL; this format is written on this machine")

    def check_new(self, path: Path) -> None:
        """Raises ConfigError for a file that exists and may not be replaced."""
        self.check_local()
        if os.path.lexists(path) and not self.options.is_overwritten:
            raise ConfigError(
                f"{str(path)!r} exists already; --overwrite replaces it, --output writes elsewhere"
            )

    def summary(self, form: str) -> ExportSummary:
        """Returns the counts, once `items` is read to its end."""
        num_in = self._merged.num_read
        return ExportSummary(
            output=self.output,
            format=form,
            num_in=num_in,
            num_out=num_in - self._left_out.total(),
            left_out=self._left_out,
            num_lost=self._num_lost,
            notes=(*self._merged.notes, *self.notes),
        )


def _check_apart(written: str, read: str, name: str) -> None:
    """name: of the output that a place is read of."""
    if is_url(written) or is_url(read):
        is_same, is_inside = written.rstrip("/") == read.rstrip("/"), False
    else:
        is_same = is_same_file(written, read)
        is_inside = Path(os.path.realpath(read)) in Path(os.path.realpath(written)).parents
    if is_same and read.rstrip("/") == name.rstrip("/"):
        raise ConfigError(f"{written!r} is one of the outputs that are read; write elsewhere")
    if is_same:
        raise ConfigError(
            f"{written!r}, which would be written, belongs to {name!r}, which is read; write "
            "elsewhere"
        )
    if is_inside:
        raise ConfigError(f"{written!r} lies in {name!r}, which is read; write elsewhere")
