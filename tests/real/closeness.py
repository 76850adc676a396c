"""Measures how near a model in some number format stays to itself in float32, on real text.

    python -m tests.real.closeness                       # every row, SmolLM2, 4,088 positions
    python -m tests.real.closeness int4 "KV int4"        # these rows only
    python -m tests.real.closeness quantization=int4,quantization_group_size=16 --model qwen
    python -m tests.real.closeness dtype=float32 --file some.gguf --windows 40

A row is the name of one in ROWS, or options of LLM as NAME=VALUE,... which need no row; without a
dtype among them the model computes in bfloat16. --file
measures other weights of the same model, a GGUF file or a folder, against the same reference. The
first call of all computes the reference, in a minute, and keeps it in the folder of packages.py,
which the environment variable REAL_WEIGHTS may name.

The reference is transformers in float32 with the weights of the GGUF file, dequantised; so the row
"float32" shows what this engine alone adds. Text: the proceedings of a workshop of the Library of
Congress (lcet10.txt), in windows of 512 tokens, each a prompt of its own; a window's 511 next
tokens are its positions. KL: the mean Kullback-Leibler divergence of a position in nats, from the
reference's distribution; top: the share of positions with the reference's most probable token (of
equal logits the one with the lower id counts); perplexity: of the text itself.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.real.packages import file_of, folder_of, made

WINDOW = 512  # tokens
FEW, MANY = 8, 40  # windows: 4,088 positions for tests, 20,440 for the table
ROWS_AT_ONCE = 256  # of logits in float32: 50 MB with 50,000 tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One number format: the options of LLM, and what at least must hold.

    options: with bfloat16, as people load such models, unless they name a dtype.
    gguf: whether the file is loaded as it is; else the folder with its dequantised weights.
    kl, top, perplexity: the floor: the largest divergence, the smallest share of equal tokens, and
        the largest perplexity as a multiple of the reference's.
    """

    options: dict[str, Any]
    gguf: bool = False
    kl: float = math.inf
    top: float = 0.0
    perplexity: float = math.inf


@dataclass(slots=True)
class Found:
    """Sums up what is measured over some positions; `add` counts those of another window."""

    positions: int = 0
    kl_sum: float = 0.0
    same: int = 0
    loss: float = 0.0
    reference_loss: float = 0.0
    ties: int = 0  # positions whose two best logits are equal
    seconds: float = field(default=0.0, compare=False)

    @property
    def kl(self) -> float:
        return self.kl_sum / self.positions

    @property
    def top(self) -> float:
        return self.same / self.positions

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss / self.positions)

    @property
    def reference_perplexity(self) -> float:
        return math.exp(self.reference_loss / self.positions)

    def add(self, found: Tensor, reference: Tensor, following: Tensor) -> None:
        """Adds rows of logits [T, V] of both, and the tokens [T] that follow in the text."""
        self.ties += int((found.topk(2).values.diff() == 0).sum())
        same = found.argmax(-1) == reference.argmax(-1)
        ours, theirs = found.float().log_softmax(-1), reference.log_softmax(-1)
        self.positions += len(following)
        self.same += int(same.sum())
        self.kl_sum += float((theirs.exp() * (theirs - ours)).sum(dtype=torch.float64))
        columns = following[:, None]
        self.loss -= float(ours.gather(1, columns).sum(dtype=torch.float64))
        self.reference_loss -= float(theirs.gather(1, columns).sum(dtype=torch.float64))


