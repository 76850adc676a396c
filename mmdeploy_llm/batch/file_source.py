"""FileSource: the items of a list of media, one for each file."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from mmdeploy_llm.batch.corpus.columns import check_no_columns
from mmdeploy_llm.batch.questions.asks import NO_ASKS, Asks, questions_about
from mmdeploy_llm.data.files.files import Found, FoundFile
from mmdeploy_llm.data.files.question_fields import OF_FILES, SIDECAR, TEXT_LAYER, filled, names_in
from mmdeploy_llm.data.files.walk import Ids
from mmdeploy_llm.data.outputs.sidecars.options import DEFAULT_SUFFIX
from mmdeploy_llm.data.outputs.sidecars.places import Places, Spot, read_sidecar
from mmdeploy_llm.data.records.identity import digest_of, file_state
from mmdeploy_llm.data.records.ids import Selection
from mmdeploy_llm.data.records.item import Item, Media, Question, kind_of_path
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.data.rows.names import is_url
from mmdeploy_llm.data.rows.rows import BadItem, Lines
from mmdeploy_llm.engine.intake.prompts import PromptReader
from mmdeploy_llm.errors import ConfigError, RequestError
from mmdeploy_llm.values.params import SamplingParams

from .items import with_system

FEWEST = 64  # fewer files are read as they are listed
GOLDEN = (5**0.5 - 1) / 2


def mixed(sizes: Mapping[str, int]) -> list[str]:
    """Returns the paths in an order of which every part has files of all sizes in equal shares, so
    that the time for the first ones tells the time for the rest. The same files are always read in
    the same order; fewer than FEWEST stay as they are."""
    paths = [*sizes]
    if len(paths) < FEWEST:
        return paths
    by_size = sorted(paths, key=sizes.__getitem__)
    # Multiples of the golden ratio modulo 1 fill the interval evenly, however many are taken.
    ranks = sorted(range(len(paths)), key=lambda number: number * GOLDEN % 1)
    for rank, number in enumerate(ranks):
        paths[number] = by_size[rank]
    return paths


def sizes_of(paths: Iterable[str]) -> dict[str, int]:
    """Returns the bytes of every file, 0 of one that cannot be found."""
    return {path: _size(path) for path in paths}


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except (OSError, ValueError):  # its record will say what is wrong with it
        return 0


# "past": its file has no such part any more; "replaced": other items stand for all of its file.
Fate = Literal["kept", "past", "replaced"]


class FileSource:
    """Builds one item per file: the questions about it. question: None asks for a description,
    unless `asks` has questions. sidecar: suffix of the text beside a file, whose content stands for
    {sidecar} in a question. text_of: returns the text that a document itself holds, for
    {text_layer}.

    names: those that a question may have, see data/files/question_fields.py.
    root: the folder that ids are relative to.
    """

    names: ClassVar[tuple[str, ...]] = OF_FILES

    def __init__(
        self,
        found: Found,
        params: SamplingParams,
        selection: Selection,
        *,
        question: str | None = None,
        asks: Asks = NO_ASKS,
        template_kwargs: Mapping[str, Any] | None = None,
        system: str | None = None,
        sidecar: str = DEFAULT_SUFFIX,
        text_of: Callable[[FoundFile], str] | None = None,
    ) -> None:
        texts = (*([] if question is None else [question]), *asks.questions.values())
        for text in texts:
            check_no_columns(text, (file.path for file in found.files), self.names)
        self._named, self._text_of = names_in(texts), text_of
        self._found, self._selection = found, selection.over(len(found.files))
        self._prompts = PromptReader.of_kinds(found.kinds)
        self.about = self._selection.words(len(found.files))
        self._params, self._question, self._asks = params, question, asks
        self._template_kwargs = dict(template_kwargs or {})
        self._system, self._sidecar = system, sidecar
        self.skipped = found.skipped
        self._sizes = sizes_of(file.path for file in found.files)
        self.use_root(found.root)
        self.total: int | None = len(self._files)
        own = [self._sizes[file.path] for file in self._files.values()]
        self.mean_size: float | None = sum(own) / max(1, len(own))
        kinds = {file.kind for file in self._files.values()}
        self.unit = "image" if kinds <= {"image"} else "file"

    def use_root(self, root: str) -> None:
        """Counts the ids from another root, before the items are read."""
        self.root, ids = root, Ids(root)
        self._files: dict[str, FoundFile] = {}
        self.ids: dict[str, int] = {}
        for line, file in enumerate(self._found.files, 1):
            own = ids.of(file.place)
            self.ids[own] = line
            if self._selection.takes(line) and self._selection.takes_id(own, file.path):
                self._files[own] = file

    def __iter__(self) -> Iterator[Item | BadItem]:
        """Yields the items, large files among small ones unless records have the input's order.
        Raises ConfigError for an id that --only names and no file has."""
        self._check_only()
        return map(self._item, self._ordered())

    def read(self, lines: Lines) -> Iterator[Item | BadItem]:
        """Yields the items of these files."""
        return (self._item(own) for own in self._files if lines.takes(self.ids[own]))

    def sizes(self) -> Mapping[int, int]:
        """Returns the bytes of every file by its line."""
        return {self.ids[own]: self._sizes[file.path] for own, file in self._files.items()}

    def kinds(self) -> Mapping[int, str]:
        """Returns the kind of every file by its line."""
        return {self.ids[own]: file.kind for own, file in self._files.items()}

    def _item(self, own: str) -> Item | BadItem:
        file = self._files[own]
        try:
            return self._asks.shaped(self._good(own, file), is_ours=True)
        except RequestError as error:  # its sidecar, its text
            return BadItem(
                line=self.ids[own],
                id=own,
                path=file.path,
                message=str(error),
                kind=type(error).__name__,
                code=error.code,
            )

    def _good(self, own: str, file: FoundFile) -> Item:
        path = file.path
        is_named = kind_of_path(path) == file.kind
        questions = self._questions(file)
        return Item(
            line=self.ids[own],
            id=own,
            path=path,
            prompt=questions[0].prompt,
            questions=questions if self._asks.questions else (),
            params=self._params,
            # Where the name says something else, the record says what the file is.
            media=() if is_named else (Media(kind=file.kind, name=os.path.abspath(path)),),
            digest=digest_of(file_state(path)),
            size=self._sizes[path],
        )

    def _ordered(self) -> Iterable[str]:
        if self._selection.order == "input":
            return self._files
        return mixed({own: self._sizes[file.path] for own, file in self._files.items()})

    def _check_only(self) -> None:
        known = {*self.ids, *(file.path for file in self._found.files)}
        if missing := sorted((self._selection.only or frozenset()) - known):
            near = difflib.get_close_matches(missing[0], known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"no file of the input has the id {missing[0]!r}{hint} (--only)")

    def counted(self) -> int | None:
        """Returns the number of files, which are listed once."""
        return self.total

    def place_of(self, record: Record) -> int | None:
        """Returns the position of the record's file in the list; None when not selected."""
        line = self.ids.get(str(record.id)) if record.path is not None else None
        is_ours = line is not None and self._selection.takes(line)
        return line if is_ours and self._selection.takes_id(record.id, record.path) else None

    def file_of(self, record: Record) -> str | None:
        """Returns the path of the record's file; None when it is not in the list."""
        line = self.ids.get(str(record.id)) if record.path is not None else None
        return None if line is None else self._found.files[line - 1].path

    def file_id(self, own: str) -> str:
        """Returns the id of the file that an item with this id is about."""
        return own

    def fate_of(self, record: Record) -> Fate:
        """Returns whether what a record is about is still a part of its file, which is in the
        list."""
        return "kept"

    def spot_of(self, record: Record) -> Spot:
        """Returns where the record's file is. Raises RequestError when it is not in the list."""
        line = self.ids.get(str(record.id)) if record.path is not None else None
        if line is None:
            raise RequestError("its file is not one of the input's")
        return self._spot(self._found.files[line - 1])

    def _questions(self, file: FoundFile) -> tuple[Question, ...]:
        """Builds the prompts, with an absolute path where the name would be read as a URL."""
        content = [{"type": file.kind, file.kind: self._given(file)}]
        kwargs = dict(self._template_kwargs)
        given = {
            "messages": [{"role": "user", "content": content}],
            "chat_template_kwargs": kwargs,
        }
        prompt = self._prompts.read(given)
        assert prompt.messages is not None
        prompt = replace(prompt, messages=with_system(prompt.messages, self._system))
        asked = self._asks.questions or {"": self._plain(file)}
        if self._named:
            values = self._values(file)
            asked = {name: filled(text, values) for name, text in asked.items()}
        return questions_about(prompt, asked)

    def _plain(self, file: FoundFile) -> str:
        """Returns the only question about a file."""
        return self._question or self._asks.described(file.kind)

    def _given(self, file: FoundFile) -> Any:
        """Returns a file as a part of a message has it."""
        return os.path.abspath(file.path) if is_url(file.path) else file.path

    def _values(self, file: FoundFile) -> dict[str, Any]:
        """Returns what stands for the names that the questions have. Raises RequestError."""
        found: dict[str, Any] = {}
        if SIDECAR in self._named:
            with Places(self._found.kinds) as places:
                found[SIDECAR] = read_sidecar(self._spot(file), self._sidecar, places)
        if TEXT_LAYER in self._named:
            assert self._text_of is not None, "who plans a batch knows what opens documents"
            found[TEXT_LAYER] = self._text_of(file)
        return found

    def _spot(self, file: FoundFile) -> Spot:
        return Spot(root=file.place.base, relative=file.place.relative)
