"""The command `check-determinism`, which compares answers computed in every way."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from mmdeploy_llm.cli.exits import SOME_FAILED
from mmdeploy_llm.cli.options.groups import Given, Rows, with_groups
from mmdeploy_llm.cli.options.missing import check_model
from mmdeploy_llm.cli.options.model import Engine, Model
from mmdeploy_llm.cli.options.providers import ProviderOptions
from mmdeploy_llm.cli.options.single import IsJson
from mmdeploy_llm.cli.options.values import engine_options
from mmdeploy_llm.values.options.engine_flags import EngineFlags
from mmdeploy_llm.values.options.weight_formats import FORMATS, names_of

if TYPE_CHECKING:
    from mmdeploy_llm.testing.determinism.ways import Comparison

# click does not rewrap a paragraph that begins with "\b".
DETERMINISM_EPILOG = """\b
The same prompts (random texts; pictures, videos, sounds if the model takes
them; greedy and sampled) are computed alone, each in one step, and then
  in a batch            all at once
  in chunks             all at once, few tokens in a step, prompts and decoding
                        mixed
  with prefix hits      again, with the KV cache of the first time
  after a preemption    each twice, in a cache that is too small for both
  with other threads    in a batch, with one thread instead of several
Tokens and log-probabilities must be the same bits. Where they are not, the
operations of the model whose results differ first are named, in the order of
the forward pass; look at what they add, and in which order.

\b
Without --mode the engine is as usual: the check then shows what differs there.
With it (deterministic=True) the promise itself is checked. A machine that
breaks it has a compiler or a processor that we do not know: please report it.

\b
Examples:
  mmdeploy-llm check-determinism --mode
  mmdeploy-llm check-determinism -m models/acme-1b --dtype float32
  mmdeploy-llm check-determinism -m folder/ --mode --quantization int8
  mmdeploy-llm check-determinism -m folder/ --engine native_kernels=False

\b
Exit codes: 0 not a bit differs, 1 something differs or a way was not taken,
2 wrong usage or unusable model, 130 stopped with Ctrl-C."""

Mode = Annotated[
    bool, typer.Option("--mode", help="Compute with deterministic=True, which promises this.")
]
Quantization = Annotated[
    str | None,
    typer.Option(help=f"{names_of(FORMATS.values())}: weights in 8 or 4 bits (CPU only)."),
]
Longest = Annotated[
    int,
    typer.Option(
        min=2,
        help="Tokens of the longest prompt. Attention to more than 1,024 tokens is computed in "
        "several chunks.",
    ),
]


@with_groups
def check_determinism(
    ctx: typer.Context,
    model: Model = "shapes-vl",
    mode: Mode = False,
    *,
    computed: Annotated[Given, Rows(EngineFlags, "dtype")],
    quantization: Quantization = None,
    longest: Longest = 300,
    as_json: IsJson = False,
    engine: Engine = None,
    providers: ProviderOptions,
) -> None:
    """Check on this machine that answers do not depend on what is computed with them.

    Runs the model several times on some prompts: seconds for a tiny model, minutes for a large
    one."""
    options = engine_options(
        ctx,
        engine,
        **computed,
        quantization=quantization,
        deterministic=mode or None,
        **providers.to_engine(),
    )
    check_model(model, options)
    from mmdeploy_llm.testing.determinism.check import check_determinism
    from mmdeploy_llm.values.options.config import EngineConfig

    comparisons = check_determinism(EngineConfig.from_options(model, options), longest)
    if as_json:
        done = list(comparisons)
        typer.echo(json.dumps([asdict(each) for each in done], indent=2))
    else:
        done = _print(comparisons)
    if not all(each.is_same and each.has_happened for each in done):
        raise typer.Exit(SOME_FAILED)


def _print(comparisons: Iterable[Comparison]) -> list[Comparison]:
    """Prints each comparison as soon as it is there."""
    from rich.text import Text

    from mmdeploy_llm.cli.terminal.letters import printable
    from mmdeploy_llm.cli.terminal.output import make_console

    out, done = make_console(), []
    for each in comparisons:
        mark, style = ("same", "green") if each.is_same else ("DIFFERS", "bold red")
        if not each.has_happened:
            mark, style = "NOT TAKEN", "yellow"
        counts = f"{each.num_tokens} tokens, {each.num_logprobs} log-probabilities"
        if not each.is_same:
            counts = (
                f"{each.num_other_tokens} of {each.num_tokens} tokens, "
                f"{each.num_other_logprobs} of {each.num_logprobs} log-probabilities, by at most "
                f"{each.largest:.2g}"
            )
        line = Text(f"{mark:<10}", style) + Text(f"{each.way.value:<20}", "bold")
        out.print(line + Text(counts, "not bold"), soft_wrap=True)
        for cause in each.causes:
            out.print(Text(f"{'':<30}{printable(cause)}", "yellow"), soft_wrap=True)
        done.append(each)
    return done
