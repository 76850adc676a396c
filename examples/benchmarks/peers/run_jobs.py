"""One engine with a model of real weights, for real_jobs.py: from files to answers.

A piece of work: {"work": "texts" | "alone" | "first" | "sounds" | "vectors" | "pages" | "photos",
"path": its file or folder}; answered with seconds, and how many tokens, seconds of sound, texts or
photos that is ("amount"). Loading is not in it.

Importing this file loads no engine: each has its imports in its own function.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import serve
from llama_server import GREEDY, Server

Job = Callable[[Any], float]  # what the work's path holds -> the amount that was done
ANSWER_TOKENS = {"texts": 64, "alone": 128, "first": 1}
AT_ONCE = 32
NUM_CPUS = len(os.sched_getaffinity(0))
HERTZ = 16_000


def text_here(model: str, precision: str) -> Job:
    """This engine, with the codes of the file. precision: "file" leaves activations as they are,
    "int8" rounds them to 8 bits."""
    from mmdeploy_llm import LLM, SamplingParams

    llm = LLM(
        model,
        quantization=None if precision == "file" else precision,
        max_model_len=2048,
        max_num_seqs=AT_ONCE,
        enable_prefix_caching=False,
    )

    def job(asked: Any) -> float:
        texts, num_tokens = asked
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        found = llm.generate(texts, params, use_tqdm=False, on_error="raise")
        return sum(len(one.outputs.token_ids) for one in found)

    return job


def text_llamacpp(model: str, precision: str) -> Job:
    """llama.cpp's server in this process: all texts at once, each in a slot of its own."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_parallel = AT_ONCE
    params.n_ctx = AT_ONCE * 2048
    params.n_batch = 2048
    params.cpuparams.n_threads = NUM_CPUS
    server = xllamacpp.Server(params)
    return _at_once(server.handle_completions)


def text_llama_server(model: str, precision: str, program: str) -> Job:
    """llama.cpp's server as a program that was built for this machine, asked likewise."""
    arguments = ["-m", model, "-np", str(AT_ONCE), "-c", str(AT_ONCE * 2048), "-b", "2048"]
    log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the program
    server = Server(program, [*arguments, "-t", str(NUM_CPUS)], log)
    return _at_once(lambda body: server.ask("/v1/completions", body))


def _at_once(complete: Callable[[dict[str, Any]], Any]) -> Job:
    """complete: what a server of llama.cpp answers to a request."""

    def answered(text: str, num_tokens: int) -> int:
        done = complete({"prompt": text, "max_tokens": num_tokens, **GREEDY})
        return int(done["usage"]["completion_tokens"])

    def job(asked: Any) -> float:
        texts, num_tokens = asked
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return sum(pool.map(answered, texts, [num_tokens] * len(texts)))

    return job


def speech_here(model: str, precision: str) -> Job:
    """This engine: what the command transcribe does after it has loaded the model."""
    from mmdeploy_llm import LLM
    from mmdeploy_llm.batch.speech.plan import open_rule
    from mmdeploy_llm.batch.speech.run import Transcriber, Wish
    from mmdeploy_llm.values.options.config import EngineConfig

    dtype = precision if precision == "float32" else "bfloat16"
    few = precision if precision.startswith("int") else None
    options: dict[str, Any] = {"dtype": dtype, "quantization": few}
    rule, limits = open_rule(EngineConfig.from_options(model, options))
    llm = LLM(model, **options)
    language = None if "tiny-en" in model else "en"

    def job(paths: Any) -> float:
        found = list(Transcriber(llm, rule, Wish(language=language), limits).run(paths))
        assert all(one.error is None for one in found), [one.error for one in found]
        return _seconds(paths)

    return job


def speech_faster_whisper(model: str, precision: str) -> Job:
    """faster-whisper, one file after another. precision: "float32 batched" for its pipeline that
    cuts a file by a voice detector and transcribes 16 pieces at once."""
    from faster_whisper import BatchedInferencePipeline, WhisperModel

    kind, _, is_batched = precision.partition(" ")
    whisper = WhisperModel(model, device="cpu", compute_type=kind, cpu_threads=NUM_CPUS)
    engine: Any = BatchedInferencePipeline(whisper) if is_batched else whisper
    more = {"batch_size": 16, "without_timestamps": False} if is_batched else {}

    def job(paths: Any) -> float:
        for path in paths:
            segments, _ = engine.transcribe(str(path), beam_size=1, language="en", **more)
            assert list(segments)
        return _seconds(paths)

    return job


def speech_whispercpp(model: str, precision: str) -> Job:
    """whisper.cpp, one file after another."""
    from pywhispercpp.model import Model

    options = {"language": "en", "print_progress": False, "print_realtime": False}
    whisper = Model(f"{model}/ggml-{precision}.bin", n_threads=NUM_CPUS, **options)

    def job(paths: Any) -> float:
        for path in paths:
            assert whisper.transcribe(str(path))
        return _seconds(paths)

    return job


def _seconds(paths: Sequence[Path]) -> float:
    """Returns how long the sounds are, which real_jobs.py wrote with 16 bits."""
    return sum(path.stat().st_size for path in paths) / 2 / HERTZ


def vectors_here(model: str, precision: str) -> Job:
    """This engine. int8 has activations in bfloat16 where the processor has products of it, and in
    float32 at AVX2, where that is a sixth faster."""
    import torch

    from mmdeploy_llm import LLM
    from mmdeploy_llm.kernels.plain import has_product

    few = precision if precision.startswith("int") else None
    dtype = "bfloat16" if has_product(torch.bfloat16) else "float32"
    llm = LLM(model, dtype=dtype if few else precision, quantization=few)

    def job(texts: Any) -> float:
        found = llm.embed(texts, use_tqdm=False, on_error="raise", too_long="cut")
        return len(found)

    return job


