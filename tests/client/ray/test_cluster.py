"""Engines on a cluster give the answers of one engine, whatever is killed."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mmdeploy_llm import SamplingParams
from mmdeploy_llm.batch.job import plan_batch, run_batch
from mmdeploy_llm.batch.settings import BatchSettings
from mmdeploy_llm.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings(  # Ray's own
    r"ignore:`use_\w+` is deprecated:DeprecationWarning",
    "ignore:.*unclosed.*:ResourceWarning",
    "ignore:subprocess .* is still running:ResourceWarning",
)
MAX_SECONDS = 1200


@pytest.fixture(scope="module")
def helpers(load_file):
    return load_file("client/ray/conftest.py")


@pytest.fixture
def captioned(connected, model, helpers):
    """captioned(rows, engines) -> the rows that a dataset of them gives."""
    import ray

    from mmdeploy_llm.client.ray import caption_dataset

    def answered(rows, engines=2):
        dataset = caption_dataset(
            ray.data.from_items(rows),
            model=model,
            prompt=helpers.PROMPT,
            image_column="image",
            concurrency=engines,
            rows_per_block=4,
            sampling_params=SamplingParams(**helpers.PARAMS),
            **helpers.OPTIONS,
        )
        return dataset.take_all()

    return answered


def by_key(found, name="text"):
    """The column of each row, by key; fails where a row is doubled."""
    assert len({row["key"] for row in found}) == len(found)
    return {row["key"]: row[name] for row in found}


@pytest.mark.full
def test_a_dataset_gets_the_answers_of_one_engine(captioned, rows, texts_of, helpers):
    given = rows(10)
    for number, row in enumerate(given):
        row["image"] = {"bytes": None, "path": row["image"]}
        if number == 2:
            row["image"] = {"bytes": helpers.picture(2), "path": None}
    given[7]["image"] = None
    given[8]["image"] = {"bytes": b"no picture", "path": None}
    found = captioned(given, engines=1)  # the long tests have two
    codes = by_key(found, "error_code")
    assert codes == {f"k{n}": {7: 400, 8: 415}.get(n) for n in range(10)}
    good = [row for row in given if codes[row["key"]] is None]
    texts = by_key(found)
    assert {row["key"]: texts[row["key"]] for row in good} == texts_of(good)
    assert "nothing in column 'image'" in by_key(found, "error_message")["k7"]
    assert by_key(found, "error_class")["k8"] == "UnsupportedMediaError"
    assert by_key(found, "title") == {row["key"]: row["title"] for row in given}


@pytest.mark.long
def test_killed_processes_lose_and_double_nothing(captioned, connected, rows, texts_of):
    """An engine is killed, and another with its raylet."""
    connected.add()
    given = rows(24, "kill-once.png", "kill-raylet-once.png")
    found = captioned(given)
    assert (
        connected.num_deaths("kill-once.png") == connected.num_deaths("kill-raylet-once.png") == 1
    )
    assert by_key(found) == texts_of(given)


@pytest.mark.long
def test_a_row_that_always_kills_is_isolated(captioned, connected, rows, texts_of):
    given = rows(16, "kill-always.png")
    found = captioned(given)
    assert connected.num_deaths("kill-always.png") == 3
    (bad,) = (row for row in found if row["error_code"] is not None)
    assert (bad["key"], bad["error_class"]) == ("k5", "WorkerDiedError")
    good = [row for row in given if row["key"] != "k5"]
    assert by_key([row for row in found if row is not bad]) == texts_of(good)


DRIVER = """
import json, sys, ray
from ray.data.checkpoint import CheckpointConfig
from mmdeploy_llm import SamplingParams
from mmdeploy_llm.client.ray import caption_dataset

address, given, done, answers, model, prompt, params, options = sys.argv[1:]
ray.init(address=address, logging_level="error", log_to_driver=False)
context = ray.data.DataContext.get_current()
context.checkpoint_config = CheckpointConfig(
    id_column="key", checkpoint_path=done, delete_checkpoint_on_success=False)
dataset = caption_dataset(
    ray.data.read_parquet(given), model=model, prompt=prompt, image_column="image", concurrency=1,
    rows_per_block=2, sampling_params=SamplingParams(**json.loads(params)), **json.loads(options))
