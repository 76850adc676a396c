"""Compares this engine and others at models with an encoder and a decoder: Whisper, Florence-2,
Pix2Struct, GIT and Kosmos-2.5.

    python examples/benchmarks/encoders.py FOLDER [--rounds 3] [--only WORDS] [--num 16]
        [--threads 1] [--whispercpp PYTHON]

Writes random checkpoints of real shapes into FOLDER, unless they are there: Whisper base and small,
Florence-2 base, Pix2Struct base, GIT base, and Kosmos-2.5 with a quarter of its layers. A sound is
half a minute, a picture 768 x 768; each answer has 64 tokens, greedy, end-of-sequence ignored.
--num: items of a round. --threads: of each engine; seconds are those of the processor then, which
other programs change least. --whispercpp: the Python interpreter of an environment with
pywhispercpp (peers/README.md), which gets the same weights in 16 bits.

Each engine loads a model once, in a process of its own, and warms up; then they take turns, and
the processes of the others are stopped meanwhile. Rates are medians of the rounds, ratios medians
of the rounds' ratios. transformers computes 16 items at once, whisper.cpp one after another.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compare import Runner, RunnerError, end_when_told, say
from encoder_checkpoints import write_git, write_kosmos, write_pix2struct

OURS = "mmdeploy_llm"
WHISPER_SIZES = {"base": (512, 8, 6), "small": (768, 12, 12)}  # channels, heads, layers
NUM_WORDS, NUM_LANGUAGES = 50257, 99
AFTER_LANGUAGES = ("translate", "transcribe", "startoflm", "startofprev", "nospeech")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One table. precisions: ours -> the peers (engine, precision) with which each is compared."""

    model: str
    unit: str
    precisions: dict[str, tuple[tuple[str, str], ...]]


TORCH = (("transformers", "bf16"), ("transformers", "float32"))
SOUNDS = {"bf16": (*TORCH, ("whispercpp", "f16")), "int8": (("whispercpp", "f16"),)}
WORKS = (
    Work(model="whisper-base", unit="seconds of sound a second", precisions=SOUNDS),
    Work(model="whisper-small", unit="seconds of sound a second", precisions=SOUNDS),
    Work(model="florence-2-base", unit="images/s", precisions={"bf16": TORCH, "int8": ()}),
    Work(model="pix2struct-base", unit="images/s", precisions={"bf16": TORCH[:1]}),
    Work(model="git-base", unit="images/s", precisions={"bf16": TORCH[:1]}),
    Work(model="kosmos-2.5-quarter", unit="images/s", precisions={"bf16": TORCH[:1]}),
)


def run(work: Work, folder: Path, args: argparse.Namespace) -> None:
    """Measures one model and prints a table."""
    wanted = [(OURS, own) for own in work.precisions]
    wanted += dict.fromkeys(peer for peers in work.precisions.values() for peer in peers)
    with contextlib.ExitStack() as stack:
        runners: dict[tuple[str, str], Runner] = {}
        for engine, precision in wanted:
            try:
                runners[engine, precision] = start(engine, precision, folder, args)
                stack.callback(runners[engine, precision].close)
                runners[engine, precision].ask(num=2, seed=99)
            except RunnerError as error:
                say(f"{engine} {precision}: left out, {error}")
                runners.pop((engine, precision), None)
        rates: dict[tuple[str, str], list[float]] = {}
        for number in range(args.rounds):
            for key, runner in runners.items():
                done = runner.ask(num=args.num, seed=number)
                each = 30 if "sound" in work.unit else 1
                rates.setdefault(key, []).append(each * args.num / done["seconds"])
                say(f"round {number + 1} {runner.name:30} {rates[key][-1]:.3f} {work.unit}")
    print(table(work, {key: runner.name for key, runner in runners.items()}, rates))


def start(engine: str, precision: str, folder: Path, args: argparse.Namespace) -> Runner:
    """Starts an engine. Raises RunnerError."""
    if engine == "whispercpp" and not args.whispercpp:
        raise RunnerError("no --whispercpp was given")
    python = args.whispercpp if engine == "whispercpp" else sys.executable
    arguments = ["--model", str(folder), "--engine", engine, "--precision", precision]
    if args.threads is not None:
        arguments += ["--threads", str(args.threads)]
    return Runner(python, "run_encoders.py", arguments)


def table(work: Work, names: dict[tuple[str, str], str], rates: Any) -> str:
    """Returns the medians, and the ratios of ours to each peer, as Markdown."""
    lines = [
        f"| {work.model}, {work.unit} | mmdeploy_llm | peer | peer's | ratio (of each round) |",
        "|---|---|---|---|---|",
    ]
    for own, peers in work.precisions.items():
        mine = rates.get((OURS, own))
        if mine is None:
            continue
        first = f"| {own} | {statistics.median(mine):.2f} |"
        found = [peer for peer in peers if peer in names]
        for peer in found:
            ratios = [a / b for a, b in zip(mine, rates[peer], strict=True)]
            each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
            lines.append(
                f"{first} {names[peer]} | {statistics.median(rates[peer]):.2f} | "
                f"**{statistics.median(ratios):.2f}** ({each}) |"
            )
        if not found:
            lines.append(f"{first} | | |")
    return "\n".join(lines)


