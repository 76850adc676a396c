"""Record: the result of one item, one line of JSON, which every command writes in the same form.

The fields of the class are the only declaration of what a record has: reading and writing JSON, the
columns of tables, `batch --help-all` and the table in docs/captioning.md are made from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from .boxes import check_boxes
from .columns import Kind
from .declared import DECLARED, FLOAT, INT, JSON, TEXT, Declared, row, struct
from .item import Media, Vector, part_of
from .outcome import OUTCOMES, Outcome
from .unicode_text import escaped, replaced, unescaped

EXACT = "exact"  # of a line of JSON: what a Record has in its fields `id`, `path` and `media`
ERROR_KEYS = ("code", "class", "message")


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemError:
    """Why an item has no answer. code: 4xx for a fault of the item, 5xx for one of the engine.
    kind: the name of the exception's class."""

    code: int
    kind: str
    message: str

    def to_json(self) -> dict[str, Any]:
        """Returns {"code", "class", "message"}."""
        return dict(zip(ERROR_KEYS, (self.code, self.kind, self.message), strict=True))

    @classmethod
    def from_json(cls, value: Any) -> ItemError | None:
        """Returns the error of a record's JSON, None of null. Raises ValueError."""
        if value is None:
            return None
        if not isinstance(value, dict) or set(value) != set(ERROR_KEYS):
            raise ValueError(f"its error is not an object of {', '.join(ERROR_KEYS)}")
        code, kind, message = (value[key] for key in ERROR_KEYS)
        if type(code) is not int or not isinstance(kind, str) or not isinstance(message, str):
            raise ValueError("its error has a code that is no integer, or no texts")
        return cls(code=code, kind=kind, message=message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Durations in seconds; None for a stage never reached. total: preprocessing to last token."""

    preprocess: float | None = None
    queue: float | None = None
    first_token: float | None = None
    generate: float | None = None
    total: float | None = None


ERROR = struct(**{"code": INT, "class": TEXT, "message": TEXT})
TIMINGS = struct(**{own.name: FLOAT for own in fields(Timings)})
MEDIA = Kind(name="list", item=struct(**{own.name: TEXT for own in fields(Media)}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The result of one item. An item with an error has failed, and no other one has.

    Each row says what the field is, its value where there is none, and as `row` takes them the kind
    of its column and where it is kept.
    """

    id: str | int | None = row(
        "the item's own id, else its line number; of a file its path beneath the root of the "
        "input; null if the id of a line cannot be used (unreadable, or used by another line)",
        None,
        TEXT,
        "always",
        "first",
        page="[Who is who](files.md#who-is-who)",
    )
    line: int | None = row(
        "line number in the input, from 1; not of files", None, INT, "tables", "first"
    )
    path: str | None = row(
        "the file, as it was named or found; only of files", None, TEXT, "tables", "first"
    )
    text: str = row("the answer", "", TEXT, "always", "first")
    outcome: Outcome = row(
        "ok, truncated, malformed, repetition, empty or failed",
        "ok",
        TEXT,
        "always",
        "last",
        page="[Outcomes](outcomes.md)",
    )
    outcome_reason: str | None = row("why, where the outcome alone does not say it", None, TEXT)
    error: ItemError | None = row(
        "null unless the item failed: code (4xx for a fault of the item, 5xx for one of the "
        "engine), class and message",
        None,
        ERROR,
        "always",
        "last",
        parts={f"error_{key}": key for key in ERROR_KEYS},
        page="[Errors](errors.md)",
    )
    reasoning: str | None = row(
        "what the model thought before the answer; null without a reasoning parser",
        None,
        TEXT,
        "always",
        "last",
    )
    finish_reason: str | None = row(
        "stop, tool_calls, length (ended at the maximum length), repetition (ended by "
        "early_stop), error or abort",
        None,
        TEXT,
        "always",
        "last",
    )
    tool_calls: tuple[Mapping[str, Any], ...] = row(
        "the calls, if the model called tools: id, type, and function with name and arguments",
        (),
        JSON,
        "tables",
        "never",
    )
    num_image_tokens: int = row("tokens of its images", 0, INT, "always", "last")
    num_video_tokens: int = row("tokens of its videos", 0, INT, "always", "last")
    num_prompt_tokens: int = row(
        "tokens of the whole prompt, with those of its media", 0, INT, "always", "last"
    )
    num_output_tokens: int = row("tokens of the output", 0, INT, "always", "last")
    num_cached_tokens: int = row(
        "tokens of the prompt that came from the prefix cache", 0, INT, "always", "never"
    )
    num_tokens_by_kind: Mapping[str, int] = row(
        "tokens of the media by kind, of an item with others than images and videos; text are "
        "those of a question that an encoder reads with its picture",
        {},
        JSON,
        "if any",
        "never",
    )
    num_video_frames: int = row("frames used of its videos", 0, INT, "if any", "last")
    video_seconds: float = row(
        "seconds from the first of these frames to the end of the last",
        0.0,
        FLOAT,
        "if any",
        "last",
    )
    media_notes: tuple[str, ...] = row(
        "what of its text or media the model did not get as it is, or what was a guess",
        (),
        JSON,
    )
    timings: Timings = row(
        "seconds: preprocess, queue, first_token, generate, total; null for a stage that was "
        "not reached",
        Timings(),
        TIMINGS,
        "always",
        "last",
        parts={"seconds": "total"},
    )
    prompt: str | None = row(
        "the first 200 characters of the question of a line", None, TEXT, "tables", "last"
    )
    media: tuple[Media, ...] = row(
        "kind and name (path or URL) of the media of a line; of a file only if its name does "
        "not say the kind; pages if only these of a document are meant",
        (),
        MEDIA,
        "tables",
        "last",
    )
    answers: Mapping[str, Any] = row(
        "the answers of several questions by name, or the fields of a schema",
        {},
        JSON,
        page="[Several questions](several_questions.md) and [Checked JSON](checked_json.md)",
    )
    columns: Mapping[str, Any] = row("the columns of the input that --columns names", {}, JSON)
    boxes: tuple[Mapping[str, Any], ...] = row(
        "with --boxes: label and box ([left, top, right, bottom]) of each that the answer has, "
        "in pixels of the picture, upright",
        (),
        JSON,
        page="[Boxes](boxes.md#in-batches)",
    )
    picture_size: tuple[int, ...] = row("with --boxes: [width, height] of the picture", (), JSON)
    embedding: Vector | None = row(
        "of embed: shape ([size], or [tokens, size]), and float32, base64 of little-endian numbers",
        None,
        JSON,
        page="[Embeddings](embeddings.md)",
    )
    outputs: tuple[Mapping[str, Any], ...] = row(
        "every sample, with n greater than 1 or log-probabilities; text and the others are "
        "those of the first",
        (),
        JSON,
        "tables",
        "never",
    )
    endpoint: str = row(
        "the url of a line of OpenAI's format", "", TEXT, page="[OpenAI's lines](openai_lines.md)"
    )
    content: str = row(
        "with --dedupe: digest of what the item asks, with the content of its media",
        "",
        TEXT,
        "if any",
        "never",
        page="[The same picture twice](files.md#the-same-picture-twice)",
    )
    same_as: str | int | None = row(
        "with --dedupe: id of the item whose answer this is; it has no counts and no times then",
        None,
        TEXT,
    )
    item_digest: str = row(
        "of the item's input, with size and time of its files; --resume compares it",
        "",
        TEXT,
        "tables",
        "never",
        page="[Resuming](#resuming)",
    )
    config_digest: str = row(
        "of model, options and parameters, which OUTPUT.config.json has; --resume compares it",
        "",
        TEXT,
        "tables",
        "never",
    )

    def __post_init__(self) -> None:
        if self.error is not None:
            object.__setattr__(self, "outcome", "failed")
        elif self.outcome == "failed":
            raise ValueError("an item that failed has an error")

    @property
    def is_ok(self) -> bool:
        """Whether the item ended without an error; its outcome may be "empty" all the same."""
        return self.error is None

    @property
    def has_one_text(self) -> bool:
        """Whether its text is all of its answer: it has not failed, has one sample and no others to
        several questions, and calls no tools."""
        return self.is_ok and not (self.answers or self.tool_calls or self.outputs[1:])

    @property
    def num_media_tokens(self) -> int:
        """Tokens of the item's media of all kinds, without text that an encoder reads with them."""
        return sum(num for kind, num in self.media_tokens.items() if kind != "text")

    @property
    def media_tokens(self) -> dict[str, int]:
        """Tokens of the item's media by kind, those of which there are any."""
        own = {"image": self.num_image_tokens, "video": self.num_video_tokens}
        found = {**own, **self.num_tokens_by_kind}
        return {kind: count for kind, count in found.items() if count}

    @property
    def lack(self) -> str | None:
        """The outcome with its reason, of an item that has not failed and has not what was asked
        for: "truncated: max_tokens was reached"."""
        if self.outcome in ("failed", "ok"):
            return None
        return f"{self.outcome}: {self.outcome_reason}" if self.outcome_reason else self.outcome

    @property
    def key(self) -> str:
        """The string that identifies the item when a run is resumed."""
        return key_of(self.id, self.line)

    @property
    def part(self) -> str:
        """The end of its id that names a part of its file, such as "#page=3"; "" for all of it."""
        return part_of(self.id, self.path)

    @property
    def failure(self) -> str:
        """The kind of failure, code and class, such as "400 MediaError"; "" without one."""
        return "" if self.error is None else f"{self.error.code} {self.error.kind}"

    def to_values(self) -> dict[str, Any]:
        """Returns the JSON object."""
        values = asdict(self)
        values["error"] = None if self.error is None else self.error.to_json()
        for name, own in FIELDS.items():
            if not (own.kept == "always" or values.get(name)):
                values.pop(name, None)
        for media in values.get("media", ()):
            if media["pages"] is None:
                del media["pages"]
        return values

    def to_json(self) -> str:
        """Returns one line of JSON, without the line break."""
        values = self.to_values()
        line = json.dumps(values, ensure_ascii=False)
        try:
            line.encode()
        except UnicodeEncodeError:  # a file name that is not UTF-8
            line = json.dumps({**replaced(values), EXACT: self._exact()}, ensure_ascii=False)
        return line

    def _exact(self) -> dict[str, Any]:
        """Returns what resume and the report need exactly, as ASCII."""
        texts = {"id": self.id, "path": self.path}
        exact: dict[str, Any] = {
            name: escaped(text) for name, text in texts.items() if isinstance(text, str)
        }
        return {**exact, "media": [escaped(item.name) for item in self.media]}

    @classmethod
    def from_json(cls, line: str | bytes) -> Record:
        """Reads what `to_json` wrote. Raises ValueError for anything else."""
        values = json.loads(line)
        if not isinstance(values, dict):
            raise ValueError("it is not an object")
        return cls.from_values(values)

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> Record:
        """Returns the record of a JSON object, in which null is the same as no value where a record
        may lack one. Raises ValueError when it is none."""
        if None in values.values():
            values = {
                name: own for name, own in values.items() if own is not None or _is_kept(name)
            }
        _check(values)
        try:
            return cls(**_restored({**values, **_nested(values)}))
        except (TypeError, AttributeError) as error:
            raise ValueError(str(error)) from None


FIELDS: Mapping[str, Declared] = MappingProxyType(
    {own.name: own.metadata[DECLARED] for own in fields(Record)}
    | {
        EXACT: Declared(
            says="if a text is not Unicode, such as a file name that is not UTF-8: id, path and "
            "media with Python's escapes (\\udcff is byte FF of a name); the others have U+FFFD",
            kind=JSON,
            csv="never",
        )
    }
)


def key_of(item_id: str | int | None, line: int | None) -> str:
    """Returns the string that identifies an id, or a line without one; 7 and "7" are the same."""
    return f"\0line {line}" if item_id is None else str(item_id)


def _is_kept(name: str) -> bool:
    own = FIELDS.get(name)
    return own is None or own.kept == "always"


def _check(values: Mapping[str, Any]) -> None:
    """Raises ValueError unless the fields that every record has are there, and numbers are numbers:
    a line of an input, which may have an id and a prompt, is no result."""
    for name, own in FIELDS.items():
        if name not in values and own.kept == "always":
            raise ValueError(f"it has no {name}")
        if own.kind.name == "int" and type(values.get(name, 0)) is not int:
            raise ValueError(f"its {name} is not an integer")
    known, outcome = values["id"], values["outcome"]
    is_named = isinstance(known, (str, int)) and not isinstance(known, bool)
    if not (is_named or (known is None and "line" in values)):
        raise ValueError("it has no id or line")
    if outcome not in OUTCOMES:
        raise ValueError(f"its outcome is {str(outcome)[:20]!r}, which is none")
    if (outcome == "failed") != (values["error"] is not None):
        raise ValueError(f"its outcome is {outcome}, which its error contradicts")
    _check_by_kind(values.get("num_tokens_by_kind", {}))
    check_boxes(values.get("boxes", ()), values.get("picture_size", ()))


def _check_by_kind(value: Any) -> None:
    if not isinstance(value, dict) or not all(isinstance(each, int) for each in value.values()):
        raise ValueError("its num_tokens_by_kind is not an object of integers")


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Builds the fields that are objects or lists."""
    lists = ("outputs", "tool_calls", "boxes", "picture_size")
    return {
        "timings": Timings(**values["timings"]),
        "error": ItemError.from_json(values["error"]),
        "media": tuple(Media(**item) for item in values.get("media", ())),
        "embedding": Vector.from_json(values.get("embedding")),
        **{name: tuple(values.get(name, ())) for name in lists},
    }


def _restored(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values with the exact texts in place of those that JSON could hold."""
    exact = values.pop(EXACT, None)
    if exact is None:
        return values
    texts = {name: unescaped(exact[name]) for name in ("id", "path") if name in exact}
    names = map(unescaped, exact.get("media", ()))
    media = (replace(item, name=name) for item, name in zip(values["media"], names, strict=True))
    return {**values, **texts, "media": tuple(media)}
