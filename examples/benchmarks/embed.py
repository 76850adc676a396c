"""Compares how fast this engine and others make vectors of documents and images.

    python examples/benchmarks/embed.py FOLDER [--rounds 3] [--only WORDS] [--openvino PYTHON]
        [--llamacpp PROGRAM] [--level avx2] [--peers NAMES] [--lengths 128,512]

Writes random checkpoints of real shapes into FOLDER, unless they are there: Qwen3-Embedding-0.6B
(28 layers, hidden 1,024, last token), BGE-base (12 layers, hidden 768, first token), SigLIP-base
(224 pixels) and ColQwen2 on Qwen2-VL-2B (256 tokens of an image, a vector for each). Documents have
128 or 512 tokens. --openvino: the Python interpreter of an environment with sentence-transformers
and optimum-intel; --llamacpp: the program llama-embedding, for which FOLDER/NAME holds bf16.gguf
and Q8_0.gguf (peers/README.md). --level avx2 holds all engines but llama.cpp to AVX2, as compare.py
does.

Each engine loads a model once, in a process of its own, and warms up; then they take turns, and
the processes of the others are stopped meanwhile. Rates are medians of the rounds, ratios medians
of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compare import Runner, RunnerError, end_when_told, say
from sessions import LEVELS, Level, level_here

OURS = "mmdeploy_llm"
QWEN3 = {
    "vocab_size": 151669,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
QWEN2_VL = {
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1000000.0,
        "mrope_section": [16, 24, 24],
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One table. tokens: of each document, 0: images. num: documents, by these lengths. precisions:
    ours -> the peers' (engine, precision) with which each is compared."""

    model: str
    lengths: tuple[int, ...]
    num: int
    precisions: dict[str, tuple[tuple[str, str], ...]]


TORCH = (("sentence_transformers", "bf16"), ("sentence_transformers", "float32"))
WORKS = (
    Work(
        model="qwen3-embedding-0.6b",
        lengths=(128, 512),
        num=32,
        precisions={
            "bf16": (*TORCH, ("openvino", "bf16"), ("llamacpp", "bf16")),
            "int8": (("llamacpp", "Q8_0"),),
        },
    ),
    Work(
        model="bge-base",
        lengths=(128, 512),
        num=64,
        precisions={"bf16": (*TORCH, ("openvino", "bf16")), "int8": ()},
    ),
    Work(
        model="siglip-base",
        lengths=(0,),
        num=64,
        precisions={"bf16": (("transformers", "bf16"), ("transformers", "float32")), "int8": ()},
    ),
    Work(
        model="colqwen2-2b",
        lengths=(0,),
        num=4,
        precisions={"bf16": (("transformers", "bf16"),), "int8": ()},
    ),
)


class LlamaCpp:
    """llama-embedding: each piece of work is a run of it; the time of a run without documents, the
    load, is taken off."""

    name = "llama.cpp"

    def __init__(self, program: str, folder: Path, precision: str) -> None:
        self.name = f"llama.cpp {precision}"
        file = folder / f"{precision}.gguf"
        if not file.exists():
            raise RunnerError(f"there is no {file}")
        threads = str(len(os.sched_getaffinity(0)))
        self._command = [program, "-m", str(file), "-t", threads, "-b", "2048", "-ub", "2048"]
        self._command += ["--pooling", "last", "--embd-normalize", "2", "--embd-output-format", ""]
        self._tokenizer = _tokenizer(folder)
        self._load = self._seconds(["a"])

    def ask(self, num: int, tokens: int, seed: int) -> dict[str, float]:
        """As Runner.ask."""
        return {
            "seconds": self._seconds(_documents(self._tokenizer, num, tokens, seed)) - self._load
        }

    def _seconds(self, texts: Sequence[str]) -> float:
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write("\n".join(texts))
            file.flush()
            begin = time.perf_counter()
            done = subprocess.run(
                [*self._command, "-f", file.name], capture_output=True, text=True, check=False
            )
        if done.returncode:
            raise RunnerError(done.stderr.strip().splitlines()[-1])
        return time.perf_counter() - begin

    def close(self) -> None:
        """Does nothing: no process is left."""


