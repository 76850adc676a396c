"""Compares engines on a Ray cluster of this machine with one engine in this process.

python examples/benchmarks/ray_cluster.py [--rounds 3] [--items 96] [--model shapes-vl]
python examples/benchmarks/ray_cluster.py --rows 100000    memory of many rows, by a tiny model

The sides take turns; each writes its records to a file, as `mmdeploy-llm batch` does. Loading is
not counted.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import ray
from models_here import check_model

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.batch.job import plan_batch, run_batch
from mmdeploy_llm.batch.settings import BatchSettings
from mmdeploy_llm.client.ray import ClusterLLM, caption_dataset
from mmdeploy_llm.testing.tiny import write_tiny

IMAGES = Path(__file__).parent.parent / "images"
PARAMS = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
SIDES = {  # the LLM of each side; Ray's machine has two CPUs
    "one engine, 2 threads": lambda model: LLM(model, quiet=True, num_threads=2),
    "one actor, 2 threads": lambda model: ClusterLLM(model, num_threads=2),
    "two actors, 1 thread each": lambda model: ClusterLLM(model, num_threads=1),
}


def main() -> None:
    """Prints items per second of each side, and its ratio to the first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--items", type=int, default=96)
    parser.add_argument("--model", default="shapes-vl")
    parser.add_argument("--rows", type=int)
    options = parser.parse_args()
    check_model(parser, options.model)
    num_cpus = 4 if options.rows else 2
    ray.init(num_cpus=num_cpus, object_store_memory=200 * 2**20, include_dashboard=False)
    if options.rows:
        many_rows(options.rows)
        return
    found: dict[str, list[float]] = {name: [] for name in SIDES}
    for _ in range(options.rounds):
        for name, opened in SIDES.items():
            found[name].append(items_per_second(opened, options.model, options.items))
            print(f"{name}: {found[name][-1]:.2f} items/s", flush=True)
    first = found[next(iter(SIDES))]
    for name, speeds in found.items():
        ratios = [one / two for one, two in zip(speeds, first, strict=True)]
        each = ", ".join(f"{ratio:.3f}" for ratio in ratios)
        print(
            f"| {name} | {statistics.median(speeds):.2f} | {statistics.median(ratios):.3f} | {each}"
        )


def items_per_second(opened, model: str, num_items: int) -> float:
    """Runs a batch of images and returns its speed."""
    paths = sorted(IMAGES.glob("picture-*"))
    rows = [
        {"id": number, "messages": [{"role": "user", "content": content(paths, number)}]}
        for number in range(num_items)
    ]
    begin = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        settings = BatchSettings(sampling_params=PARAMS, is_progress_shown=False)
        summary = run_batch(plan_batch(rows, Path(folder) / "out", settings), lambda: opened(model))
    assert (summary.num_records, summary.num_failed) == (num_items, 0), summary.failures
    cpu = (time.process_time() - begin) / num_items
    print(f"{1000 * cpu:.2f} ms of CPU for each item in this process", flush=True)
    return num_items / summary.run.elapsed


def content(paths, number):
    """A picture and a question that differs, so that no prefix is shared beyond the picture."""
    path = str(paths[number % len(paths)])
    return [{"type": "image", "image": path}, {"type": "text", "text": f"{number}: what is this?"}]


def many_rows(count: int) -> None:
    """Answers many rows of text with a dataset and prints the memory of each process on the way."""
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_tiny("qwen2", Path(folder) / "model", num_hidden_layers=1))
        dataset = caption_dataset(
            ray.data.range(count, override_num_blocks=max(1, count // 5000)),
            model=model,
            prompt="Row {id}",
            concurrency=1,
            rows_per_block=256,
            sampling_params=SamplingParams(temperature=0, max_tokens=4),
            num_threads=1,
            max_model_len=128,
        )
        begin, num_rows, tokens = time.perf_counter(), 0, 0
        for batch in dataset.iter_batches(batch_size=count // 10):
            num_rows += len(batch["id"])
            assert set(batch["error_message"]) == {None}
            tokens += int(batch["num_output_tokens"].sum())
            sizes = {
                "rows": num_rows,
                "tokens": tokens,
                "seconds": round(time.perf_counter() - begin),
            }
            print(json.dumps({**sizes, **memory()}), flush=True)
        assert num_rows == count


def memory() -> dict[str, int]:
    """The private memory of this process and of the workers of Ray, in MiB."""
    found: dict[str, int] = {"driver": private(os.getpid())}
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            try:
                title = (path / "cmdline").read_bytes().split(b"\0")[0].decode()
                if title.startswith("ray::") and "IDLE" not in title:
                    name = title.removeprefix("ray::")[:30]
                    found[name] = max(found.get(name, 0), private(int(path.name)))
            except OSError:
                continue
    return found


def private(pid: int) -> int:
    """The resident memory of a process that is not of files or shared, in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) // 1024


if __name__ == "__main__":
    main()
