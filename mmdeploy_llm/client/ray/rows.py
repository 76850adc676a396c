"""Rows of a dataset: columns -> prompts, and answers -> columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from mmdeploy_llm.batch.corpus.arguments import ColumnArguments
from mmdeploy_llm.batch.corpus.columns import ColumnOptions
from mmdeploy_llm.data.records.declared import plain_cells, plain_kinds
from mmdeploy_llm.data.records.item import Item
from mmdeploy_llm.data.records.making import record_of
from mmdeploy_llm.data.records.record import FIELDS
from mmdeploy_llm.data.records.template import Template
from mmdeploy_llm.engine.desk.ask import Ask
from mmdeploy_llm.engine.desk.outcome import Answer, refused
from mmdeploy_llm.errors import ConfigError, RequestError
from mmdeploy_llm.messages import Prompt
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.prompt import PromptParts

# The fields of a batch's record that become columns, and these with a value of their type.
ANSWERED = (
    *("text", "reasoning", "finish_reason", "outcome", "num_image_tokens", "num_video_tokens"),
    *("num_prompt_tokens", "num_output_tokens", "error"),
)
SAMPLES: Mapping[str, Any] = {"text": "", "int": 0}
ADDED: Mapping[str, Any] = {
    name: SAMPLES[kind.name] for name, kind in plain_kinds(FIELDS, ANSWERED).items()
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """How a row is asked about.

    prompt: the question; {name} stands for the column of that name, {{ and }} for braces.
    image_column, video_column, audio_column: media: bytes, a path or URL that every machine of the
        cluster can read, an array, {"bytes", "path"} as Hugging Face's datasets have it, or a list
        of these. media_column: of any kind, {kind: column}, a list for several.
    output_prefix: of the names of the columns that are added.
    Raises ConfigError for a prompt that is no template.
    """

    prompt: str
    image_column: str | None = None
    video_column: str | None = None
    audio_column: str | None = None
    media_column: Mapping[str, str | Sequence[str]] = field(default_factory=dict)
    output_prefix: str = ""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        Template(self.prompt)

    @property
    def needed(self) -> tuple[str, ...]:
        """The columns that a row must have."""
        media = (name for _, name in self.media)
        return tuple(dict.fromkeys((*Template(self.prompt).names, *media)))

    @property
    def media(self) -> tuple[tuple[str, str], ...]:
        """The columns with media, as (kind, name)."""
        given = {
            "image_column": self.image_column,
            "video_column": self.video_column,
            "audio_column": self.audio_column,
            "media_column": self.media_column,
        }
        found = ColumnOptions.given(cast("ColumnArguments", given)).media_columns
        return tuple((own.kind, own.name) for own in found)

    @property
    def added(self) -> tuple[str, ...]:
        """The columns that are added to a row."""
        return tuple(self.output_prefix + name for name in ADDED)

    def check(self, found: Iterable[str]) -> None:
        """Raises ConfigError unless the needed columns are found and the added ones are not."""
        names = list(found)
        if missing := [name for name in self.needed if name not in names]:
            raise ConfigError(
                f"the dataset has no column {missing[0]!r}, only {', '.join(map(repr, names))}; "
                "name others in prompt, image_column, video_column, audio_column and media_column"
            )
        if taken := [name for name in self.added if name in names]:
            raise ConfigError(
                f"the dataset has a column {taken[0]!r} already, which the answers need; give "
                "output_prefix, or rename the column"
            )

    def prompt_of(self, row: Mapping[str, Any]) -> Prompt | RequestError:
        """Returns the prompt of a row, or what is wrong with the row."""
        if empty := [name for name in self.needed if row[name] is None]:
            return RequestError(f"the row has nothing in column {empty[0]!r}")
        media = [
            {"type": kind, kind: _media(own)}
            for kind, name in self.media
            for own in (row[name] if isinstance(row[name], list) else [row[name]])
        ]
        text = Template(self.prompt).fill({name: str(row[name]) for name in self.needed})
        content = [*media, {"type": "text", "text": text}]
        messages = [{"role": "user", "content": content if media else text}]
        return {"messages": messages, "chat_template_kwargs": dict(self.chat_template_kwargs)}

    def columns_of(self, answers: Sequence[Answer]) -> dict[str, list[Any]]:
        """Returns the columns that answers add to their rows. The first value of each is a sample
        of its type, also where all others are None."""
        rows = [plain_cells(FIELDS, ANSWERED, _values(answer)) for answer in answers]
        return {
            self.output_prefix + name: [sample, *(row[name] for row in rows)]
            for name, sample in ADDED.items()
        }


def refusal(error: RequestError) -> Answer:
    """Returns the answer about a row that has no prompt."""
    ask = Ask(prompt="", params=_NO_PARAMS)
    return Answer(ask=ask, output=refused(ask, error), error=error)


def _values(answer: Answer) -> dict[str, Any]:
    item = Item(line=0, id=0, prompt=PromptParts(), params=_NO_PARAMS)
    return record_of(item, answer.output, answer.error).to_values()


_NO_PARAMS = SamplingParams()


def _media(value: Any) -> Any:
    """Returns media as a prompt has them."""
    if isinstance(value, Mapping) and {"bytes", "path"} & set(value):
        return value.get("bytes") or value.get("path")
    return value
