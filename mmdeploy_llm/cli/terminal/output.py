"""Terminal output of the program: streamed answers, a chat, tables. Independent of the CLI's
options."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mmdeploy_llm.errors import MMDeployLLMError
from mmdeploy_llm.values.text.display import seconds

from .interrupts import Terminated
from .letters import printable

if TYPE_CHECKING:
    from mmdeploy_llm.batch.summary import BatchSummary
    from mmdeploy_llm.client.aio.async_llm import AsyncLLM
    from mmdeploy_llm.data.records.record import Record
    from mmdeploy_llm.data.vectors.search import Found
    from mmdeploy_llm.messages import Prompt
    from mmdeploy_llm.values.outputs.request_output import RequestOutput, ToolCall
    from mmdeploy_llm.values.params import SamplingParams

WIDTH_WITHOUT_TERMINAL = 100
CHAT_HELP = (
    "/image PATH attaches a picture to your next message, /reset starts a new conversation, "
    "/quit ends"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer of a model. error: why the request failed, or None; lack: what an answer without
    an error lacks, or None."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    error: str | None = None
    lack: str | None = None


def make_console(*, is_stderr: bool = False) -> Console:
    """Returns a console; one that writes to a file has at least WIDTH_WITHOUT_TERMINAL columns."""
    console = Console(stderr=is_stderr, highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, WIDTH_WITHOUT_TERMINAL)
    return console


def print_table(table: Table) -> None:
    """Prints a table: fitted to a terminal, and elsewhere a line for each row, whole, with tabs
    between its cells, so that other programs can read it."""
    console = make_console()
    if console.is_terminal:
        console.print(table)
        return
    columns = [map(_on_one_line, (column.header, *column.cells)) for column in table.columns]
    for row in zip(*columns, strict=True):
        typer.echo("\t".join(row))  # the console would write spaces for tabs


def _on_one_line(cell: object) -> str:
    """Returns a cell without line breaks and tabs: those of several lines stand between "; "."""
    return "; ".join(" ".join(line.split()) for line in str(cell).splitlines())


def _file_of(record: Record, top: str) -> str:
    return os.path.relpath(record.path or "", top) + record.part


def caption_table(records: Sequence[Record]) -> Table:
    """Builds a table of file, caption, tokens and time; failed files in red with their error.

    File names are relative to the common parent folder. Items without a file have their ids.
    """
    paths = [record.path for record in records if record.path]
    folders = [os.path.dirname(os.path.abspath(path)) for path in paths]
    top = os.path.commonpath(folders) if folders else ""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("file" if paths else "item", no_wrap=True, overflow="ellipsis", max_width=36)
    table.add_column(
        "vector" if any(own.embedding for own in records) else "caption", overflow="fold"
    )
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    for record in records:
        fault = record.error
        words = record.text if fault is None else f"failed ({fault.code}): {fault.message}"
        if record.embedding is not None:
            words = f"{' x '.join(map(str, record.embedding.shape))} numbers"
        if record.lack is not None:
            words = f"({record.lack}) {words}"
        table.add_row(
            Text(printable(_file_of(record, top) if record.path else record.key)),
            Text(printable(words), style="red" if fault else "yellow" if record.lack else ""),
            str(record.num_prompt_tokens + record.num_output_tokens) if fault is None else "",
            seconds(record.timings.total) if fault is None else "",
        )
    return table


def hit_table(found: Sequence[Found]) -> Table:
    """Builds a table of what a search has found: rank, score, item, and the start of its text."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("rank", justify="right", no_wrap=True)
    table.add_column("score", justify="right", no_wrap=True)
    table.add_column("item", overflow="fold")
    if has_text := any(own.record.prompt for own in found):
        table.add_column("text", overflow="ellipsis", no_wrap=True)
    for rank, own in enumerate(found, 1):
        cells: list[str | Text] = [str(rank), f"{own.score:.4f}", Text(printable(own.id))]
        if has_text:
            cells.append(Text(printable(" ".join((own.record.prompt or "").split()))))
        table.add_row(*cells)
    return table


def advice(lacks: Mapping[str, int]) -> Iterator[str]:
    """Yields what helps against these outcomes, see BatchSummary.lacks."""
    from mmdeploy_llm.data.records.outcome import MAX_LENGTH, MAX_MODEL_LEN, MAX_TOKENS

    limits = {
        MAX_TOKENS: "raise --max-tokens",
        MAX_LENGTH: "raise max_length, which counts the prompt",
        MAX_MODEL_LEN: "raise the engine's max_model_len, or give smaller media",
    }
    for limit, words in limits.items():
        found = [lack for lack in lacks if limit in lack]
        if not found:
            continue
        if any("thinking" in lack for lack in found):
            words += ", or bound the thinking: reasoning_max_tokens, --no-thinking"
        names = ",".join(dict.fromkeys(lack.partition(":")[0] for lack in found))
        yield f"to answer these: {words}; with --resume-anyway --retry-failed {names}"


def batch_summary(summary: BatchSummary, *, done: str) -> str:
    """Describes a run: counts, speed, and failures by kind. done: verb for successful items."""
    kinds = {**summary.failures, **summary.lacks}
    lines = [_first_line(summary, done)]
    if answers := summary.run.answers:
        counts = (f"{printable(name)} {count}" for name, count in answers.items())
        lines.append(f"  answers: {', '.join(counts)}")
    lines += [f"  {count} x {printable(name)}" for name, count in kinds.items()]
    again = summary.run.asked_again
    lines += [f"  {again[name]} x asked again: it broke {name}" for name in again]
    lines += [f"  {words}" for words in advice(summary.lacks)]
    if summary.index.num_video_frames:
        covered = seconds(summary.index.video_seconds)
        lines.append(f"  videos: {summary.index.num_video_frames} frames, from {covered} of them")
    lines += map(printable, summary.notes)
    return "\n".join(lines)


