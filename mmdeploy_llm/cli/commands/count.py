"""The command `count`, which counts tokens without the weights of a model."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmdeploy_llm.batch.arguments import RunArguments
from mmdeploy_llm.cli.exits import SOME_FAILED, print_error
from mmdeploy_llm.cli.options.answer import Thinking
from mmdeploy_llm.cli.options.files import CountedPages
from mmdeploy_llm.cli.options.groups import Given, Rows, with_groups
from mmdeploy_llm.cli.options.missing import check_outputs, check_pictures
from mmdeploy_llm.cli.options.model import Engine, Model
from mmdeploy_llm.cli.options.providers import ProviderOptions
from mmdeploy_llm.cli.options.single import Image, IsJson
from mmdeploy_llm.cli.options.suggested import Demo, choose_model
from mmdeploy_llm.cli.options.values import (
    MANY_MEDIA,
    engine_options,
    template_kwargs,
    text_value,
)
from mmdeploy_llm.errors import ConfigError, MMDeployLLMError
from mmdeploy_llm.system.portable.machine import num_cpus
from mmdeploy_llm.values.options.engine_flags import EngineFlags

if TYPE_CHECKING:
    from mmdeploy_llm.batch.questions.asks import Asks
    from mmdeploy_llm.client.counting import TokenCounter
    from mmdeploy_llm.data.files.options import FindingOptions
    from mmdeploy_llm.data.records.item import Item
    from mmdeploy_llm.data.rows.rows import BadItem
    from mmdeploy_llm.values.prompt import PromptParts

MAX_THREADS, NUM_PENDING = 8, 64
COUNTS = ("num_prompt_tokens", "num_input_image_tokens", "num_input_video_tokens")
ABSENT = "a text to count is given with --prompt, a model with --model"
COUNT = re.compile(r"num_(?:prompt|input_\w+)_tokens")

Inputs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[INPUT]...",
        help="JSONL and Parquet files; pictures, videos, sounds and "
        "documents, their folders, globs.",
    ),
]
Text = Annotated[
    str | None,
    typer.Option(
        "--prompt",
        "-p",
        help="The text to count, or @FILE; - is standard input. With pictures and videos as INPUT, "
        "the question about each.",
    ),
]
Raw = Annotated[bool, typer.Option("--raw", help="Count the text without a chat template.")]
Total = Annotated[bool, typer.Option("--total", help="Print the sums of all items only.")]


@with_groups
def count(
    ctx: typer.Context,
    inputs: Inputs = None,
    model: Model = "shapes-vl",
    demo: Demo = False,
    prompt: Text = None,
    image: Image = None,
    raw: Raw = False,
    thinking: Thinking = None,
    *,
    chosen: Annotated[Given, Rows(RunArguments, "recursive", "limit")],
    total: Total = False,
    as_json: IsJson = False,
    budgets: Annotated[Given, Rows(EngineFlags, "image_tokens", "video_tokens", "pixels")],
    engine: Engine = None,
    documents: CountedPages,
    providers: ProviderOptions,
) -> None:
    """Count the tokens of prompts and media, without the weights of the model.

    Prompts are prepared as `generate`, `batch` and `caption` would; nothing is computed."""
    if inputs and (image or raw):
        raise ConfigError("--image and --raw belong to a single --prompt; leave out INPUT or them")
    if not inputs and prompt is None and not image:
        raise ConfigError("nothing to count: give files, or a text with --prompt")
    check_outputs(inputs or [], ABSENT)
    check_pictures(image or [])
    model = choose_model(ctx, model, [*(inputs or []), *(image or [])], "photos", is_demo=demo)
    text = text_value("--prompt", prompt)
    kwargs = template_kwargs(thinking)
    more = {**budgets, **providers.to_engine()}
    options = engine_options(ctx, engine, limit_mm_per_prompt=MANY_MEDIA, **more)
    from mmdeploy_llm.client.counting import TokenCounter

    if inputs:
        finding, asks = read_of(ctx, model, options, **documents.to_batch())
        asked = {"question": text, "asks": asks, "template_kwargs": kwargs}
        wanted = {"limit": chosen.get("limit"), "is_recursive": chosen.get("recursive", True)}
        items = input_items(inputs, asked, **wanted, finding=finding)
    else:
        items = iter([single_item(text or "", image or [], raw, kwargs)])
    with TokenCounter(model, **options) as counter:
        show = show_json if as_json else show_line
        sums = show_counts(counted(items, counter), None if total else show)
    if total or not as_json:
        noun = "page" if documents.chosen.get("by_page") else "item"
        show_total(sums, as_json=as_json, noun=noun)
    if sums["num_failed"]:
        raise typer.Exit(SOME_FAILED)


def read_of(
    ctx: typer.Context, model: str, options: Mapping[str, Any], **pages: Any
) -> tuple[FindingOptions, Asks]:
    """Returns which files are read, those of kinds that the model takes, and what it is asked where
    there is no question. pages: see PageChoice."""
    from mmdeploy_llm.batch.documents.sources import Sources
    from mmdeploy_llm.batch.questions.asks import Asks
    from mmdeploy_llm.data.files.options import FindingOptions
    from mmdeploy_llm.engine.startup.kinds import accepted_kinds, known_kinds, usual_question
    from mmdeploy_llm.values.options.config import EngineConfig

    config, found = EngineConfig.from_options(model, options), FindingOptions.given(pages)
    sources = ctx.with_resource(Sources(config, found.pages))
    finding = replace(
        found,
        table=known_kinds(config),
        accepted=lambda: accepted_kinds(config),
        new_source=sources.open,
    )
    return finding, Asks(of_model=usual_question(config))


def input_items(
    inputs: Iterable[str],
    asked: Mapping[str, Any],
    *,
    limit: int | None,
    is_recursive: bool,
    finding: FindingOptions,
) -> Iterator[Item | BadItem]:
    """Returns the items of files, read as `batch` reads them, and of media, as `caption` does.
    asked: arguments of open_files and open_source about the question.

    Raises ConfigError for an input that cannot be opened, before any item is read."""
    from mmdeploy_llm.batch.sources import open_files, open_source
    from mmdeploy_llm.cli.terminal.letters import printable
    from mmdeploy_llm.data.records.ids import Selection
    from mmdeploy_llm.data.rows.names import is_media_name
    from mmdeploy_llm.values.params import SamplingParams

    wanted, sources = finding.wanted(), []
    params, whole = SamplingParams(), Selection.parse(None, None)
    for given in inputs:
        path = Path(given)
        if (path / "config.json").is_file():
            raise ConfigError(f"{given!r} is a model's folder; give it with --model")
        is_media = is_media_name(given, wanted.table)
        if path.is_dir() or is_media or any(char in given for char in "*?["):
            options = {**asked, "is_recursive": is_recursive, "finding": finding}
            source = open_files([given], params, whole, **options)
        elif not path.exists():
            raise ConfigError(f"{given!r} does not exist; {ABSENT}")
        else:
            source = open_source(path, params, whole, finding=finding, **asked)
        sources.append(source)
        about = source.about if finding.pages.by_page else ""
        for words in filter(None, (about, source.skipped.text, *source.skipped.notes)):
            typer.echo(printable(words), err=True)
    return itertools.islice(itertools.chain.from_iterable(sources), limit)


def single_item(text: str, images: list[str], is_raw: bool, kwargs: dict[str, Any]) -> Item:
    """Returns the prompt of the command line as an item."""
    from mmdeploy_llm.cli.terminal.output import user_message
    from mmdeploy_llm.data.records.item import Item
    from mmdeploy_llm.data.rows.names import BUILT_IN_KINDS
    from mmdeploy_llm.engine.intake.prompts import PromptReader
    from mmdeploy_llm.values.params import SamplingParams

    given: dict[str, Any] = {"prompt": text, "multimodal_data": {"image": images}}
    if not is_raw:
        given = {"messages": [user_message(text, images)], "chat_template_kwargs": kwargs}
    prompt = PromptReader.of_kinds(BUILT_IN_KINDS).read(given)
    return Item(line=1, id="--prompt", prompt=prompt, params=SamplingParams())


def counted(items: Iterator[Item | BadItem], counter: TokenCounter) -> Iterator[dict[str, Any]]:
    """Yields the result of each item, in order. Threads read a bounded number of items ahead."""
    pending: deque[Future[dict[str, Any]]] = deque()
    num_threads = min(MAX_THREADS, num_cpus())
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="count")
    try:
        for item in items:
            pending.append(pool.submit(result_of, item, counter))
            if len(pending) == NUM_PENDING:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def result_of(item: Item | BadItem, counter: TokenCounter) -> dict[str, Any]:
    """Returns the counts of an item, and its error as a record has it."""
    from mmdeploy_llm.data.records.making import bad_record
    from mmdeploy_llm.data.records.record import ItemError
    from mmdeploy_llm.data.rows.rows import BadItem
    from mmdeploy_llm.hooks.names import error_text

    result = {"id": item.id, "line": item.line, **dict.fromkeys(COUNTS, 0)}
    failed: ItemError | None = None
    if isinstance(item, BadItem):
        failed = bad_record(item).error
    else:
        try:
            result |= counts_of(item.prompts, counter)
        except MMDeployLLMError as error:
            failed = ItemError(code=error.code, kind=type(error).__name__, message=str(error))
        except Exception as error:  # a plugin's processor raises anything
            failed = ItemError(code=500, kind=type(error).__name__, message=error_text(error))
    return {**result, "error": None if failed is None else failed.to_json()}


def counts_of(prompts: Iterable[PromptParts], counter: TokenCounter) -> dict[str, int]:
    """Returns the sums of the counts of prompts."""
    sums = Counter[str]()
    for prompt in prompts:
        found = counter.count_tokens(prompt)
        by_kind = found.num_input_tokens_by_kind.items()
        own = {f"num_input_{kind}_tokens": number for kind, number in by_kind}
        sums.update(own | {name: getattr(found, name) for name in COUNTS})
    return dict(sums)


def show_counts(
    results: Iterator[dict[str, Any]], show: Callable[[dict[str, Any]], None] | None
) -> dict[str, int]:
    """Shows each result as it comes, with a progress bar where the results are not on the same
    terminal, and returns their sums."""
    from tqdm import tqdm

    sums = dict.fromkeys(("num_items", "num_failed", *COUNTS), 0)
    is_hidden = True if show is not None and sys.stdout.isatty() else None
    with tqdm(desc="Count", unit="item", delay=1, dynamic_ncols=True, disable=is_hidden) as bar:
        for result in results:
            sums["num_items"] += 1
            sums["num_failed"] += result["error"] is not None
            for name in filter(COUNT.fullmatch, result):
                sums[name] = sums.get(name, 0) + result[name]
            if show is not None:
                show(result)
            elif result["error"] is not None:
                print_error(f"{item_name(result)}: {result['error']['message']}")
            bar.update()
    return sums


def show_json(result: dict[str, Any]) -> None:
    """Prints a result as a line of JSON."""
    typer.echo(json.dumps(result))


def show_line(result: dict[str, Any]) -> None:
    """Prints the counts and the name of an item, its error on standard error."""
    from mmdeploy_llm.cli.terminal.letters import printable

    if result["error"] is not None:
        print_error(f"{item_name(result)}: {result['error']['message']}")
        return
    numbers = "  ".join(f"{result[name]:>8}" for name in COUNTS)
    others = [f"{result[name]} {kind}" for name, kind in other_kinds(result)]
    more = f"  ({', '.join(others)} tokens)" if others else ""
    typer.echo(f"{numbers}  {printable(str(result['id']))}{more}")


def other_kinds(counts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns name and kind of the counts of media that have no column of their own."""
    names = [name for name in counts if name not in COUNTS and COUNT.fullmatch(name)]
    return [(name, name.removeprefix("num_input_").removesuffix("_tokens")) for name in names]


def show_total(sums: dict[str, int], *, as_json: bool, noun: str) -> None:
    """Prints the sums. noun: of one item."""
    if as_json:
        typer.echo(json.dumps(sums))
        return
    failed = f", {sums['num_failed']} failed" if sums["num_failed"] else ""
    plural = "" if sums["num_items"] == 1 else "s"
    prompts, *_ = (sums[name] for name in COUNTS)
    kinds = [(COUNTS[1], "image"), (COUNTS[2], "video"), *other_kinds(sums)]
    *first, last = (f"{sums[name]} {kind}" for name, kind in kinds)
    typer.echo(
        f"{prompts} prompt tokens; {', '.join(first)} and {last} tokens "
        f"({sums['num_items']} {noun}{plural}{failed})"
    )


def item_name(result: dict[str, Any]) -> str:
    """Names an item in an error."""
    return f"line {result['line']}" if result["id"] is None else str(result["id"])