def write_whisper(folder: Path, size: str) -> None:
    """Writes a checkpoint of Whisper's shape with its special tokens, and the same for
    whisper.cpp."""
    from transformers import (
        GenerationConfig,
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
    )

    from tests.plugins.whisper.other_files import write_ggml

    words, languages = _whisper_words()
    channels, heads, layers = WHISPER_SIZES[size]
    ids = words.convert_tokens_to_ids
    ends = {"bos_token_id": NUM_WORDS, "eos_token_id": NUM_WORDS, "pad_token_id": NUM_WORDS}
    config = WhisperConfig(
        vocab_size=len(words),
        d_model=channels,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_ffn_dim=4 * channels,
        decoder_ffn_dim=4 * channels,
        decoder_start_token_id=NUM_WORDS + 1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **ends,
    )
    model = WhisperForConditionalGeneration(config).bfloat16()
    model.generation_config = GenerationConfig(
        decoder_start_token_id=NUM_WORDS + 1,
        is_multilingual=True,
        lang_to_id={token: ids(token) for token in languages},
        task_to_id={name: ids(f"<|{name}|>") for name in AFTER_LANGUAGES[:2]},
        no_timestamps_token_id=ids("<|notimestamps|>"),
        prev_sot_token_id=ids("<|startofprev|>"),
        **ends,
    )
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    extractor = WhisperFeatureExtractor()
    extractor.save_pretrained(folder)
    texts = [b" ", *(f" w{number}".encode() for number in range(1, NUM_WORDS))]
    write_ggml(model, texts, folder / "ggml-f16.bin", "f16", extractor.mel_filters)


def _whisper_words() -> tuple[Any, list[str]]:
    """Returns a tokenizer whose special tokens have Whisper's ids, and the tokens of languages."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    known = [*letters, *(f"w{number}" for number in range(NUM_WORDS - len(letters)))]
    found = Tokenizer(models.BPE({word: number for number, word in enumerate(known)}, []))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    languages = ["<|en|>", *(f"<|x{number}|>" for number in range(1, NUM_LANGUAGES))]
    found.add_special_tokens(
        [
            "<|endoftext|>",
            "<|startoftranscript|>",
            *languages,
            *(f"<|{name}|>" for name in AFTER_LANGUAGES),
            "<|notimestamps|>",
            *(f"<|{step * 0.02:.2f}|>" for step in range(1501)),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=found, eos_token="<|endoftext|>"), languages


def write_florence(folder: Path) -> None:
    """Writes a checkpoint of Florence-2 base's shape."""
    from checkpoints import tokenizer
    from transformers import Florence2Config, Florence2ForConditionalGeneration

    words = tokenizer()
    words.add_tokens(["<image>"], special_tokens=True)
    ids = {name: getattr(words, name) for name in ("bos_token_id", "pad_token_id")}
    ids["eos_token_id"] = words.convert_tokens_to_ids("</s>")
    text = {
        "model_type": "bart",
        "vocab_size": 51289,
        "d_model": 768,
        "encoder_layers": 6,
        "decoder_layers": 6,
        "encoder_attention_heads": 12,
        "decoder_attention_heads": 12,
        "encoder_ffn_dim": 3072,
        "decoder_ffn_dim": 3072,
        "max_position_embeddings": 1024,
        "decoder_start_token_id": ids["eos_token_id"],
        **ids,
    }
    image_id = words.convert_tokens_to_ids("<image>")
    # The other defaults of the tower are those of the base model.
    vision = {"projection_dim": text["d_model"]}
    config = Florence2Config(text_config=text, vision_config=vision, image_token_id=image_id, **ids)
    model = Florence2ForConditionalGeneration(config).bfloat16()
    model.generation_config.decoder_start_token_id = ids["eos_token_id"]
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    images = {
        "image_processor_type": "CLIPImageProcessor",
        "do_center_crop": False,
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
        "image_seq_length": 577,
        "resample": 3,
        "size": {"height": 768, "width": 768},
        "crop_size": {"height": 768, "width": 768},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(images))


WRITERS: dict[str, Callable[[Path], None]] = {
    "whisper-base": lambda folder: write_whisper(folder, "base"),
    "whisper-small": lambda folder: write_whisper(folder, "small"),
    "florence-2-base": write_florence,
    "pix2struct-base": write_pix2struct,
    "git-base": write_git,
    "kosmos-2.5-quarter": write_kosmos,
}


def main() -> None:
    """Parses the command line, writes what is missing, and runs."""
    end_when_told()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="a part of the model's name")
    parser.add_argument("--num", type=int, default=16, help="items of a round")
    parser.add_argument("--threads", type=int, help="of each engine, in seconds of the processor")
    parser.add_argument("--whispercpp", metavar="PYTHON", default="")
    args = parser.parse_args()
    for work in WORKS:
        if args.only in work.model:
            folder = args.folder / work.model
            if not (folder / "config.json").exists():
                WRITERS[work.model](folder)
            run(work, folder, args)


if __name__ == "__main__":
    main()