WINT4_32 = {"quantization": "int4wo", "quantization_group_size": 32}
ROWS: dict[str, Row] = {
    "float32": Row(options={"dtype": "float32"}, kl=1e-07, top=0.9995, perplexity=1.0001),
    "bfloat16": Row(options={}, kl=0.00096, top=0.971, perplexity=1.005),
    "float16": Row(options={"dtype": "float16"}, kl=2e-05, top=0.992, perplexity=1.002),
    "int8wo": Row(options={"quantization": "int8wo"}, kl=0.0039, top=0.953, perplexity=1.01),
    "int8a8": Row(options={"quantization": "int8a8"}, kl=0.011, top=0.931, perplexity=1.02),
    "int8": Row(options={"quantization": "int8"}, kl=0.0072, top=0.945, perplexity=1.01),
    "int4wo, groups of 32": Row(options=WINT4_32, kl=0.3, top=0.711, perplexity=1.3),
    "int4, groups of 32": Row(
        options=WINT4_32 | {"quantization": "int4"}, kl=0.315, top=0.704, perplexity=1.3
    ),
    "int4wo": Row(options={"quantization": "int4wo"}, kl=0.44, top=0.663, perplexity=1.42),
    "int4": Row(options={"quantization": "int4"}, kl=0.46, top=0.658, perplexity=1.44),
    "KV int8": Row(options={"kv_cache_dtype": "int8"}, kl=0.0013, top=0.971, perplexity=1.005),
    "KV int4": Row(options={"kv_cache_dtype": "int4"}, kl=0.032, top=0.89, perplexity=1.04),
    "KV int4, float32": Row(
        options={"dtype": "float32", "kv_cache_dtype": "int4"}, kl=0.032, top=0.89, perplexity=1.04
    ),
    "the file as it is": Row(options={}, gguf=True, kl=0.00089, top=0.974, perplexity=1.005),
    "the file in float32": Row(
        options={"dtype": "float32"}, gguf=True, kl=1e-07, top=0.9995, perplexity=1.0001
    ),
    "the file in float16": Row(
        options={"dtype": "float16"}, gguf=True, kl=2e-05, top=0.992, perplexity=1.002
    ),
    "the file, int8": Row(
        options={"quantization": "int8"}, gguf=True, kl=0.0101, top=0.934, perplexity=1.03
    ),
    "the file, int4": Row(
        options={"quantization": "int4"}, gguf=True, kl=0.0101, top=0.934, perplexity=1.03
    ),
}


class Reference:
    """transformers' model in float32, of which the last hidden states are kept in a file.

    file: of GGUF, with the weights; None for that of the package.
    """

    def __init__(self, model: str, windows: int, file: Path | None = None) -> None:
        self.model = model
        self.folder = dequantised(model, file)
        self.windows = windows_of(self.folder, windows)
        name = f"{self.folder.name.removesuffix('-float32')}-{windows}-windows.pt"
        self.hidden = torch.load(made(name, self._write), mmap=True)
        self._head: Tensor | None = None

    def _write(self, path: Path) -> None:
        model = transformers_model(self.folder)
        with torch.inference_mode():
            states = [
                model.model(torch.tensor([window])).last_hidden_state[0, :-1]
                for window in self.windows
            ]
        torch.save(torch.stack(states), path)

    def logits(self, window: int, rows: slice) -> Tensor:
        """Returns logits [T, V] in float32 of some rows of a window."""
        if self._head is None:
            self._head = transformers_model(self.folder).get_output_embeddings().weight.detach()
        return self.hidden[window, rows] @ self._head.T


def transformers_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Returns transformers' model of a folder."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def dequantised(model: str, file: Path | None = None) -> Path:
    """Returns a folder with the weights of a GGUF file in float32, which transformers reads and
    writes; it is made once. file: None for that of the package."""
    name, file = (model, file_of(model)) if file is None else (file.stem, file)

    def write(folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        names = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
        read = AutoModelForCausalLM.from_pretrained(**names, dtype=torch.float32)
        # The same floats in a model that knows nothing of the file, which can be saved.
        del read.config.quantization_config
        plain = type(read)(read.config)
        plain.load_state_dict(read.state_dict())
        plain.generation_config = read.generation_config
        plain.save_pretrained(folder)
        AutoTokenizer.from_pretrained(**names).save_pretrained(folder)

    return made(f"{name}-float32", write)


def windows_of(folder: Path, number: int) -> list[list[int]]:
    """Returns so many windows of WINDOW token ids from the text, evenly spread over it."""
    from transformers import AutoTokenizer

    text = (folder_of("text") / "lcet10.txt").read_text("latin-1")
    ids = AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False)["input_ids"]
    apart = (len(ids) - WINDOW) // MANY
    spread = [round(n * MANY / number) * apart for n in range(number)]
    return [ids[start : start + WINDOW] for start in spread]