def vectors_sentence_transformers(model: str, precision: str) -> Job:
    """sentence-transformers with torch."""
    from sentence_transformers import SentenceTransformer

    found = SentenceTransformer(model, device="cpu", model_kwargs={"dtype": precision})

    def job(texts: Any) -> float:
        return len(found.encode(texts, batch_size=32, show_progress_bar=False))

    return job


def vectors_onnxruntime(model: str, precision: str) -> Job:
    """ONNX Runtime with weights in int8: 64 texts at once, sorted by length, which is faster."""
    import numpy as np
    import onnxruntime
    from tokenizers import Tokenizer

    words = Tokenizer.from_file(str(Path(model, "tokenizer.json")))
    limits, pooling, tokens = (
        json.loads(Path(model, name).read_text())
        for name in ("sentence_bert_config.json", "1_Pooling/config.json", "tokenizer_config.json")
    )
    words.enable_truncation(limits.get("max_seq_length", tokens["model_max_length"]))
    words.enable_padding()
    is_mean = pooling.get("pooling_mode", "mean") == "mean"
    session = onnxruntime.InferenceSession(f"{model}-int8.onnx", providers=["CPUExecutionProvider"])

    def job(texts: Any) -> float:
        order = sorted(range(len(texts)), key=lambda at: len(texts[at]))
        vectors = [np.empty(0)] * len(texts)
        for start in range(0, len(order), 64):
            places = order[start : start + 64]
            read = words.encode_batch([texts[at] for at in places])
            ids, mask = (np.array([getattr(e, n) for e in read]) for n in ("ids", "attention_mask"))
            (hidden,) = session.run(None, {"input_ids": ids, "attention_mask": mask})
            pooled = (hidden * mask[..., None]).sum(1) if is_mean else hidden[:, 0]
            for at, vector in zip(places, pooled, strict=True):
                vectors[at] = vector / np.linalg.norm(vector)
        return len(vectors)

    return job


def photos_here(model: str, precision: str) -> Job:
    """This engine."""
    from mmdeploy_llm import LLM

    llm = LLM(model, dtype=precision, limit_mm_per_prompt={"image": 1})

    def job(paths: Any) -> float:
        prompts = [{"multimodal_data": {"image": [str(path)]}} for path in paths]
        return len(llm.embed(prompts, use_tqdm=False, on_error="raise"))

    return job


def photos_transformers(model: str, precision: str) -> Job:
    """Pillow and transformers, 16 photos at once, decoded by as many threads as there are cores."""
    import torch
    from PIL import Image, ImageOps
    from transformers import AutoImageProcessor, AutoModel

    found = AutoModel.from_pretrained(model, dtype=precision).eval()
    processor = AutoImageProcessor.from_pretrained(model)

    def decoded(path: Path) -> Any:
        return ImageOps.exif_transpose(Image.open(path)).convert("RGB")

    @torch.inference_mode()
    def job(paths: Any) -> float:
        with ThreadPoolExecutor(NUM_CPUS) as pool:
            for start in range(0, len(paths), 16):
                pictures = list(pool.map(decoded, paths[start : start + 16]))
                pixels = processor(images=pictures, return_tensors="pt")["pixel_values"]
                found.get_image_features(pixel_values=pixels.to(found.dtype))
        return len(paths)

    return job


ENGINES: dict[tuple[str, str], Callable[..., Job]] = {
    ("text", "mmdeploy_llm"): text_here,
    ("text", "llama.cpp"): text_llamacpp,
    ("text", "llama-server"): text_llama_server,
    ("speech", "mmdeploy_llm"): speech_here,
    ("speech", "faster-whisper"): speech_faster_whisper,
    ("speech", "whisper.cpp"): speech_whispercpp,
    ("vectors", "mmdeploy_llm"): vectors_here,
    ("vectors", "sentence-transformers"): vectors_sentence_transformers,
    ("vectors", "ONNX Runtime"): vectors_onnxruntime,
    ("photos", "mmdeploy_llm"): photos_here,
    ("photos", "transformers"): photos_transformers,
}


def read(work: str, path: Path) -> Any:
    """Returns what a job takes: texts and how many tokens are answered, texts, or paths."""
    if work in ANSWER_TOKENS:
        return json.loads(path.read_text()), ANSWER_TOKENS[work]
    return json.loads(path.read_text()) if path.is_file() else sorted(path.iterdir())


def main() -> None:
    """Answers until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", required=True, choices=sorted({kind for kind, _ in ENGINES}))
    parser.add_argument("--engine", required=True, choices=sorted({one for _, one in ENGINES}))
    parser.add_argument("--model", required=True)
    parser.add_argument("--precision", default="file")
    parser.add_argument("--program", nargs="*", default=[], help="of llama-server")
    args = parser.parse_args()
    begin = time.perf_counter()
    job = ENGINES[args.kind, args.engine](args.model, args.precision, *args.program)
    serve.answer({"engine": args.engine, "load": time.perf_counter() - begin})
    for line in sys.stdin:
        asked = json.loads(line)
        items = read(asked["work"], Path(asked["path"]))
        begin = time.perf_counter()
        amount = job(items)
        serve.answer({"seconds": time.perf_counter() - begin, "amount": amount})


if __name__ == "__main__":
    main()
