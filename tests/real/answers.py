"""Greedy answers of SmolLM2-135M-Instruct to twenty questions, and how many a format keeps.

    python -m tests.real.answers [ROW]...     # rows of closeness.py, or options as NAME=VALUE,...

The reference is transformers' generate in float32 with the file's weights, dequantised.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from tests.real.closeness import ROWS, Row, dequantised, row_of, transformers_model
from tests.real.packages import file_of, made

MODEL = "smollm2"
TOKENS = 40  # of an answer at most
QUESTIONS = (
    "What is the capital of France?",
    "How many legs does a spider have?",
    "Name three colors of the rainbow.",
    "Who wrote Romeo and Juliet?",
    "What is the boiling point of water in degrees Celsius?",
    "Translate 'good morning' into Spanish.",
    "What is 7 plus 5?",
    "Which planet is known as the Red Planet?",
    "Write one sentence about the sea.",
    "What do bees make?",
    "Explain what a library is in one sentence.",
    "Which animal is the largest on Earth?",
    "Give a synonym of 'happy'.",
    "What is the opposite of 'cold'?",
    "List the four seasons of the year.",
    "What is the chemical symbol of gold?",
    "Why is the sky blue?",
    "Who painted the Mona Lisa?",
    "How do you say 'thank you' in French?",
    "What is the first letter of the alphabet?",
)


def expected() -> list[dict[str, Any]]:
    """Returns for each question what transformers reads and answers: {"prompt": ids, "answer":
    ids}; it is computed once."""
    return json.loads(made(f"{MODEL}-answers.json", _write).read_text())


def _write(path: Path) -> None:
    path.write_text(json.dumps(by_transformers(torch.float32)))


def by_transformers(dtype: torch.dtype) -> list[dict[str, Any]]:
    """Returns what transformers reads and answers in a dtype, as `expected` does."""
    from transformers import AutoTokenizer

    folder = dequantised(MODEL)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), transformers_model(folder, dtype)
    found = []
    for question in QUESTIONS:
        message = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True)["input_ids"]
        ids = torch.tensor([prompt])
        answer = model.generate(ids, do_sample=False, max_new_tokens=TOKENS)[0, len(prompt) :]
        found.append({"prompt": prompt, "answer": answer.tolist()})
    return found


def answers(row: Row) -> list[dict[str, Any]]:
    """Returns what this engine reads and answers, as `expected` does."""
    from mmdeploy_llm import LLM, SamplingParams

    path = file_of(MODEL) if row.gguf else dequantised(MODEL)
    options = row.options if row.gguf else {"dtype": "bfloat16"} | row.options
    asked = [[{"role": "user", "content": question}] for question in QUESTIONS]
    params = SamplingParams(temperature=0, max_tokens=TOKENS)
    with LLM(model=str(path), max_model_len=512, kv_cache_memory=2**29, **options) as llm:
        outputs = llm.chat(asked, params, use_tqdm=False, on_error="raise")
    return [{"prompt": o.prompt_token_ids, "answer": list(o.outputs.token_ids)} for o in outputs]


def kept(found: list[dict[str, Any]]) -> int:
    """Returns how many answers equal transformers', token for token."""
    return sum(own == other for own, other in zip(found, expected(), strict=True))


def main() -> None:
    """Prints for each row how many answers are kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", metavar="ROW")
    for name in parser.parse_args().rows or ROWS:
        print(f"{name:24} {kept(answers(row_of(name)))} of {len(QUESTIONS)}", flush=True)


if __name__ == "__main__":
    main()