@contextmanager
def logits_seen(see: Callable[[Tensor], None]) -> Iterator[None]:
    """Within it, `see` is called with the logits of each prompt token, as the engine has them
    before it makes log-probabilities of them: all of them, where an answer would hold a few."""
    from mmdeploy_llm.engine.runner.sampling import logprobs

    original = logprobs.prompt_logprobs

    def watched(logits: Tensor, next_token_ids: Tensor, k: int) -> Any:
        see(logits)
        return original(logits[:1], next_token_ids[:1], k) * len(logits)  # nobody reads them

    with mock.patch.object(logprobs, "prompt_logprobs", watched):
        yield


def measure(reference: Reference, options: dict[str, Any], path: Path | None = None) -> Found:
    """Measures the weights at `path`, those of the reference by default, with options of LLM."""
    from mmdeploy_llm import LLM, SamplingParams

    found = Found()
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
    given = {"max_model_len": 2 * WINDOW, "kv_cache_memory": 2**29, "weight_cache": False}
    options = given | options
    with LLM(model=str(path or reference.folder), **options) as llm:
        began = time.perf_counter()
        for number, window in enumerate(reference.windows):
            at = 0

            def see(logits: Tensor) -> None:
                nonlocal at
                rows = slice(at, at + len(logits))
                following = torch.tensor(window[1:][rows])  # noqa: B023
                found.add(logits.cpu(), reference.logits(number, rows), following)  # noqa: B023
                at = rows.stop

            with logits_seen(see), torch.inference_mode():
                llm.generate([{"prompt_token_ids": window}], params, use_tqdm=False)
            assert at == WINDOW - 1, f"{at} positions of a window of {WINDOW} tokens were seen"
        found.seconds = time.perf_counter() - began
    return found


def row_of(words: str) -> Row:
    """Returns the row of a name, or one of options that are written as NAME=VALUE,..."""
    if words in ROWS:
        return ROWS[words]
    pairs = [pair.partition("=") for pair in words.split(",")]
    if not all(value for _, _, value in pairs):
        raise SystemExit(f"{words!r} is no row ({', '.join(ROWS)}) and no NAME=VALUE,...")
    as_value = {"True": True, "False": False, "None": None}
    options = {
        name: int(value) if value.lstrip("-").isdigit() else as_value.get(value, value)
        for name, _, value in pairs
    }
    return Row(options=options)


def measure_row(reference: Reference, row: Row) -> Found:
    """Measures one row of the table."""
    if row.gguf:
        return measure(reference, row.options, file_of(reference.model))
    return measure(reference, {"dtype": "bfloat16"} | row.options)


def main() -> None:
    """Prints a line for each row that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", metavar="ROW")
    parser.add_argument("--model", default="smollm2", choices=("smollm2", "qwen", "gemma"))
    parser.add_argument("--file", type=Path, help="other weights of the same model")
    parser.add_argument("--windows", type=int, default=FEW, help=f"of {WINDOW} tokens")
    args = parser.parse_args()
    reference = Reference(args.model, args.windows)
    for name in args.rows or ROWS:
        row = row_of(name)
        if args.file:
            found = measure(reference, {"dtype": "bfloat16"} | row.options, args.file)
        else:
            found = measure_row(reference, row)
        print(
            f"{name:24} KL {found.kl:.2e}  top {found.top:7.2%}  "
            f"perplexity {found.perplexity:7.3f} (float32 {found.reference_perplexity:.3f})  "
            f"ties {found.ties}  {found.positions} positions  {found.seconds:.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
