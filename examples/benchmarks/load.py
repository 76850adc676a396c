"""Measures the time to the first token, and the memory that loading needs.

    load.py MODEL[:QUANTIZATION]... [--runs 3] [--num-threads N] [--cache FOLDER]

Each run is a new Python process, with the files in the page cache. The cases take turns. With
--cache the runs are second starts, which map the weights that the first one has kept in FOLDER;
else none keeps any. Medians; megabytes are 10^6 bytes:

first token   seconds from the start of the process, imports and loading included
CPU           seconds of CPU until then, which other work on the machine changes less
imports       seconds until `LLM` is imported, torch and the config classes of transformers included
LLM()         seconds to load: more imports, config, tokenizer, weights, KV cache
weights       those of LLM() in which weights are read, rounded and packed, or mapped
peak          MB of memory in use at most, until after the first token (VmHWM)
imported      MB in use before loading
anonymous     MB in use after the first token that are no part of a file, such as weights
mapped        MB in use after the first token that are mapped from files: libraries, and with
              --cache the weights
files         MB of weights on disk
rest          peak less files; the KV cache of so short a request takes about 1 MB of it
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from models_here import check_model

from mmdeploy_llm.values.options.model_names import bundled_models
from mmdeploy_llm.weights.find import find_weights

PROGRAM = """
import json, sys, time
import mmdeploy_llm.engine.startup.loaded as loaded
from mmdeploy_llm import LLM, SamplingParams

def memory(name):
    with open("/proc/self/status", encoding="ascii") as file:
        found = dict(line.split(":", 1) for line in file)
    return int(found[name].split()[0]) * 1024

def timed(function):
    def call(*args, **kwargs):
        begin = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - begin)
    return call

seconds = []
loaded._restored = timed(loaded._restored)
loaded._read = timed(loaded._read)
imported_at, imported = time.time(), memory("VmRSS")
llm = LLM(sys.argv[1], **json.loads(sys.argv[2]))
loaded_at = time.time()
params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
assert llm.generate([[21, 22, 23, 24]], params, use_tqdm=False)[0].is_ok
print(json.dumps({
    "first token": time.time(), "CPU": time.process_time(),
    "imports": imported_at, "LLM()": loaded_at - imported_at,
    "weights": sum(seconds), "peak": memory("VmHWM"), "imported": imported,
    "anonymous": memory("RssAnon"), "mapped": memory("RssFile"),
}))
"""


def measure(case: str, options: dict[str, object]) -> dict[str, float]:
    """Runs a case once. case: MODEL or MODEL:QUANTIZATION."""
    folder, _, quantization = case.partition(":")
    own = {**options, "quantization": quantization or None, "quiet": True}
    begin = time.time()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, folder, json.dumps(own)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        # An installed package has bytecode, without which a start compiles 0.3 seconds of it.
        env={key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"},
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    found["first token"] -= begin
    found["imports"] -= begin
    weights = find_weights(bundled_models().get(folder, Path(folder)))
    found["files"] = sum(path.stat().st_size for path in weights)
    found["rest"] = found["peak"] - found["files"]
    return found


def main() -> None:
    """Prints a table of medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="+", metavar="MODEL[:QUANTIZATION]")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--cache", metavar="FOLDER")
    args = parser.parse_args()
    for case in args.cases:
        check_model(parser, case.partition(":")[0])
    options: dict[str, object] = {"weight_cache": args.cache or False}
    if args.num_threads is not None:
        options["num_threads"] = args.num_threads
    for case in args.cases:  # brings the files into the page cache
        measure(case, options)
    runs = [{case: measure(case, options) for case in args.cases} for _ in range(args.runs)]
    times = ("first token", "CPU", "imports", "LLM()", "weights")
    sizes = ("peak", "imported", "anonymous", "mapped", "files", "rest")
    print("| case | " + " | ".join((*times, *sizes)) + " |")
    print("|---" * (1 + len(times) + len(sizes)) + "|")
    for case in args.cases:
        middle = {
            name: statistics.median(run[case][name] for run in runs) for name in (*times, *sizes)
        }
        cells = [f"{middle[name]:.2f}" for name in times]
        cells += [f"{middle[name] / 1e6:.0f}" for name in sizes]
        print(f"| {case} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
