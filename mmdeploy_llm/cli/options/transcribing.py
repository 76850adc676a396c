"""The options of `transcribe`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from mmdeploy_llm.batch.arguments import RunArguments
from mmdeploy_llm.values.options.engine_flags import EngineFlags

from .groups import Given, Group, Rows
from .model import Engine, Model
from .providers import ProviderOptions
from .values import engine_options, text_value

# click does not rewrap a paragraph that begins with "\b".
TRANSCRIBE_EPILOG = """\b
Long files are heard in windows that overlap, all at once; what two windows have
heard stands once. Files whose transcripts are there are passed over, so the
same command goes on where a run has ended.

\b
Examples:
  mmdeploy-llm transcribe talks/ --model acme/asr-large
  mmdeploy-llm transcribe talks/ --model models/asr --language de --transcripts vtt
  mmdeploy-llm transcribe call.mp3 --model models/asr --translate
  mmdeploy-llm transcribe calls/ --model models/asr --channels apart
  mmdeploy-llm transcribe day/ --model models/asr --vad
  mmdeploy-llm transcribe talks/ --model models/asr --word-timestamps --transcripts vtt
  mmdeploy-llm transcribe board/ --model models/asr --words "ACME, Dr. Mueller"
  mmdeploy-llm transcribe talks/ --corrected

\b
The exit code is 0, or 1 where files failed."""


class Channels(StrEnum):
    """Ways to hear a sound of several channels."""

    MIXED = "mixed"
    APART = "apart"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechModelOptions(Group):
    """The model that transcribes."""

    title: ClassVar[str] = "Model"

    model: Model = "shapes-vl"
    computed: Annotated[Given, Rows(EngineFlags, "dtype", "device")]
    engine: Engine = None
    providers: ProviderOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechOptions(Group):
    """The speech, and what is made of it."""

    title: ClassVar[str] = "Speech"

    language: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The language that is spoken, such as de or german.  [default: recognized]",
        ),
    ] = None
    translate: Annotated[
        bool, typer.Option("--translate", help="Write in English what is said in another language.")
    ] = False
    words: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Names and terms that are to be spelled so, or what was said before; or @FILE.",
        ),
    ] = None
    channels: Annotated[
        Channels,
        typer.Option(
            help="Of stereo and more: mixed to one, or each transcribed as a speaker of its own."
        ),
    ] = Channels.MIXED
    vad: Annotated[
        bool,
        typer.Option(
            "--vad",
            help="Find speech first, and leave out where nobody speaks. Needs the extra vad.",
        ),
    ] = False
    word_timestamps: Annotated[
        bool,
        typer.Option("--word-timestamps", help="When each word is spoken, in vtt and json."),
    ] = False
    overlap: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="SECONDS",
            hidden=True,
            help="What two windows of a file share.  [default: 5]",
        ),
    ] = None

    @property
    def wish(self) -> dict[str, Any]:
        """Returns the fields of a Wish."""
        return {
            "language": self.language,
            "task": "translate" if self.translate else "transcribe",
            "before": text_value("--words", self.words) or "",
            "overlap": self.overlap,
            "channels": self.channels.value,
            "vad": self.vad,
            "word_timestamps": self.word_timestamps,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptOptions(Group):
    """The places and formats of transcripts."""

    title: ClassVar[str] = "Output"

    transcripts: Annotated[
        str, typer.Option(metavar="NAMES", help="Of srt, vtt, txt and json, with commas.")
    ] = "srt,txt"
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FOLDER",
            help="Where transcripts are written.  [default: beside the sounds]",
        ),
    ] = None
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Transcribe files again whose transcripts are there."),
    ] = False
    corrected: Annotated[
        bool,
        typer.Option(
            "--corrected",
            help="Write txt and vtt again from the .srt that you have corrected; needs no model.",
        ),
    ] = False
    folders: Annotated[Given, Rows(RunArguments, "recursive")]


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscribeOptions(Group):
    """The groups of `transcribe`, in the order of --help."""

    model: SpeechModelOptions
    speech: SpeechOptions
    output: TranscriptOptions

    def llm_options(self, ctx: typer.Context) -> dict[str, Any]:
        """Returns the options of LLM(), see engine_options."""
        return engine_options(ctx, self.model.engine, **self.to_engine())
