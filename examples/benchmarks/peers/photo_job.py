"""What the runners of photos.py share: their arguments, and how they answer.

A runner captions the JPEG files of a folder, writes a line of JSON for each to a file as soon as it
has it, and prints one line RESULT {"engine", "ready", "num_tokens", ...}. Then its process ends.
Greedy, end-of-sequence ignored."""

from __future__ import annotations

import argparse
import json
import threading
from pathlib import Path
from typing import Any

import serve

QUESTION: str = serve.workloads.QUESTION


def parse() -> argparse.Namespace:
    """Reads the arguments of a runner. --model: a folder. --photos: a folder of JPEG files.
    --output: a file that does not exist yet. --image-tokens: the most of one picture, "auto" or
    "full" for our engine too. --program: of an engine that is no Python package. --parallel:
    requests at once; None leaves the engine's default. --meter: also say where the time went, our
    engine alone."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--photos", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--image-tokens", default="1024")
    parser.add_argument("--program")
    parser.add_argument("--parallel", type=int)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--meter", action="store_true")
    return parser.parse_args()


class Lines:
    """Writes the records of a peer, from any thread."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("x", encoding="utf-8")
        self._lock = threading.Lock()

    def add(self, photo: Path, text: str) -> None:
        """Appends one record."""
        with self._lock:
            print(json.dumps({"id": photo.name, "text": text}), file=self._file, flush=True)


def answer(**values: Any) -> None:
    """Prints the result."""
    serve.answer(values)