def _documents(*args: Any) -> list[str]:
    sys.path.insert(0, str(Path(__file__).parent / "peers"))
    from run_vectors import documents

    return documents(*args)


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def start(engine: str, precision: str, folder: Path, programs: dict[str, str], level: Level) -> Any:
    """Starts an engine and warms it up. Raises RunnerError."""
    if engine in ("openvino", "llamacpp") and not programs[engine]:
        raise RunnerError(f"no --{engine} was given")
    if engine == "llamacpp":
        return LlamaCpp(programs[engine], folder, precision)
    python = programs["openvino"] if engine == "openvino" else sys.executable
    arguments = ["--model", str(folder), "--engine", engine, "--precision", precision]
    arguments += level.arguments if engine == OURS else ()
    return Runner(python, "run_vectors.py", arguments, level.variables)


def run(
    work: Work, folder: Path, rounds: int, peers: str, programs: dict[str, str], level: Level
) -> None:
    """Measures one model and prints a table. peers: the only ones to compare with; "" for all."""
    wanted = [(OURS, own) for own in work.precisions]
    named = [peer for found in work.precisions.values() for peer in found]
    wanted += [peer for peer in named if not peers or peer[0] in peers.split(",")]
    unit = "images/s" if work.lengths == (0,) else "documents/s"
    with contextlib.ExitStack() as stack:
        runners: dict[tuple[str, str], Any] = {}
        for engine, precision in wanted:
            try:
                runner = start(engine, precision, folder, programs, level)
                stack.callback(runner.close)
                runner.ask(num=4, tokens=work.lengths[0], seed=99)
            except RunnerError as error:
                say(f"{engine} {precision}: left out, {error}")
                continue
            say(f"{runner.name}: ready")
            runners[engine, precision] = runner
        rates: dict[tuple[Any, int], list[float]] = {}
        for number in range(rounds):
            for length in work.lengths:
                num = max(8, work.num * 128 // length) if length else work.num
                for key, runner in runners.items():
                    done = runner.ask(num=num, tokens=length, seed=number)
                    rate = num / done["seconds"]
                    rates.setdefault((key, length), []).append(rate)
                    say(f"round {number + 1} {length:4} {runner.name:45} {rate:.2f}")
    print(table(work, runners, rates, unit))


def table(work: Work, runners: Any, rates: Any, unit: str) -> str:
    """Returns the medians, and the ratios of ours to each peer, as Markdown."""
    lines = [f"| {work.model}, {unit} | mmdeploy_llm | peer | peer's | ratio (of each round) |"]
    lines.append("|---|---|---|---|---|")
    for length in work.lengths:
        for own, peers in work.precisions.items():
            mine = rates.get(((OURS, own), length))
            if mine is None:
                continue
            what = f"{length} tokens, {own}" if length else f"images, {own}"
            found = [peer for peer in peers if peer in runners]
            if not found:
                lines.append(f"| {what} | {statistics.median(mine):.2f} | | | |")
            for peer in found:
                theirs = rates[peer, length]
                ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
                each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
                lines.append(
                    f"| {what} | {statistics.median(mine):.2f} | {runners[peer].name} | "
                    f"{statistics.median(theirs):.2f} | **{statistics.median(ratios):.2f}** "
                    f"({each}) |"
                )
    return "\n".join(lines)


def write_qwen3(folder: Path) -> None:
    """Writes a checkpoint of Qwen3-Embedding's form: its tokenizer adds the token of the vector."""
    from checkpoints import tokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import Qwen3Config, Qwen3Model

    words = tokenizer()
    words.chat_template = None  # its vectors are made of plain texts
    end = words.pad_token
    words.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, words.pad_token_id)]
    )
    save_as_sentence_transformer(folder, Qwen3Model(Qwen3Config(**QWEN3)), words, "lasttoken")


