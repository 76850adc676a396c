"""Checks of a format of parts: that complete parts have the records, their vectors and pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

from mmdeploy_llm.data.outputs.opening.choose import part_format
from mmdeploy_llm.data.outputs.part_writer import PartsSink
from mmdeploy_llm.data.outputs.public import Record, Vector
from mmdeploy_llm.data.outputs.scan import Kept, RecordIndex
from mmdeploy_llm.data.records.item import Item
from mmdeploy_llm.data.records.outcome import NOTHING
from mmdeploy_llm.data.vectors.parts import array_reader
from mmdeploy_llm.testing.models.base import Check, CheckSkipped, attributed, demand, since
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.prompt import PromptParts

from .outputs import OutputSubject, records_of

PART_ITEMS = 3
PICTURE = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 9


@contextmanager
def _parts(subject: OutputSubject) -> Iterator[tuple[Path, PartsSink]]:
    """Yields an output of parts with PART_ITEMS records, with its path."""
    if part_format(subject.place(Path()).provided) is None:
        raise CheckSkipped("it is no format of parts")
    with subject.output(PART_ITEMS) as (path, sink):
        assert isinstance(sink, PartsSink), "its factory is a PartFormat"
        yield path, sink


def _records(subject: OutputSubject) -> list[Record]:
    """Returns records of which every second one has failed; the first three others have vectors
    where the format holds some."""
    import numpy as np

    records = records_of([f"text {number}" for number in range(9)])
    if "vectors" not in subject.spec.holds:
        return records
    rows = np.random.default_rng(0).standard_normal((len(records), 6)).astype("f4")
    return [
        replace(own, embedding=Vector.of(row)) if own.is_ok and number < 6 else own
        for number, (own, row) in enumerate(zip(records, rows, strict=True))
    ]


def _run(sink: PartsSink, records: Sequence[Record], picture: Path | None = None) -> RecordIndex:
    """Writes records as a run does, to its end. picture: of each item."""

    def line_of(record: Record) -> int | None:
        return record.line

    with attributed("a run in several parts", "see PartFormat"):
        kept = sink.scan(line_of, retried=NOTHING) if sink.exists() else Kept()
        with sink.writer("resume", kept) as writer:
            for number, record in enumerate(records):
                writer.write(record, record.line, _item(number, picture))
            writer.finish(line_of)
            return writer.index


def _item(number: int, picture: Path | None) -> Item | None:
    if picture is None:
        return None
    prompt, params = PromptParts(), SamplingParams()
    return Item(line=number + 1, id=number, prompt=prompt, params=params, path=str(picture))


def _demand_read(sink: PartsSink, expected: Sequence[Record], when: str) -> None:
    with attributed("reading parts", "see PartReader"):
        found = [entry.record for entry in sink.entries()]
    names = [own.id for own in found], [own.id for own in expected]
    demand(names[0] == names[1], f"{when} parts have {names[0]!r:.90}, not {names[1]!r:.90}")
    for own, wanted in zip(found, expected, strict=True):
        what = "vector" if replace(own, embedding=wanted.embedding) == wanted else "record"
        demand(own == wanted, f"{when} the {what} of {own.id!r} is not what was written")


@since(1, 2)
def parts_have_what_was_written(subject: OutputSubject) -> None:
    """Complete parts have the records and vectors that were written, also after some of them were
    written again, and positions lead to them."""
    records = _records(subject)
    with _parts(subject) as (_, sink):
        index = _run(sink, records)
        num_parts = -(-len(records) // PART_ITEMS)
        demand(
            len(sink.parts()) == num_parts and not sink.open_parts(),
            f"{len(records)} records in parts of {PART_ITEMS} make {len(sink.parts())} parts, not "
            f"{num_parts}; `limits` must keep what the factory was given",
        )
        _demand_read(sink, records, "after a run")
        positions = index.offsets()[::-1]
        with attributed("reading records by their positions", "see `at` of PartReader"):
            found = list(sink.records_at(positions))
        demand(found == records[::-1], "positions lead to other records; see `at` of PartReader")
        again = [replace(records[number], text="newer") for number in (0, 4, 5)]
        _run(sink, again)
        left = [own for number, own in enumerate(records) if number not in (0, 4, 5)]
        _demand_read(sink, [*left, *again], "after three were done again")


@since(1, 2)
def arrays_have_the_vectors(subject: OutputSubject) -> None:
    """The array of a part has the vectors of its records, where `places` says, for `keys`."""
    import numpy as np

    records = _records(subject)
    with _parts(subject) as (_, sink):
        if not sink.form.has_arrays:
            raise CheckSkipped("it has no arrays")
        _run(sink, records)
        for name in sink.parts().values():
            with (
                attributed("reading an array", "see ArrayReader"),
                closing(array_reader(sink.form, sink.shelf.open(name), name)) as reader,
            ):
                entries, places = list(reader.entries()), reader.places()
                keys = list(reader.keys())
                expected = [entry.record.key for entry in entries]
                demand(keys == expected, f"keys are {keys!r:.90}, not {expected!r:.90}")
                demand(len(places) == len(keys), f"{len(keys)} records have {len(places)} places")
                for place, entry in zip(places, entries, strict=True):
                    own = entry.record.embedding
                    rows = reader.array[place.row : place.row + place.num_rows]
                    wanted = rows[:0] if own is None else np.atleast_2d(own.array())
                    demand(
                        np.array_equal(rows, wanted),
                        f"the rows of {entry.record.id!r} are not its vector; see `places`",
                    )


@since(1, 2)
def pictures_are_stored(subject: OutputSubject) -> None:
    """The first picture of an item that has an answer stands beside its record, byte by byte."""
    records = records_of(["one", "two", "three"])
    with _parts(subject) as (path, sink):
        if "media_root" not in subject.spec.options:
            raise CheckSkipped("it stores no pictures: `options` has no media_root")
        picture = path.with_name("picture.png")
        picture.write_bytes(PICTURE)
        positions = _run(sink, records, picture).offsets()
        for record, position in zip(records[::2], positions[::2], strict=True):
            with (
                attributed("opening a stored picture", "see `media` of PartReader"),
                sink.stored_media(position) as blob,
            ):
                found = None if blob is None else (blob.suffix, blob.file.read(blob.size))
            demand(
                found == ("png", PICTURE),
                f"the picture of {record.id!r} is {found!r:.60}, not a png of {len(PICTURE)} "
                "bytes; see `append` of PartFormat",
            )


CHECKS: tuple[Check, ...] = (
    parts_have_what_was_written,
    arrays_have_the_vectors,
    pictures_are_stored,
)
