"""Measures speculative="ngram" for one request: text that repeats, and text that does not.

    python examples/benchmarks/checkpoints.py MODELS qwen05
    python examples/benchmarks/speculation.py MODELS/qwen05 --quantization int8

A model with random weights does not copy. So the answers are dictated: the model computes every
step as usual, and then the logit of the next token of a prepared answer is raised, in both engines
alike. Only the answers make a difference, which are, with one id for each word and sign:

    table   a table of names and numbers in the prompt, the same as JSON
    copy    a page of text in the prompt, the same with one word in 20 corrected
    new     a page of text in the prompt, and as many other words: nothing repeats

Two engines, with speculation and without, answer in turn. Prints for each text the tokens per
second after the first token, the median of the ratios of all rounds, and how many drafts were
right.
A ratio above 1 means that speculation is faster. Both must return exactly the dictated tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
from collections.abc import Callable
from typing import Any

from models_here import check_model

from mmdeploy_llm import LLM, SamplingParams

FIRST_ID = 20  # ids below may be special
NUM_WORDS = 15_000
RAISED = 1e4  # the logit of the dictated token
PIECE = re.compile(r"\w+|\s+|[^\w\s]")
Text = tuple[list[int], list[int]]  # prompt, answer


def table(rng: random.Random) -> Text:
    """Returns a table and the same as JSON."""
    columns = ["name", "street", "city", "amount", "date"]
    rows = [[f"v{rng.randrange(3000)}" for _ in columns] for _ in range(16)]
    plain = "\n".join(" | ".join(row) for row in [columns, *rows])
    answer = json.dumps([dict(zip(columns, row, strict=True)) for row in rows])
    ids: dict[str, int] = {}

    def ids_of(text: str) -> list[int]:
        return [FIRST_ID + ids.setdefault(piece, len(ids)) for piece in PIECE.findall(text)]

    return ids_of(plain), ids_of(answer)


def page(rng: random.Random, num_words: int = 320) -> list[int]:
    """Returns the ids of random words."""
    return [rng.randrange(FIRST_ID, NUM_WORDS) for _ in range(num_words)]


def copy(rng: random.Random) -> Text:
    """Returns a page and the same page with some words replaced."""
    words = page(rng)
    return words, [
        rng.randrange(FIRST_ID, NUM_WORDS) if at % 20 == 7 else word
        for at, word in enumerate(words)
    ]


def new(rng: random.Random) -> Text:
    """Returns two pages that have nothing in common."""
    return page(rng), page(rng)


TEXTS: dict[str, Callable[[random.Random], Text]] = {"table": table, "copy": copy, "new": new}


class Dictation:
    """Has a model generate a prepared text: wraps `forward` and `logits` of a model that computes
    one request."""

    def __init__(self, model: Any) -> None:
        self._forward, self._logits = model.forward, model.logits
        self._positions: list[int] = []
        self.text: list[int] = []
        model.forward, model.logits = self._note, self._raise

    def _note(self, inputs: Any) -> Any:
        self._positions = inputs.positions.tolist()
        return self._forward(inputs)

    def _raise(self, hidden: Any) -> Any:
        logits = self._logits(hidden)
        for row, position in enumerate(self._positions[-len(hidden) :]):
            if position + 1 < len(self.text):
                logits[row, self.text[position + 1]] = RAISED
        return logits


def tokens_per_second(llm: LLM, dictation: Dictation, text: Text) -> float:
    """Answers one prompt; returns the tokens per second after the first token."""
    prompt, answer = text
    dictation.text = prompt + answer
    params = SamplingParams(temperature=0, max_tokens=len(answer), ignore_eos=True)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    if output.outputs.token_ids != answer:
        raise SystemExit(f"the answer is not the dictated one: {output.error_msg or output}")
    metrics = output.metrics
    return (len(answer) - 1) / (metrics.model_forward_time - metrics.first_token_time)


def main() -> None:
    """Prints one line for each text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="folder of a text model, from checkpoints.py for example")
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=list(TEXTS))
    parser.add_argument("--rounds", type=int, default=3, help="answers of each engine and text")
    parser.add_argument("--quantization", help="as in LLM, for example int8 (none)")
    parser.add_argument("--threads", type=int, help="cores to compute on (all)")
    parser.add_argument("--cpu-level", help="as in LLM, for example avx2 (the best one)")
    args = parser.parse_args()
    check_model(parser, args.model)
    options = {"quantization": args.quantization, "num_threads": args.threads, "quiet": True}
    options |= {
        "cpu_level": args.cpu_level,
        "max_model_len": 2048,
        "max_num_seqs": 1,
        "enable_prefix_caching": False,
    }
    llms = [LLM(args.model, speculative=kind, **options) for kind in (None, "ngram")]
    engines = [(llm, Dictation(llm.model)) for llm in llms]
    for name in args.texts:
        rounds, before = [], llms[1].stats()
        for number in range(args.rounds):
            text = TEXTS[name](random.Random(f"{name} {number}"))
            rounds.append([tokens_per_second(*engine, text) for engine in engines])
        after = llms[1].stats()
        plain, drafted = (statistics.median(speeds) for speeds in zip(*rounds, strict=True))
        ratios = [drafted / plain for plain, drafted in rounds]
        num_right = after.num_accepted_drafts - before.num_accepted_drafts
        print(
            f"{name}: {plain:.1f} tok/s without, {drafted:.1f} with: ratio "
            f"{statistics.median(ratios):.3f} ({', '.join(f'{ratio:.3f}' for ratio in ratios)}), "
            f"{num_right} of {after.num_drafts - before.num_drafts} drafts right",
            flush=True,
        )


if __name__ == "__main__":
    main()
