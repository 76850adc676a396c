"""What the runners share: how compare.py asks them, and how they answer.

    runner                        compare.py
      RESULT {"engine", "load"}  ->
                                 <- {"work": "text" | "images" | "alone" | "first", ...}
      RESULT {"seconds", ...}    ->                                             ... until stdin ends

Each runner has one process for all rounds; engines write what they like to stdout, so that answers
carry a mark.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any, Protocol


def load_workloads() -> Any:
    """workloads.py of the folder above, by its path: on the import path its neighbours could be
    taken for libraries that an engine looks for."""
    path = Path(__file__).resolve().parents[1] / "workloads.py"
    spec = importlib.util.spec_from_file_location("workloads", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["workloads"] = module  # runners import it by this name
    spec.loader.exec_module(module)
    return module


workloads = load_workloads()

MARK = "RESULT "
MAX_NUM_SEQS = 64


class Engine(Protocol):
    """One engine with a model. Greedy, end-of-sequence ignored, no prefix cache."""

    def texts(self, requests: list[workloads.TextRequest]) -> int:
        """Generates; how many tokens were asked for and came."""

    def images(self, images: list[Any], num_output_tokens: int) -> int:
        """The same for a question about each image."""


def parse() -> argparse.Namespace:
    """--model FOLDER, --precision bf16, int8 or int4, --images for a model with images, --level for
    our engine: the instruction sets that its kernels use."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--precision", choices=["bf16", "int8", "int4"], default="bf16")
    parser.add_argument("--images", action="store_true")
    parser.add_argument("--level")
    return parser.parse_args()


def serve(name: str, begun: float, engine: Engine) -> None:
    """Answers until stdin ends. begun: when the imports began, by time.perf_counter."""
    answer({"engine": name, "load": time.perf_counter() - begun})
    for line in sys.stdin:
        answer(run(engine, json.loads(line)))


def run(engine: Engine, asked: dict[str, Any]) -> dict[str, Any]:
    """One piece of work, timed; making the requests is not."""
    if asked["work"] == "images":
        pictures = workloads.images(asked["num"], asked["seed"])
        begin = time.perf_counter()
        count = engine.images(pictures, workloads.ANSWER_TOKENS)
    else:
        if asked["work"] == "alone":
            requests = [workloads.alone(asked["num"], seed=asked["seed"])]
        elif asked["work"] == "first":
            length = workloads.FIRST_TOKENS
            requests = [workloads.alone(1, seed=asked["seed"], num_tokens=length)]
        else:
            requests = workloads.text(asked["num"], seed=asked["seed"])
        begin = time.perf_counter()
        count = engine.texts(requests)
    return {"seconds": time.perf_counter() - begin, "num_tokens": count}


def answer(values: dict[str, Any]) -> None:
    """One line."""
    print(f"\n{MARK}{json.dumps(values)}", flush=True)
