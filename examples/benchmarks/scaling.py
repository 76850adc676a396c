"""Measures what grows faster than its work: scaling.py [--repeats 3] [NAME ...]

For each row the CPU seconds of work of several sizes, and the exponent by which they grow from the
smallest to the largest: 1.0 is in proportion, 2.0 four times for twice as much. Goal: at most 1.1.
The rows need no model; they measure what surrounds one, of a vocabulary of 152,064 tokens where one
matters.

admission     requests that are admitted to as many seats, and decode two tokens
requests      requests of 16 tokens that pass through 64 seats
completions   completions of one prompt (n), given to the ticket that its caller holds
unread        deltas of a stream that nobody has read, and their joined reading
read          deltas of a stream that are read one by one
pictures      images of one prompt, their placeholders expanded
banned words  prompts with the same 1,000 bad_words, through the tokenizer
banned steps  bad_words of one request, a generated token
constraints   rows with a grammar, in which half of the vocabulary is allowed
logprobs      rows with logprobs=5
top-p         rows of flat logits with top_p=0.95
prefix        tokens of a prompt, hashed, registered and found again
stops         tokens of an answer with three stop texts
media         pictures of half a megabyte that are asked for the third time
garbage       objects that loading left, in a full collection of a step
vocabulary    tokens of a tokenizer that a second start loads
"""

from __future__ import annotations

import argparse
import functools
import gc
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mmdeploy_llm.client.aio.handle import Handle, News
from mmdeploy_llm.engine.delivery.detokenizer import Vocabulary
from mmdeploy_llm.engine.delivery.pipeline import ParserSources, TextPipeline
from mmdeploy_llm.engine.desk.ask import Ask
from mmdeploy_llm.engine.desk.ticket import Ticket
from mmdeploy_llm.engine.intake.placeholders import Placeholders
from mmdeploy_llm.engine.intake.tokenizer import PromptTokenizer, load_tokenizer
from mmdeploy_llm.engine.runner.sampling.draw import DrawParams, draw
from mmdeploy_llm.engine.runner.sampling.grammar import ban_tokens
from mmdeploy_llm.engine.runner.sampling.logprobs import prompt_logprobs
from mmdeploy_llm.engine.runner.sampling.trackers import BadSequences
from mmdeploy_llm.engine.schedule.scheduler import Scheduler, SchedulerConfig
from mmdeploy_llm.engine.startup.parse_cache.stand_in import Source
from mmdeploy_llm.engine.startup.parse_cache.tokenizer import tokenizer_stand_in
from mmdeploy_llm.hooks import MediaInput
from mmdeploy_llm.media.loading.cache import ByteCache
from mmdeploy_llm.media.loading.kinds import ModelMedia
from mmdeploy_llm.media.loading.processed import FIRST_BYTES, MOST_BYTES
from mmdeploy_llm.request import Request
from mmdeploy_llm.values.options.model_names import bundled_models
from mmdeploy_llm.values.outputs.request_output import (
    CompletionOutput,
    Completions,
    RequestMetrics,
    RequestOutput,
)
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.plan import StepResult

VOCAB_SIZE = 152_064
GOAL = 1.1
REQUEST = SamplingParams(max_tokens=2, ignore_eos=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Work that is measured. prepare(size): returns what is timed. sizes: ascending."""

    name: str
    sizes: tuple[int, ...]
    prepare: Callable[[int], Callable[[], object]]


def seconds_of(row: Row, size: int, num_repeats: int) -> float:
    """Returns the least CPU seconds of a few runs, each prepared anew."""
    best = math.inf
    for _ in range(num_repeats):
        run = row.prepare(size)
        begin = time.process_time()
        run()
        best = min(best, time.process_time() - begin)
    return best


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Returns how the seconds grow with the size, as a power of it."""
    return math.log(seconds[-1] / seconds[0]) / math.log(sizes[-1] / sizes[0])


class Pictures:
    """Stands for a family's image processor: only its placeholder is read here."""

    kind, token, markers, written_token = "image", "<|image@placeholder|>", (), None
    is_whole_prompt, joints = False, ()


def tokenizer() -> Any:
    """Returns the tokenizer of the bundled model."""
    return load_tokenizer(bundled_models()["shapes-vl"])


def request(index: int, num_tokens: int = 16) -> Request:
    """Returns a request like no other."""
    ids = [index, *range(num_tokens - 1)]
    return Request(request_id=f"{index}", prompt=None, prompt_token_ids=ids, params=REQUEST)


def served(size: int, num_seats: int) -> Callable[[], object]:
    """Serves requests with steps whose tokens are always 7."""
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=num_seats,
            max_num_batched_tokens=max(8192, num_seats),
            max_model_len=4096,
            num_blocks=4 * num_seats,
            block_size=64,
        )
    )

    def run() -> None:
        for index in range(size):
            scheduler.add(request(index))
        while scheduler.has_work:
            plan = scheduler.plan(0.0)
            sampled = {item.request_id: 7 for item in plan.scheduled if item.samples}
            scheduler.commit(plan, StepResult(step_id=plan.step_id, sampled=sampled), 0.0)

    return run


