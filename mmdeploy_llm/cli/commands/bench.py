"""The command `bench`, which measures speed and memory."""

from __future__ import annotations

import json
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from mmdeploy_llm.cli.options.groups import Given, Rows, with_groups
from mmdeploy_llm.cli.options.missing import check_model
from mmdeploy_llm.cli.options.model import ModelOptions
from mmdeploy_llm.cli.options.single import IsJson
from mmdeploy_llm.cli.options.values import engine_options
from mmdeploy_llm.values.options.engine_flags import EngineFlags

if TYPE_CHECKING:
    from mmdeploy_llm.cli.bench.results import BenchSettings

NUM_TEXTS, NUM_IMAGES = 32, 16  # requests per round

# click does not rewrap a paragraph that begins with "\b".
BENCH_EPILOG = """\b
Figures (a round runs all requests together):
  output tokens/s      generated tokens / time of a round, prompts included
                       (median of the rounds)
  images/s             images / time of a round (median of the rounds)
  time to first token  of one request that runs alone (median of three)
  each output token    time per further token of the same request
  load to first token  from program start, without making the workload
  peak memory          of the process, compared with weights + KV cache in use
  share of the limit   lower bound of a round's time, of its measured time: from
                       80 % on it is near the limit, below 50 % look for a cause.
                       The bound is the time that this machine needs for the
                       matrix products with weights: in each step the longer
                       of arithmetic and of reading the weights once, plus the
                       arithmetic of the media encoder. Attention is not
                       counted, so 100 % cannot be reached.

\b
Examples:
  mmdeploy-llm bench
  mmdeploy-llm bench photo --requests 8 --num-threads 4
  mmdeploy-llm bench text -m models/acme-1b --quantization int8 --profile
  mmdeploy-llm bench vl -m folder/with/config --dummy --json > vl.json"""


class Work(StrEnum):
    """Names of the workloads."""

    TEXT = "text"
    VL = "vl"
    PHOTO = "photo"


WorkArgument = Annotated[
    Work,
    typer.Argument(
        help="The workload. text: prompts of 64 to 192 tokens, answers of 32 to 96. vl: an image "
        "of 448 x 448 pixels and a question, answers of 64 tokens. photo: like vl with JPEG files "
        "of 12 megapixels."
    ),
]
Requests = Annotated[
    int | None, typer.Option(min=1, help="Requests per round.  [default: 32 texts, 16 images]")
]
Rounds = Annotated[int, typer.Option(min=1, help="Number of measured rounds.")]
Dummy = Annotated[
    bool,
    typer.Option("--dummy", help="Use random weights; the folder needs no safetensors files."),
]
IsProfiled = Annotated[
    bool, typer.Option("--profile", help="Run one more round and show where its time goes.")
]


@with_groups
def bench(
    ctx: typer.Context,
    work: WorkArgument = Work.TEXT,
    *,
    requests: Requests = None,
    rounds: Rounds = 2,
    speed: Annotated[
        Given, Rows(EngineFlags, "max_num_seqs", "num_threads", "quantization", "kv_cache_dtype")
    ],
    dummy: Dummy = False,
    profile: IsProfiled = False,
    as_json: IsJson = False,
    model: ModelOptions,
) -> None:
    """Measure how fast a model is on this machine.

    Decoding is greedy and ignores end-of-sequence tokens, so that every run does the same work; the
    answers themselves do not matter."""
    begun = time.perf_counter()
    options = engine_options(
        ctx,
        model.engine,
        **model.to_engine(),
        **speed,
        load_format="dummy" if dummy else None,
    )
    check_model(model.model, options)
    from mmdeploy_llm.cli.bench.results import BenchSettings

    settings = BenchSettings(
        work=work.value,
        model=model.model,
        options=options,
        num_requests=requests or (NUM_TEXTS if work is Work.TEXT else NUM_IMAGES),
        num_rounds=rounds,
        is_profiled=profile,
        begun=begun,
    )
    measure(settings, as_json)


def measure(settings: BenchSettings, as_json: bool) -> None:
    """Runs the benchmark and prints its result; reports progress on a terminal only."""
    from mmdeploy_llm.cli.bench.report import profile_table, result_table
    from mmdeploy_llm.cli.bench.run import run_bench
    from mmdeploy_llm.cli.terminal.output import make_console

    out, aside = make_console(), make_console(is_stderr=True)
    result = run_bench(settings, aside.print if aside.is_terminal else lambda _: None)
    if as_json:
        typer.echo(json.dumps(result.to_dict()))
        return
    out.print(result_table(result))
    if result.profile is not None:
        out.print()
        out.print(profile_table(result.profile))