dataset.write_parquet(answers)
"""


@pytest.mark.long
def test_a_killed_driver_of_a_dataset_is_continued(
    machines, model, rows, texts_of, helpers, environment, tmp_path
):
    from pyarrow import Table, parquet

    given = rows(12, "hold-driver.png")
    source, done, answers = (tmp_path / name for name in ("in.parquet", "done", "answers"))
    parquet.write_table(Table.from_pylist(given), source)
    paths = [str(path) for path in (source, done, answers)]
    texts = [helpers.PROMPT, json.dumps(helpers.PARAMS), json.dumps(helpers.OPTIONS)]
    command = [sys.executable, "-c", DRIVER, machines.address, *paths, model, *texts]
    killed_once_there_is(command, lambda: committed(done), environment)
    num_kept = len(committed(done))
    assert 0 < num_kept < 12
    machines.go_on()
    again = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=MAX_SECONDS, check=False
    )
    assert again.returncode == 0, again.stderr[-3000:]
    found = parquet.read_table(answers).to_pylist()
    assert by_key(found) == texts_of(given)
    assert len(committed(done)) == 12


def committed(folder):
    """The keys in a checkpoint."""
    from pyarrow import parquet

    files = [path for path in folder.glob("*.parquet") if ".pending" not in path.name]
    return [key for path in files for key in parquet.read_table(path)["key"].to_pylist()]


def killed_once_there_is(command, result, environment):
    """Runs a program that cannot end, and kills it when there is a result."""
    program = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        end = time.monotonic() + MAX_SECONDS
        while not result():
            assert program.poll() is None, program.stdout.read()[-3000:].decode()
            assert time.monotonic() < end
            time.sleep(0.05)
    finally:
        program.kill()
        program.wait()
        program.stdout.close()


def lines_of(rows, helpers):
    """The rows as lines of a batch."""
    for row in rows:
        content = [
            {"type": "image", "image": row["image"]},
            {"type": "text", "text": helpers.PROMPT.format(**row)},
        ]
        yield {"id": row["key"], "messages": [{"role": "user", "content": content}]}


def records_of(path):
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [{**record, "key": record["id"]} for record in found]


@pytest.mark.long
def test_a_batch_on_a_cluster_is_a_batch(
    machines, model, rows, texts_of, helpers, environment, tmp_path
):
    """Killed and continued, with a row that kills its processes, by the command; paths are relative
    to the file's folder."""
    given = rows(24, "kill-batch.png")
    (tmp_path / "21.png").rename(tmp_path / "hold-batch.png")
    given[21]["image"] = "hold-batch.png"
    source, output, page = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "page.html"))
    lines = [json.dumps(line) for line in lines_of(given, helpers)]
    source.write_text("\n".join([*lines, "no json"]) + "\n")
    options = [f"--engine={name}={value}" for name, value in helpers.OPTIONS.items()]
    program = "from mmdeploy_llm.cli import main; main()"
    command = [sys.executable, "-c", program, "batch", str(source), "-o", str(output)]
    command += ["--model", model, "--ray", machines.address, "--report", str(page), "--resume"]
    command += ["--max-tokens", "4", "--temperature", "0", *options]
    killed_once_there_is(
        command, lambda: output.exists() and output.read_bytes().count(b"\n") > 1, environment
    )
    kept = [record for record in records_of(output) if record["error"] is None]
    machines.go_on()
    again = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=MAX_SECONDS, check=False
    )
    assert again.returncode == 1, again.stdout + again.stderr
    found = records_of(output)
    assert [record for record in found if record in kept] == kept
    good = [record for record in found if record["error"] is None]
    assert by_key(good) == texts_of([row for row in given if row["key"] != "k5"])
    failed = {record["line"]: record["error"]["class"] for record in found if record["error"]}
    assert failed == {6: "WorkerDiedError", 25: "RequestError"}
    assert "2 failed" in again.stdout
    assert page.exists()


@pytest.mark.long
def test_a_model_that_cannot_be_loaded_ends_the_run(connected, model, rows, helpers, tmp_path):
    from mmdeploy_llm.client.ray import ClusterLLM

    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    (weights,) = broken.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1000])
    source = list(lines_of(rows(1), helpers))
    job = plan_batch(source, tmp_path / "out.jsonl", BatchSettings(use_tqdm=False))
    with pytest.raises(CheckpointError):
        run_batch(job, lambda: ClusterLLM(str(broken), **helpers.OPTIONS))


@pytest.mark.long
def test_the_example_captions_its_images(helpers, tmp_path):
    program = Path(__file__).parents[3] / "examples" / "ray_captioning.py"
    done = subprocess.run(
        [sys.executable, str(program), str(program.parent / "images"), str(tmp_path)],
        env={**os.environ, **helpers.ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=MAX_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    names = ("picture-", "truncated-")
    printed = [line for line in done.stdout.splitlines() if line.startswith(names)]
    lines = dict(line.split(": ", 1) for line in printed)
    assert len(lines) == 11
    assert lines["picture-6.jpg"] == "A small pink diamond."
    assert "truncated" in lines["truncated-on-purpose.jpg"]


@pytest.mark.full
def test_importing_the_package_imports_no_ray():
    modules = "mmdeploy_llm, mmdeploy_llm.client.llm, mmdeploy_llm.cli.program"
    code = f"import sys, {modules}; assert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))
