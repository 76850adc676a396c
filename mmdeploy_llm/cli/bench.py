"""The command that measures: bench."""

from __future__ import annotations

import json
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from .options import Device, DType, Engine, Model, NumThreads, engine_options

if TYPE_CHECKING:
    from mmdeploy_llm.bench.results import BenchSettings

NUM_TEXTS, NUM_IMAGES = 32, 16  # requests of a round

# "\b" keeps the lines below it as they are.
BENCH_EPILOG = """\b
What is printed:
  output tokens/s      generated tokens by the time of a round, prompts included (median)
  images/s             the same, in images
  time to first token  of one request with nothing beside it (median of three)
  each output token    of the same request, behind its first token
  load to first token  from the start of the program; photos and prompts are made before
  peak memory          of the process, and how far it is over weights and KV cache in use
  share of the limit   least time of the products with weights (2 x weights x tokens over the
                       machine's rate, or weights over its memory rate where that is longer;
                       images in the media encoder; output head for sampled tokens only) by the
                       time it took. Attention is not in it, so 1 is out of reach.

\b
Examples:
  mmdeploy-llm bench
  mmdeploy-llm bench photo --requests 8 --threads 4
  mmdeploy-llm bench text -m Qwen/Qwen2.5-0.5B-Instruct --quantization int8 --profile
  mmdeploy-llm bench vl -m folder/with/config --dummy --json > vl.json"""


class Work(StrEnum):
    """The workloads by name."""

    TEXT = "text"
    VL = "vl"
    PHOTO = "photo"


WorkArgument = Annotated[
    Work,
    typer.Argument(
        help="text: prompts of 64 to 192 tokens, 32 to 96 out. vl: an image of 448 x 448 and a "
        "question, 64 tokens out. photo: the same with JPEG files of 12 megapixels."
    ),
]
Requests = Annotated[
    int | None, typer.Option(min=1, help="Requests of a round.  [default: 32 texts, 16 images]")
]
Rounds = Annotated[int, typer.Option(min=1, help="Rounds; medians are printed.")]
Batch = Annotated[
    int | None, typer.Option(min=1, help="Requests that run at the same time (max_num_seqs).")
]
Quantization = Annotated[str | None, typer.Option(help="int8: linear layers in 8 bits, on CPU.")]
KVCacheDType = Annotated[
    str, typer.Option(help="auto: as the model; int8: half of bf16's memory, on CPU.")
]
Dummy = Annotated[
    bool, typer.Option("--dummy", help="Random weights: the folder needs no safetensors files.")
]
IsProfiled = Annotated[
    bool, typer.Option("--profile", help="Show where the time of one more round goes.")
]
IsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def bench(
    ctx: typer.Context,
    work: WorkArgument = Work.TEXT,
    model: Model = "shapes-vl",
    requests: Requests = None,
    rounds: Rounds = 2,
    batch: Batch = None,
    threads: NumThreads = None,
    dtype: DType = "auto",
    quantization: Quantization = None,
    kv_cache_dtype: KVCacheDType = "auto",
    dummy: Dummy = False,
    profile: IsProfiled = False,
    as_json: IsJson = False,
    device: Device = "auto",
    engine: Engine = None,
) -> None:
    """Measure how fast a model is on this machine.

    Answers are greedy and go on behind the end of the sequence, so that every run does the same
    work; what they say does not matter."""
    begun = time.perf_counter()
    from mmdeploy_llm.bench.results import BenchSettings

    options = engine_options(
        ctx,
        engine,
        dtype=dtype,
        device=device,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        max_num_seqs=batch,
        num_threads=threads,
        load_format="dummy" if dummy else None,
    )
    settings = BenchSettings(
        work=work.value,
        model=model,
        options=options,
        num_requests=requests or (NUM_TEXTS if work is Work.TEXT else NUM_IMAGES),
        num_rounds=rounds,
        is_profiled=profile,
        begun=begun,
    )
    measure(settings, as_json)


def measure(settings: BenchSettings, as_json: bool) -> None:
    """Runs and prints; on a terminal with a line for what is going on."""
    from mmdeploy_llm.bench.report import profile_table, result_table
    from mmdeploy_llm.bench.run import run_bench
    from mmdeploy_llm.terminal import make_console

    out, aside = make_console(), make_console(is_stderr=True)
    result = run_bench(settings, aside.print if aside.is_terminal else lambda _: None)
    if as_json:
        typer.echo(json.dumps(result.to_dict()))
        return
    out.print(result_table(result))
    if result.profile is not None:
        out.print()
        out.print(profile_table(result.profile))
