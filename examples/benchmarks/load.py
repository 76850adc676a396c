"""Measures the time from process start to the first token: load.py MODEL_FOLDER [--runs 3].

Each run is a new Python process and includes imports, loading, warm-up and one generated token.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

PROGRAM = """
import sys
from mmdeploy_llm import LLM, SamplingParams
llm = LLM(model=sys.argv[1])
params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
assert llm.generate([[21, 22, 23, 24]], params, use_tqdm=False)[0].is_ok
"""


def main() -> None:
    """Prints each run and the median."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    seconds = []
    for _ in range(args.runs):
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", PROGRAM, args.folder], check=True)
        seconds.append(time.perf_counter() - begin)
        print(f"{seconds[-1]:.2f} s", flush=True)
    print(f"median {statistics.median(seconds):.2f} s to the first token")


if __name__ == "__main__":
    main()
