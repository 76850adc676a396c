"""Record: the result of one item, one line of JSON. `batch` and `caption` write the same fields:

id             the item's own id, else its line number; for files the path beneath the input's
               root; null when the id of a line cannot be used (unreadable, or used by another line)
line           line number in the input, from 1; absent for files
path           the file, as given; only for files
text           the answer
reasoning      the reasoning before the answer; null without a reasoning parser
tool_calls     [{"id", "type", "function": {"name", "arguments"}}]; absent without calls
finish_reason  "stop", "tool_calls", "length", "repetition", "error" or "abort"
error_code     200 for success, 4xx for a fault of the item, 5xx for a fault of the engine
error_msg, error_class   null for success
error          {"code", "message"} with the same values; null for success
outcome        "ok", "empty", "truncated", "repetition" or "failed", see outcome.py
outcome_reason why, where the outcome alone does not say it; absent otherwise
num_*_tokens   num_prompt_tokens includes those of images and videos
num_tokens_by_kind   {kind: tokens} of an item with other media than images and videos
num_video_frames, video_seconds   frames used of the item's videos, and the seconds that they
               cover; absent without videos
timings        seconds: preprocess, queue, first_token, generate, total; null if never reached
media          [{"kind", "name"}] of a line's media; name: its path or URL if it has one; of a file
               only where its kind is not that of its name; "pages" too where only these of a
               document are meant
prompt         the first 200 characters of the line's question
answers        {name: text} of several questions, or the values of a schema; absent otherwise
embedding      {"shape": [size] or [tokens, size], "float32": base64} of `embed`; absent otherwise
boxes          [{"label", "box": [left, top, right, bottom]}] that the answer has, in pixels of the
               picture, upright; with --boxes only. picture_size: its [width, height] then
columns        {name: value} of the input, those that --columns names
outputs        all samples, with n > 1 or log-probabilities; `text` etc. are those of the first
content        digest of what the item asks, with the content of its media; with --dedupe only
same_as        id of the item whose answer this is: it asked the same; no counts and no times then
item_digest    of the item's input, with size and modification time of its files; resume compares it
config_digest  of model, options and parameters; the file OUTPUT.config.json has their values
endpoint       that a line of OpenAI's format was meant for; absent for others
exact          {"id", "path", "media"} with Python's escapes, when a text is not Unicode: a record
               has U+FFFD for every lone surrogate, such as those of file names that are not UTF-8
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from mmdeploy_llm.errors import OK

from .boxes import check_boxes
from .item import Media, Vector, part_of
from .outcome import OUTCOMES, Outcome, derived
from .unicode_text import escaped, replaced, unescaped

# Left out of the JSON when empty.
OPTIONAL = (
    *("num_video_frames", "video_seconds", "num_tokens_by_kind"),
    *("line", "path", "tool_calls", "media", "prompt", "outputs"),
    *("item_digest", "config_digest", "columns", "answers", "endpoint", "outcome_reason"),
    *("content", "same_as", "boxes", "picture_size", "embedding"),
)
ALWAYS = ("text", "error")  # in every record of every version
COUNTS = (
    *("num_image_tokens", "num_video_tokens", "num_prompt_tokens", "num_output_tokens"),
    "num_video_frames",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemError:
    """Why an item has no answer. code: 4xx for a fault of the item, 5xx for one of the engine."""

    code: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Durations in seconds; None for a stage never reached. total: preprocessing to last token."""

    preprocess: float | None = None
    queue: float | None = None
    first_token: float | None = None
    generate: float | None = None
    total: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The result of one item; the module docstring describes the fields."""

    id: str | int | None = None
    line: int | None = None
    path: str | None = None
    text: str = ""
    reasoning: str | None = None
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    finish_reason: str | None = None
    error_code: int = OK
    error_msg: str | None = None
    error_class: str | None = None
    num_image_tokens: int = 0
    num_video_tokens: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_video_frames: int = 0
    video_seconds: float = 0.0
    num_tokens_by_kind: Mapping[str, int] = field(default_factory=dict)
    timings: Timings = Timings()
    error: ItemError | None = None
    outcome: Outcome | None = None  # derived where it is not given, so never None afterwards
    outcome_reason: str | None = None
    media: tuple[Media, ...] = ()
    prompt: str | None = None
    outputs: tuple[Mapping[str, Any], ...] = ()
    item_digest: str = ""
    config_digest: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)
    answers: Mapping[str, Any] = field(default_factory=dict)
    endpoint: str = ""
    content: str = ""
    same_as: str | int | None = None
    boxes: tuple[Mapping[str, Any], ...] = ()
    picture_size: tuple[int, ...] = ()
    embedding: Vector | None = None

    def __post_init__(self) -> None:
        if self.outcome is None:
            found = derived(self)
            object.__setattr__(self, "outcome", found.outcome)
            object.__setattr__(self, "outcome_reason", found.reason)

    @property
    def is_ok(self) -> bool:
        """Whether the item ended without an error; its outcome may be "empty" all the same."""
        return self.error_code == OK

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
        """The kind of failure, code and class, such as "400 MediaError"."""
        return f"{self.error_code} {self.error_class or 'Error'}"

    def to_json(self) -> str:
        """Returns one line of JSON, without the line break."""
        values = asdict(self)
        for name in OPTIONAL:
            if not values[name]:
                del values[name]
        for own in values.get("media", ()):
            if own["pages"] is None:
                del own["pages"]
        line = json.dumps(values, ensure_ascii=False)
        try:
            line.encode()
        except UnicodeEncodeError:  # a file name that is not UTF-8
            line = json.dumps({**replaced(values), "exact": self._exact()}, ensure_ascii=False)
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
        """Reads what `to_json` wrote, also in version 0.1. Raises ValueError for anything else."""
        values = json.loads(line)
        if not isinstance(values, dict):
            raise ValueError("it is not an object")
        return cls.from_values(values)

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> Record:
        """Returns the record of a JSON object. Raises ValueError when it is none."""
        _check(values)
        try:
            return cls(**_restored({**values, **_nested(values)}))
        except (TypeError, AttributeError) as error:
            raise ValueError(str(error)) from None


def key_of(item_id: str | int | None, line: int | None) -> str:
    """Returns the string that identifies an id, or a line without one; 7 and "7" are the same."""
    return f"\0line {line}" if item_id is None else str(item_id)


def _check(values: Mapping[str, Any]) -> None:
    """Raises ValueError unless the record has an identity, an answer and integer counts: a line of
    an input, which may have an id and a prompt, is no result."""
    missing = [name for name in ALWAYS if name not in values]
    if missing:
        raise ValueError(f"it has no {missing[0]}")
    known = values.get("id", values.get("path"))
    is_named = isinstance(known, (str, int)) and not isinstance(known, bool)
    is_line = known is None and isinstance(values.get("line"), int)
    if not (is_named or is_line):
        raise ValueError("it has no id, path or line")
    if values.get("outcome") not in (None, *OUTCOMES):
        raise ValueError(f"its outcome is {str(values['outcome'])[:20]!r}, which is none")
    for name in COUNTS:
        if not isinstance(values.get(name, 0), int):
            raise ValueError(f"its {name} is not an integer")
    _check_by_kind(values.get("num_tokens_by_kind", {}))
    check_boxes(values.get("boxes", ()), values.get("picture_size", ()))


def _check_by_kind(value: Any) -> None:
    if not isinstance(value, dict) or not all(isinstance(each, int) for each in value.values()):
        raise ValueError("its num_tokens_by_kind is not an object of integers")


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Builds the fields that are objects, and those that version 0.1 did not write."""
    error = values.get("error")
    fault = None if error is None else ItemError(**error)
    nested: dict[str, Any] = {
        "id": values.get("id", values.get("path")),
        "timings": Timings(**(values.get("timings") or {})),
        "error": fault,
        "media": tuple(Media(**item) for item in values.get("media", ())),
        "outputs": tuple(values.get("outputs", ())),
        "tool_calls": tuple(values.get("tool_calls", ())),
        "boxes": tuple(values.get("boxes", ())),
        "picture_size": tuple(values.get("picture_size", ())),
        "embedding": Vector.from_json(values.get("embedding")),
    }
    if fault is not None:
        nested["error_code"] = values.get("error_code", fault.code)
        nested["error_msg"] = values.get("error_msg", fault.message)
    return nested


def _restored(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values with the exact texts in place of those that JSON could hold."""
    exact = values.pop("exact", None)
    if exact is None:
        return values
    texts = {name: unescaped(exact[name]) for name in ("id", "path") if name in exact}
    names = map(unescaped, exact.get("media", ()))
    media = (replace(item, name=name) for item, name in zip(values["media"], names, strict=True))
    return {**values, **texts, "media": tuple(media)}