def write_bge(folder: Path) -> None:
    """Writes a checkpoint of BERT-base's shape."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    from tokenizers.processors import TemplateProcessing
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    found = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    found.normalizer = normalizers.BertNormalizer()
    found.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=8000, special_tokens=special)
    found.train([__file__, *map(str, Path(os.__file__).parent.glob("a*.py"))], trainer)
    found.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    words = PreTrainedTokenizerFast(
        tokenizer_object=found, **dict(zip(names, special, strict=True)), model_max_length=512
    )
    save_as_sentence_transformer(folder, BertModel(BertConfig()), words, "cls")


def write_siglip(folder: Path) -> None:
    """Writes a checkpoint of SigLIP-base's shape, 224 pixels."""
    from checkpoints import tokenizer
    from transformers import SiglipConfig, SiglipImageProcessorPil, SiglipModel

    model = SiglipModel(SiglipConfig(text_config={"num_hidden_layers": 1, "vocab_size": 16000}))
    model.bfloat16().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    SiglipImageProcessorPil(size={"height": 224, "width": 224}).save_pretrained(folder)


def write_colqwen2(folder: Path) -> None:
    """Writes a checkpoint of ColQwen2's form and the shapes of Qwen2-VL-2B."""
    import torch
    from checkpoints import MEDIA_TOKENS, tokenizer
    from transformers import (
        ColQwen2Config,
        ColQwen2ForRetrieval,
        Qwen2VLConfig,
        Qwen2VLImageProcessorPil,
    )

    words = tokenizer()
    media = {key: words.convert_tokens_to_ids(token) for key, token in MEDIA_TOKENS.items()}
    shapes = QWEN2_VL | {"bos_token_id": None, "eos_token_id": words.eos_token_id}
    config = ColQwen2Config(
        vlm_config=Qwen2VLConfig(text_config=shapes, vision_config={"hidden_size": 1536}, **media),
        embedding_dim=128,
    )
    torch.set_default_dtype(torch.bfloat16)
    ColQwen2ForRetrieval(config).save_pretrained(folder)
    torch.set_default_dtype(torch.float32)
    words.save_pretrained(folder)
    Qwen2VLImageProcessorPil().save_pretrained(folder)


WRITERS: dict[str, Callable[[Path], None]] = {
    "qwen3-embedding-0.6b": write_qwen3,
    "bge-base": write_bge,
    "siglip-base": write_siglip,
    "colqwen2-2b": write_colqwen2,
}


def save_as_sentence_transformer(folder: Path, model: Any, words: Any, pooling: str) -> None:
    """Writes a sentence-transformers folder in bfloat16."""
    import tempfile

    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    with tempfile.TemporaryDirectory() as plain:
        model.bfloat16().save_pretrained(plain)
        words.save_pretrained(plain)
        first = Transformer(plain, model_kwargs={"dtype": "bfloat16"})
        size = model.config.hidden_size
        SentenceTransformer(modules=[first, Pooling(size, pooling), Normalize()]).save(str(folder))


def main() -> None:
    """Parses the command line, writes what is missing, and runs."""
    end_when_told()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="a part of the model's name")
    parser.add_argument("--openvino", metavar="PYTHON", default="")
    parser.add_argument("--llamacpp", metavar="PROGRAM", default="")
    parser.add_argument("--level", choices=sorted(LEVELS), default="best")
    parser.add_argument("--peers", default="", help="the only ones, with commas between them")
    parser.add_argument("--lengths", help="tokens of documents, with commas between them")
    args = parser.parse_args()
    programs = {"openvino": args.openvino, "llamacpp": args.llamacpp}
    for work in WORKS:
        if args.only in work.model:
            folder = args.folder / work.model
            if not (folder / "config.json").exists():
                WRITERS[work.model](folder)
            if args.lengths and any(work.lengths):
                work = replace(work, lengths=tuple(map(int, args.lengths.split(","))))
            run(work, folder, args.rounds, args.peers, programs, level_here(args.level))


if __name__ == "__main__":
    main()