def output(index: int = 0, *, finished: bool = True) -> RequestOutput:
    """Returns an output of one completion with eight tokens."""
    completion = CompletionOutput(
        index=index, token_ids=[7] * 8, text="a text", finish_reason="stop" if finished else None
    )
    return RequestOutput(
        request_id="x",
        prompt="p",
        outputs=Completions([completion]),
        finished=finished,
        metrics=RequestMetrics(arrival_time=0.0, inference_start_time=0.0),
    )


def completions(size: int) -> Callable[[], object]:
    """Ends n completions one after the other."""
    ask = Ask(prompt="p", params=SamplingParams(n=size), request_id="x")
    ticket, each = Ticket(ask, 0, lambda number: None), [output(index) for index in range(size)]
    return lambda: [ticket.put(one) for one in each]


def unread(size: int) -> Callable[[], object]:
    """Streams to a reader that reads once, at the end."""
    ask = Ask(prompt="p", params=SamplingParams(), request_id="x", stream=True)
    ticket, delta = Ticket(ask, 0, lambda number: None), output(finished=False)
    return lambda: ([ticket.put(delta) for _ in range(size)], ticket.get_nowait())


def read(size: int) -> Callable[[], object]:
    """Streams to a reader that reads every delta, and asks for the whole at the end."""
    ask = Ask(prompt="p", params=SamplingParams(), request_id="x", stream=True)
    ticket, delta = Ticket(ask, 0, lambda number: None), output(finished=False)
    handle = Handle(ticket, News(), None)

    def run() -> None:
        for _ in range(size):
            ticket.put(delta)
            handle.get_nowait()
        handle.so_far()

    return run


def pictures(size: int) -> Callable[[], object]:
    """Expands the placeholders of a prompt with many pictures."""
    raw = PromptTokenizer(tokenizer())
    image: Any = Pictures()
    media = ModelMedia(processors={"image": image})
    placeholders = Placeholders(media, raw)
    ids = [5, raw.token_id(image.token) or 0, 6] * size
    item = MediaInput(kind="image", tensors={}, num_tokens=16, key="k")
    return lambda: placeholders.expand(ids, [item] * size, raw.encode)


def banned_words(size: int) -> Callable[[], object]:
    """Spells the same list of words for every prompt."""
    raw, words = PromptTokenizer(tokenizer()), [f"word{index}" for index in range(1000)]
    params = SamplingParams(bad_words=words)
    return lambda: [raw.banned(params) for _ in range(size)]


def banned_steps(size: int) -> Callable[[], object]:
    """Looks for begun words after each of 200 tokens."""
    tracker = BadSequences([(index, index + 1, 5) for index in range(size)], [1, 2, 3])

    def run() -> None:
        for token_id in range(200):
            tracker.append(token_id)
            tracker.banned()

    return run


class HalfBanned:
    """Stands for a guide that allows every other token."""

    def fill(self, mask: torch.Tensor, row: int) -> None:
        """Fills a row of the mask."""
        mask[row] = 0x55555555


def constraints(size: int) -> Callable[[], object]:
    """Bans tokens in the rows of a step."""
    logits = torch.randn(size, VOCAB_SIZE)
    guides: dict[int, Any] = {row: HalfBanned() for row in range(size)}
    return lambda: ban_tokens(logits, guides)


def logprobs(size: int) -> Callable[[], object]:
    """Computes five log-probabilities a row."""
    logits = torch.randn(size, VOCAB_SIZE)
    ids = logits.argmax(1)
    return lambda: prompt_logprobs(logits, ids, 5)


def top_p(size: int) -> Callable[[], object]:
    """Draws from logits of which a rule keeps many thousands."""
    logits, rows = torch.randn(size, VOCAB_SIZE) / 10, np.ones(size)
    params = DrawParams(
        temperature=rows.astype(np.float32),
        top_k=np.zeros(size, np.int64),
        top_p=0.95 * rows,
        min_p=0 * rows,
        uniforms=0.5 * rows,
    )
    return lambda: draw(logits, params)


def prefix(size: int) -> Callable[[], object]:
    """Computes a long prompt, then finds it again."""
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=2,
            max_num_batched_tokens=2048,
            max_model_len=2 * size,
            num_blocks=4 * size // 64,
            block_size=64,
        )
    )

    def run() -> None:
        for index in range(2):
            own = request(0, size)
            own.request_id = f"{index}"
            scheduler.add(own)
            while scheduler.has_work:
                plan = scheduler.plan(0.0)
                sampled = {item.request_id: 7 for item in plan.scheduled if item.samples}
                scheduler.commit(plan, StepResult(step_id=plan.step_id, sampled=sampled), 0.0)

    return run