def _first_line(summary: BatchSummary, done: str) -> str:
    run = summary.run
    if not run.num_items and summary.ending == "done":
        return f"nothing left to do: all {summary.num_before} items have a result"
    items = f"{run.items_per_second:.1f} {summary.unit}s/s"
    before = f", {summary.num_before} before" if summary.num_before else ""
    if summary.num_again:
        before += f"; {summary.num_again} of them again, because their input has changed"
    return (
        f"{run.num_done} {done}, {run.lacking} in {seconds(run.elapsed)} "
        f"({items}, {run.tokens_per_second:.0f} tokens/s){before}"
    )


def print_answer(outputs: Iterable[RequestOutput], out: Console, aside: Console) -> Answer:
    """Prints deltas as they arrive: text to `out`, reasoning dimmed to `aside`, and after the text
    the tool calls to `out`.

    Returns the whole answer.
    """
    pieces: list[str] = []
    calls: list[ToolCall] = []
    is_thinking, error, is_cut = False, None, False
    for output in outputs:
        is_cut = output.outputs.finish_reason == "length"
        thought, text = output.outputs.reasoning_content or "", output.outputs.text
        if thought:
            aside.print(Text(printable(thought), style="dim"), end="", soft_wrap=True)
            is_thinking = True
        if not pieces:
            text = text.lstrip()
        if text and is_thinking:
            aside.print()
            is_thinking = False
        if text:
            pieces.append(text)
            out.print(Text(printable(text)), end="", soft_wrap=True)
        calls += output.outputs.tool_calls or ()
        if not output.is_ok:
            error = output.error_msg or "no message was given"
    if is_thinking:
        aside.print()
    if pieces:
        out.print()
    for call in calls:
        line = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
        out.print(Text(printable(line)), soft_wrap=True)
    lack = None
    if is_cut and error is None:
        what = "the answer is cut off" if pieces else "the thinking took all of it"
        lack = f"the maximum length was reached: {what}; raise --max-tokens, or max_length"
        aside.print(Text(lack, style="dim"), soft_wrap=True)
    return Answer(text="".join(pieces), calls=tuple(calls), error=error, lack=lack)


def user_message(text: str, images: Sequence[str]) -> dict[str, Any]:
    """Returns a chat message of the user: pictures first, then the text."""
    parts: list[dict[str, Any]] = [{"type": "image", "image": path} for path in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def opening(system: str | None) -> list[dict[str, Any]]:
    """Returns the messages before the first one of the user."""
    return [] if system is None else [{"role": "system", "content": system}]


class ChatSession:
    """A conversation on the terminal. more: further keys of each prompt, such as tools."""

    def __init__(
        self,
        llm: AsyncLLM,
        params: SamplingParams,
        *,
        out: Console,
        aside: Console,
        system: str | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        self._llm = llm
        self._params = params
        self._out = out
        self._aside = aside
        self._more = dict(more or {})
        self._opening = opening(system)
        self._messages: list[dict[str, Any]] = list(self._opening)
        self._images: list[str] = []
        self.num_failed = 0

    def add_image(self, path: str) -> None:
        """Attaches the picture to the next message."""
        self._images.append(path)

    def run(self, lines: Iterable[str]) -> None:
        """Handles lines, each a message or a /command, until they end or /quit."""
        for line in lines:
            text = line.strip()
            if text in ("/quit", "/exit"):
                return
            if text.startswith("/"):
                self._command(text)
            elif text:
                self.say(text)

    def say(self, text: str) -> None:
        """Sends a message with the attached pictures and prints the answer.

        A message that fails or is stopped with Ctrl-C does not stay in the conversation.
        """
        messages = [*self._messages, user_message(text, self._images)]
        prompt: Prompt = {"messages": messages, **self._more}
        handle = None
        try:
            handle = self._llm.submit(prompt, self._params)
            answer = print_answer(handle, self._out, self._aside)
        except KeyboardInterrupt as stop:
            if isinstance(stop, Terminated):
                raise
            if handle is not None:
                handle.abort()
            self._note("\nstopped")
            return
        except MMDeployLLMError as problem:
            answer = Answer(error=str(problem))
        self._images = []
        if answer.error is not None:
            self.num_failed += 1
            self._note(f"error: {answer.error}", "red")
            return
        reply: dict[str, Any] = {"role": "assistant", "content": answer.text}
        if answer.calls:
            reply["tool_calls"] = [call.to_dict() for call in answer.calls]
        self._messages = [*messages, reply]

    def _command(self, text: str) -> None:
        name, _, rest = text.partition(" ")
        if name == "/image" and rest.strip():
            self.add_image(rest.strip().strip("'\""))
            self._note(f"{len(self._images)} picture(s) for your next message")
        elif name == "/reset":
            self._messages, self._images = list(self._opening), []
            self._note("new conversation")
        else:
            self._note(CHAT_HELP)

    def _note(self, text: str, style: str = "dim") -> None:
        self._aside.print(Text(printable(text), style=style), soft_wrap=True)
