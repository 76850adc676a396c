"""Every format through a batch with the bundled model: its captions are those of plain files."""

import csv
import io
import json
import tarfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mmdeploy_llm import LLM, SamplingParams, cli
from mmdeploy_llm.data.outputs.scan import read_records

PARAMS = SamplingParams(temperature=0, max_tokens=12)
IMAGES = Path(__file__).parents[3] / "examples" / "images"
QUESTION = "Describe the image."
NO_THINKING = {"enable_thinking": False}

pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow: the extra 'parquet'")


@pytest.fixture(scope="module")
def llm():
    with LLM(model="shapes-vl", num_threads=1, kv_cache_memory=2**24, quiet=True) as llm:
        yield llm


@pytest.fixture(scope="module")
def pictures():
    """Name -> path of three pictures that can be read, and one that is truncated."""
    names = sorted(path for path in IMAGES.iterdir() if path.suffix in (".png", ".jpg"))
    bad = next(path for path in names if "truncated" in path.name)
    return {path.stem: path for path in [*[own for own in names if own != bad][:3], bad]}


@pytest.fixture(scope="module")
def captions(llm, pictures):
    """Name -> the caption that `chat` gives to the file, None for the truncated one."""
    messages = [
        [
            {
                "role": "user",
                "content": [
                    {"type": "image", "image": str(path)},
                    {"type": "text", "text": QUESTION},
                ],
            }
        ]
        for path in pictures.values()
    ]
    outputs = llm.chat(messages, PARAMS, use_tqdm=False, chat_template_kwargs=NO_THINKING)
    texts = [output.outputs.text.strip() if output.is_ok else None for output in outputs]
    assert [text is None for text in texts] == [False, False, False, True]
    return dict(zip(pictures, texts, strict=True))


def rows_of(pictures):
    return [
        {"image": {"bytes": path.read_bytes(), "path": path.name}, "name": name}
        for name, path in pictures.items()
    ]


def write_tars(folder, pictures):
    for number, (name, path) in enumerate(pictures.items()):
        with tarfile.open(folder / f"{number % 2:03}.tar", "a") as tar:
            for suffix, data in (
                (path.suffix[1:], path.read_bytes()),
                ("json", json.dumps({"name": name}).encode()),
            ):
                info = tarfile.TarInfo(f"{name}.{suffix}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return folder / "{000..001}.tar"


def write_parquet(folder, pictures):
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows_of(pictures)), folder / "a.parquet")
    return folder / "a.parquet"


def write_arrow(folder, pictures):
    table = pyarrow.Table.from_pylist(rows_of(pictures))
    with pyarrow.ipc.new_file(str(folder / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    return folder / "a.arrow"


def write_csv(folder, pictures):
    with (folder / "a.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "name"])
        writer.writerows([str(path), name] for name, path in pictures.items())
    return folder / "a.csv"


def write_jsonl(folder, pictures):
    lines = [{"image": str(path), "name": name} for name, path in pictures.items()]
    (folder / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "a.jsonl"


def write_lance(folder, pictures):
    lance = pytest.importorskip("lance", reason="needs pylance: the extra 'lance'")
    lance.write_dataset(pyarrow.Table.from_pylist(rows_of(pictures)), str(folder / "a.lance"))
    return folder / "a.lance"


def write_saved(folder, pictures):
    datasets = pytest.importorskip("datasets", reason="needs datasets: the extra 'datasets'")
    datasets.disable_progress_bars()
    rows = rows_of(pictures)
    columns = {name: [row[name] for row in rows] for name in ("image", "name")}
    features = datasets.Features({"image": datasets.Image(), "name": datasets.Value("string")})
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(str(folder / "saved"))
    return folder / "saved"


def write_url(folder, pictures):
    fsspec = pytest.importorskip("fsspec", reason="needs fsspec: the extra 'fsspec'")
    data = write_parquet(folder, pictures).read_bytes()
    fsspec.filesystem("memory").pipe("/corpus/a.parquet", data)
    return "memory://corpus/a.parquet"


WRITERS = {
    "tar": write_tars,
    "parquet": write_parquet,
    "arrow": write_arrow,
    "csv": write_csv,
    "jsonl": write_jsonl,
    "lance": write_lance,
    "saved": write_saved,
    "url": write_url,
}


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    "write",
    [
        pytest.param(write, marks=[pytest.mark.full] * (name == "lance"), id=name)
        for name, write in WRITERS.items()
    ],
)
def test_captions_are_those_of_the_files(llm, captions, pictures, tmp_path, write):
    given = write(tmp_path, pictures)
    out = tmp_path / "out.jsonl"
    options = {"image_column": "image"} if str(given).endswith(".jsonl") else {}
    summary = llm.run_batch(
        given,
        out,
        columns=["name"],
        sampling_params=PARAMS,
        chat_template_kwargs=NO_THINKING,
        use_tqdm=False,
        **options,
    )
    records = {record.columns["name"]: record for record in read_records(out)}
    assert {name: own.text if own.is_ok else None for name, own in records.items()} == captions
    assert summary.failures == {"400 MediaError": 1}
    if write is write_tars:
        assert sorted(own.id for own in records.values()) == sorted(
            f"{number % 2:03}.tar/{name}" for number, name in enumerate(pictures)
        )


@pytest.mark.full
def test_a_tar_is_resumed_and_what_has_changed_is_done_again(pictures, captions, tmp_path):
    write_tars(tmp_path, pictures)
    words = ["batch", str(tmp_path / "*.tar"), "--prompt", "Describe the image.", "--no-thinking"]
    words += ["--max-tokens", "12", "--temperature", "0", "--columns", "name"]
    words += ["--output", str(tmp_path / "out.jsonl")]
    first = CliRunner().invoke(cli.app, [*words, "--limit", "2"])
    assert first.exit_code == 0, first.output
    assert "members with the suffix of an image" in first.stderr
    second = CliRunner().invoke(cli.app, [*words, "--resume"])
    assert second.exit_code == 1, second.output
    records = {own.columns["name"]: own for own in read_records(tmp_path / "out.jsonl")}
    assert {name: own.text if own.is_ok else None for name, own in records.items()} == captions
    # A good picture takes the place of the truncated one: one item has changed.
    good, bad = next(iter(pictures)), list(pictures)[-1]
    changed = {**pictures, bad: pictures[good]}
    for path in tmp_path.glob("*.tar"):
        path.unlink()
    write_tars(tmp_path, changed)
    third = CliRunner().invoke(cli.app, [*words, "--resume"])
    assert third.exit_code == 0, third.output
    records = {own.columns["name"]: own for own in read_records(tmp_path / "out.jsonl")}
    assert records[bad].text == captions[good]
    other = CliRunner().invoke(cli.app, [*words[:-4], *words[-2:], "--resume"])
    assert other.exit_code == 2
    assert "columns.carried is not set, was ['name']" in other.stderr


def test_an_argument_that_is_not_known_is_an_error(llm, tmp_path):
    from mmdeploy_llm import ConfigError

    with pytest.raises(ConfigError, match="did you mean 'image_column'"):
        llm.run_batch([], tmp_path / "out.jsonl", image_colum="a")
    with pytest.raises(ConfigError, match="must be a list of names"):
        llm.run_batch([], tmp_path / "out.jsonl", columns="a")