def stops(size: int) -> Callable[[], object]:
    """Turns ids into text, one by one, and looks for stop texts."""
    params = SamplingParams(stop=["\n\n", "###", "User:"])
    own = Request(request_id="x", prompt=None, prompt_token_ids=[1], params=params)
    pipeline = TextPipeline(Vocabulary(tokenizer()), own, ParserSources())
    ids = [60 + index % 20 for index in range(size)]
    return lambda: pipeline.push(ids)


def media(size: int) -> Callable[[], object]:
    """Asks for pictures a third time. What makes one takes a thousandth of a picture's time."""
    cache: ByteCache[int] = ByteCache(FIRST_BYTES, lambda _: 2**19, most=lambda _: MOST_BYTES)

    def ask() -> None:
        for index in range(size):
            cache.get_or_make(str(index), lambda: sum(range(2000)))

    ask()
    ask()
    return ask


def garbage(size: int) -> Callable[[], object]:
    """Collects what a step left, after an engine has loaded objects and set them aside."""
    gc.unfreeze()
    loaded = [[index] for index in range(size)]
    gc.collect()
    gc.freeze()
    return lambda: (gc.collect(), len(loaded))


def vocabulary(size: int) -> Callable[[], object]:
    """Loads a byte-level tokenizer as a second start does."""
    kept = {"backend": _tokenizer_json(size), "splits": False, "values": {}}
    return lambda: tokenizer_stand_in(kept, Source(lambda: None))


@functools.cache
def _tokenizer_json(size: int) -> str:
    """Returns the JSON of a tokenizer of so many tokens, made of random merges."""
    draws, tokens = random.Random(0), sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: index for index, token in enumerate(tokens)}
    merges = []
    while len(tokens) < size:
        pair = (
            tokens[draws.randrange(min(len(tokens), 4096))],
            tokens[draws.randrange(256)],
        )
        token = "".join(pair)
        if token not in ids:
            ids[token] = len(tokens)
            tokens.append(token)
            merges.append(pair)
    made = Tokenizer(models.BPE(vocab=ids, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return str(made.to_str())


ROWS = (
    Row(name="admission", sizes=(512, 1024, 2048), prepare=lambda size: served(size, size)),
    Row(name="requests", sizes=(1000, 2000, 4000), prepare=lambda size: served(size, 64)),
    Row(name="completions", sizes=(64, 256, 1024), prepare=completions),
    Row(name="unread", sizes=(256, 1024, 4096), prepare=unread),
    Row(name="read", sizes=(1000, 8000, 64000), prepare=read),
    Row(name="pictures", sizes=(1000, 4000, 16000), prepare=pictures),
    Row(name="banned words", sizes=(64, 256, 1024), prepare=banned_words),
    Row(name="banned steps", sizes=(100, 1000, 10000), prepare=banned_steps),
    Row(name="constraints", sizes=(4, 16, 64), prepare=constraints),
    Row(name="logprobs", sizes=(4, 16, 64), prepare=logprobs),
    Row(name="top-p", sizes=(4, 16, 64), prepare=top_p),
    Row(name="prefix", sizes=(4096, 16384, 65536), prepare=prefix),
    Row(name="stops", sizes=(500, 2000, 8000), prepare=stops),
    Row(name="media", sizes=(100, 800, 3200), prepare=media),
    Row(name="garbage", sizes=(10_000, 100_000, 1_000_000), prepare=garbage),
    Row(name="vocabulary", sizes=(16_000, 64_000, 250_000), prepare=vocabulary),
)


def main() -> None:
    """Prints a line for each row; ends with 1 where one is above the goal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", nargs="*", metavar="NAME", help="rows, all by default")
    parser.add_argument("--repeats", type=int, default=3, help="runs, of which the fastest counts")
    given = parser.parse_args()
    known = {row.name for row in ROWS}
    if unknown := set(given.rows) - known:
        parser.error(f"unknown rows {sorted(unknown)}; known: {sorted(known)}")
    torch.set_num_threads(1)  # so that CPU seconds are those of the work
    is_good = True
    for row in ROWS:
        if given.rows and row.name not in given.rows:
            continue
        seconds = [seconds_of(row, size, given.repeats) for size in row.sizes]
        found = exponent(row.sizes, seconds)
        is_good = is_good and found <= GOAL
        each = "  ".join(
            f"{size}: {1000 * own:.1f} ms" for size, own in zip(row.sizes, seconds, strict=True)
        )
        print(f"{row.name:13} {found:5.2f}   {each}", flush=True)
    sys.exit(not is_good)


if __name__ == "__main__":
    main()
