"""Measures what more cores give, and writes one file to send back: cores.py [MODEL] [-o cores.json]

Every figure of this project is from two cores. On a machine with more this takes some five minutes:
with 1, 2, 4, .. threads up to all cores, and with several engines that share them,

products     billions of operations per second, 512 rows, bf16 and int8
reading      GB/s of memory
barrier      microseconds of a product so small that starting the threads and waiting for them is
             most of it
alone        milliseconds a token of one request, and beside it what the parts foretell:
             bytes of weights / reading + products of a token * barrier
texts        generated tokens per second of 4 requests for each thread, 64 tokens in and 32 out

MODEL: a folder, or the name of a bundled model; by default a checkpoint of Qwen2-0.5B's shapes with
random weights, which is written first (1 GB, in --folder). Nothing is sent anywhere: the file has
the model of the processor, caches, NUMA nodes and these figures.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from models_here import check_model

ROOT = Path("/sys/devices/system")
NUM_TOKENS_IN, NUM_TOKENS_OUT, PER_THREAD = 64, 32, 4
PRODUCTS_A_LAYER = 5  # qkv, o, gate and up, down, and attention: after each the threads wait
COLUMNS = (
    "threads",
    "engines",
    "products_bfloat16",
    "products_int8",
    "reading",
    "barrier",
    "alone",
    "alone_foretold",
    "texts",
    "failed",
)


def machine() -> dict[str, Any]:
    """Returns what the system says of processor, caches and NUMA nodes."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    pairs = (line.partition(":") for line in lines)
    fields = {name.strip(): value.strip() for name, _, value in pairs}
    caches = sorted(ROOT.glob("cpu/cpu0/cache/index*/size"))
    return {
        "processor": fields.get("model name", platform.processor()),
        "flags": re.findall(r"\b(?:avx|amx|asimd|i8mm|bf16)\w*", fields.get("flags", "")),
        "caches": [path.read_text().strip() for path in caches],
        "numa_nodes": len(list(ROOT.glob("node/node[0-9]*"))),
        "logical_cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "date": time.strftime("%Y-%m-%d"),
    }


def cases(num_cores: int, most: int) -> Iterator[tuple[int, int]]:
    """Yields (threads in all, engines): doubled up to all cores, then all of them shared by more
    engines, then more threads than there are cores, which shows what waits badly."""
    num_threads = 1
    while num_threads < min(num_cores, most):
        yield num_threads, 1
        num_threads *= 2
    yield min(num_cores, most), 1
    num_engines = 2
    while num_engines <= min(num_cores, most):
        yield min(num_cores, most), num_engines
        num_engines *= 2
    if most >= num_cores:
        yield 2 * num_cores, 1


def measure(model: str, num_threads: int, num_engines: int) -> dict[str, Any]:
    """Measures one case; called in a process of its own."""
    import torch

    from mmdeploy_llm import LLM, SamplingParams
    from mmdeploy_llm.cli.bench.machine import measure_machine
    from mmdeploy_llm.kernels import cpu as native

    found: dict[str, Any] = {"threads": num_threads, "engines": num_engines}
    if num_engines == 1:
        torch.set_num_threads(num_threads)
        kernels, cpu = native.load(), torch.device("cpu")
        rates = {own: measure_machine(cpu, own, kernels) for own in ("bfloat16", "int8")}
        found |= {f"products_{name}": round(own.flops / 1e9) for name, own in rates.items()}
        found["reading"] = round(rates["int8"].bandwidth / 1e9, 1)
        found["barrier"] = round(1e6 * barrier(kernels), 1)
    prompts = [[7 + index] * NUM_TOKENS_IN for index in range(PER_THREAD * num_threads)]
    params = SamplingParams(max_tokens=NUM_TOKENS_OUT, temperature=0, ignore_eos=True)
    options: dict[str, Any] = {"data_parallel_size": num_engines, "num_threads": num_threads}
    with LLM(model, quiet=True, quantization="int8", max_model_len=512, **options) as llm:
        llm.generate(prompts[: 2 * num_engines], params, use_tqdm=False)
        begin = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        found["texts"] = round(len(prompts) * NUM_TOKENS_OUT / seconds, 1)
        if num_engines == 1 and llm.model is not None:
            times = llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].metrics
            seconds = (times.model_forward_time or 0) - (times.first_token_time or 0)
            found["alone"] = round(1000 * seconds / (NUM_TOKENS_OUT - 1), 2)
            read = sum(own.numel() for own in weights(model)) / rates["int8"].bandwidth
            waits = PRODUCTS_A_LAYER * llm.model.num_layers * found["barrier"] / 1e6
            found["alone_foretold"] = round(1000 * (read + waits), 2)
    return found


def weights(model: str) -> Iterator[Any]:
    """Yields the matrices of a checkpoint that a token reads, on no device: int8 stores a byte for
    each value."""
    from safetensors import safe_open

    from mmdeploy_llm.values.options.model_names import bundled_models
    from mmdeploy_llm.weights.find import find_weights

    for path in find_weights(bundled_models().get(model, Path(model))):
        with safe_open(path, "pt") as file:
            yield from (file.get_tensor(name) for name in file.keys())  # noqa: SIM118


def barrier(kernels: Any) -> float:
    """Returns the seconds of a product of one row with weights that stay in a cache, the least of
    many."""
    import torch

    num_rows, size = 1, 512
    packed = kernels.pack_float(torch.zeros(size, size, dtype=torch.bfloat16))
    x = torch.zeros(num_rows, size, dtype=torch.bfloat16)
    best = float("inf")
    for _ in range(2000):
        begin = time.perf_counter()
        kernels.linear_float(x, packed, size, None)
        best = min(best, time.perf_counter() - begin)
    return best


def write_model(folder: Path) -> str:
    """Writes the checkpoint of random weights, once."""
    if not (folder / "qwen05" / "model.safetensors").exists():
        script = Path(__file__).with_name("checkpoints.py")
        subprocess.run([sys.executable, script, folder, "qwen05"], check=True)
    return str(folder / "qwen05")


def shown(row: dict[str, Any]) -> str:
    """Returns a row of the table."""
    cells = [row.get(name, "") for name in COLUMNS]
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    """Measures each case in a process of its own, prints the table and writes the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("-o", "--output", type=Path, default=Path("cores.json"))
    default = Path(tempfile.gettempdir()) / "mmdeploy_llm_cores"
    parser.add_argument("--folder", type=Path, default=default, help="of the random checkpoint")
    parser.add_argument("--most", type=int, default=1024, help="threads, at most")
    parser.add_argument("--case", nargs=2, type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    model = given.model or write_model(given.folder)
    if given.case:
        print(json.dumps(measure(model, *given.case)))
        return
    from mmdeploy_llm.kernels import cpu as native

    check_model(parser, model)
    num_cores = native.num_suitable_threads(native.usable_cpus())
    result: dict[str, Any] = {
        "machine": machine(),
        "cores": num_cores,
        "model": Path(model).name,
        "rows": [],
    }
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS), flush=True)
    for case in cases(num_cores, given.most):
        words = [sys.executable, __file__, model, "--case", *map(str, case)]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
        last = done.stdout.splitlines()[-1:]
        failed = {"threads": case[0], "engines": case[1], "failed": done.returncode}
        row = failed if done.returncode or not last else json.loads(last[0])
        result["rows"].append(row)
        print(shown(row), flush=True)
        given.output.write_text(json.dumps(result, indent=1))
    print(f"\n{given.output}: send it with an issue, if the figures surprise you")


if __name__ == "__main__":
    main()
