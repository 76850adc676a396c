"""Vectors of all-MiniLM-L6-v2 for real texts, beside those of sentence-transformers.

python -m tests.real.vectors
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from tests.real.packages import folder_of

TEXTS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Vectors:
    """Matrices [texts, size] in float32 of this engine and of sentence-transformers."""

    ours: np.ndarray
    theirs: np.ndarray

    @property
    def largest_difference(self) -> float:
        return float(np.abs(self.ours - self.theirs).max())

    @property
    def smallest_cosine(self) -> float:
        return float((self.ours * self.theirs).sum(-1).min())


def paragraphs(name: str) -> list[str]:
    """Returns the paragraphs of a book, each in one line."""
    text = (folder_of("text") / name).read_text("latin-1")
    return [re.sub(r"\s+", " ", part).strip() for part in re.split(r"\n\s*\n", text)]


def texts() -> list[str]:
    """Returns paragraphs and lines of two books, of at most 400 characters: no more than the model
    reads. Longer ones are another matter."""
    found = []
    for name in ("lcet10.txt", "alice29.txt"):
        fitting = [part for part in paragraphs(name) if 10 < len(part) <= 400]
        found += fitting[:: len(fitting) // (TEXTS // 2)][: TEXTS // 2]
    return found


def vectors(**options: object) -> Vectors:
    """Returns the vectors of all texts; options: those of LLM, float32 by default."""
    from sentence_transformers import SentenceTransformer

    from mmdeploy_llm import LLM

    folder, wanted = str(folder_of("minilm")), texts()
    with LLM(model=folder, **({"dtype": "float32"} | options)) as llm:
        ours = [o.embedding for o in llm.embed(wanted, use_tqdm=False, on_error="raise")]
    model = SentenceTransformer(folder, device="cpu")
    return Vectors(ours=np.stack(ours), theirs=model.encode(wanted, show_progress_bar=False))


if __name__ == "__main__":
    for dtype in ("float32", "bfloat16"):
        found = vectors(dtype=dtype)
        print(f"{dtype}: {found.largest_difference:.2e}, cosine from {found.smallest_cosine:.6f}")
