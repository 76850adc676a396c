"""llama.cpp, for compare.py: each piece of work is a run of its program llama-batched-bench, which
reports the time without loading. --model: a folder with bf16.gguf, Q8_0.gguf and Q4_0.gguf.

The program generates the same number of tokens for every request, so that "text" has the means of
the other engines' lengths."""

import argparse
import json
import os
import subprocess
import sys
import time

BEGUN = time.perf_counter()

import serve  # noqa: E402
import workloads  # noqa: E402

FILES = {"bf16": "bf16.gguf", "int8": "Q8_0.gguf", "int4": "Q4_0.gguf"}
CONTEXT = 8192  # tokens of all requests together


class LlamaCpp:
    """Runs llama-batched-bench."""

    def __init__(self, program: str, file: str) -> None:
        self._command = [program, "-m", file, "-c", str(CONTEXT), "-b", "2048", "-ub", "512"]
        self._command += ["-t", str(len(os.sched_getaffinity(0))), "--output-format", "jsonl"]

    def run(self, asked: dict) -> dict:
        """Returns the seconds and the number of generated tokens of one piece of work."""
        num, prompt, out = 1, workloads.ALONE_TOKENS, asked["num"]
        if asked["work"] == "first":
            prompt, out = workloads.FIRST_TOKENS, 1
        elif asked["work"] == "text":
            requests = workloads.text(asked["num"], seed=asked["seed"])
            num = len(requests)
            prompt = round(sum(len(each.token_ids) for each in requests) / num)
            out = round(sum(each.num_output_tokens for each in requests) / num)
        # The prompt's own logits give the first token; each further one is a step of the program.
        lengths = ["-npp", str(prompt), "-ntg", str(max(out - 1, 1)), "-npl", str(num)]
        done = subprocess.run(
            [*self._command, *lengths], stdout=subprocess.PIPE, text=True, check=True
        )
        (row,) = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
        seconds = row["t_pp"] if out == 1 else row["t"]
        return {"seconds": seconds, "num_tokens": num * out}


def main() -> None:
    """Answers until stdin ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--program", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--precision", choices=sorted(FILES), default="bf16")
    args = parser.parse_args()
    engine = LlamaCpp(args.program, f"{args.model}/{FILES[args.precision]}")
    name = f"llama.cpp {FILES[args.precision].removesuffix('.gguf')}"
    serve.answer({"engine": name, "load": time.perf_counter() - BEGUN})
    for line in sys.stdin:
        serve.answer(engine.run(json.loads(line)))


if __name__ == "__main__":
    main()
