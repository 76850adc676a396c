"""Formats a measurement as tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from .machine import Machine
from .profile import Profile
from .results import BenchResult, Limit, Memory

LOW_SHARE = 0.5  # of the limit: below it something is amiss
GOOD_SHARE = 0.8
FEW_REQUESTS = 8


def result_table(result: BenchResult) -> Table:
    """Builds a table of figures, their values and notes."""
    table = Table(box=None, pad_edge=False, show_header=False, title=_title(result))
    table.title_justify = "left"
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for row in _rows(result):
        table.add_row(*row)
    return table


def profile_table(profile: Profile) -> Table:
    """Builds a table with a row per phase, followed by the kinds of layers in it."""
    title = f"one round of {profile.seconds:.2f} s, {profile.num_steps} steps"
    table = Table(box=None, pad_edge=False, header_style="bold", title=title)
    table.title_justify = "left"
    table.add_column("where", no_wrap=True)
    for name in ("ms", "ms per step", "%"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column()
    for row in profile.rows:
        note = "in other threads, during the steps" if row.phase == "intake" else ""
        table.add_row(
            f"  {row.kind}" if row.kind else row.phase,
            f"{1000 * row.seconds:.1f}",
            f"{1000 * row.seconds / profile.num_steps:.2f}",
            f"{100 * row.share:.1f}",
            note,
        )
    return table


def _title(result: BenchResult) -> str:
    last = result.rounds[-1]
    images = f"{last.num_images} images, " if last.num_images else ""
    kinds = [result.dtype, result.quantization, f"KV cache {result.kv_cache_dtype}"]
    return (
        f"{result.work}: {images}{last.num_prompt_tokens:,} tokens in, {last.num_output_tokens:,} "
        f"out; at most {result.max_num_seqs} requests at once\n"
        f"{result.model}: {', '.join(kind for kind in kinds if kind)}; {result.device}, "
        f"{result.num_threads} thread{'s' if result.num_threads > 1 else ''}"
    )


def _rows(result: BenchResult) -> Iterator[tuple[str, str, str]]:
    alone = result.alone
    each = ", ".join(f"{done.num_output_tokens / done.seconds:.1f}" for done in result.rounds)
    yield "output tokens/s", f"{result.output_tokens_per_second:.1f}", f"rounds: {each}"
    if result.images_per_second:
        each = ", ".join(f"{done.num_images / done.seconds:.3f}" for done in result.rounds)
        yield "images/s", f"{result.images_per_second:.3f}", f"rounds: {each}"
    note = f"one request alone, {alone.num_prompt_tokens} tokens in"
    yield "time to first token", f"{1000 * alone.first_token:.0f} ms", note
    note = f"the same, {alone.num_output_tokens} tokens out"
    yield "each output token", f"{1000 * alone.per_output_token:.1f} ms", note
    note = "from the start of the program, imports included"
    yield "load to first token", f"{result.load_to_first_token:.2f} s", note
    yield "peak memory", _mebibytes(result.memory.peak), _memory(result.memory)
    if result.limit is None:
        yield "share of the limit", "", "unknown: the model is not built of this package's layers"
    else:
        yield "share of the limit", f"{100 * result.limit.share:.0f} %", _limit(result.limit)
        if result.limit.share < LOW_SHARE:
            yield "what to try", "", "; ".join(_advice(result, result.limit.machine))


def _memory(memory: Memory) -> str:
    cache = f"KV cache {_mebibytes(memory.kv_cache)}"
    if memory.weights is None:
        return cache
    needed = memory.weights + memory.kv_cache
    over = memory.peak - needed
    found = f"weights {_mebibytes(memory.weights)}, {cache}, all else {_mebibytes(over)}"
    most = max(memory.weights, memory.kv_cache, over)
    if most == memory.weights:
        return f"{found}: mostly weights; --quantization makes them smaller"
    if most == memory.kv_cache:
        return f"{found}: mostly the KV cache; fewer requests at once need less"
    return f"{found}: mostly the program with torch, and the values of a step, not the model"


def _limit(limit: Limit) -> str:
    machine = limit.machine
    return (
        f"{_verdict(limit.share)}: a round's matrix products need {limit.seconds:.2f} s at "
        f"{machine.flops / 1e9:,.0f} G "
        f"operations/s ({machine.precision}) and {machine.bandwidth / 1e9:.1f} GB/s, as measured "
        f"on this machine; {_kernels(machine)}"
    )


def _verdict(share: float) -> str:
    """Returns what the share of the limit says."""
    if share >= GOOD_SHARE:
        return "near the limit of this machine: only less work makes it faster"
    if share >= LOW_SHARE:
        return "as it should be: attention and what stands between the products take the rest"
    return f"low: {100 * (1 - share):.0f} % of the time goes elsewhere, see what to try"


def _kernels(machine: Machine) -> str:
    return "plain torch" if machine.level is None else f"C++ kernels for {machine.level}"


def _advice(result: BenchResult, machine: Machine) -> Iterator[str]:
    """Yields what may bring a run closer to the machine's limit."""
    if result.device == "cpu" and machine.level is None:
        yield "C++ kernels are missing: `mmdeploy-llm doctor` says why"
    if machine.precision == "float32":
        yield "--dtype bfloat16 reads half the bytes"
    if min(result.max_num_seqs, result.num_requests) < FEW_REQUESTS:
        yield "more requests at once (--requests, --batch) share each read of the weights"
    yield "--profile shows where the time goes; other programs on this machine slow it down"


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
