"""Captions a Parquet file with images in a column, as Hugging Face datasets have them: writes a
small one, asks about each picture, prints the records. Needs pyarrow (`mmdeploy-llm[parquet]`).

python examples/caption_dataset.py

The same from a shell, and for a dataset of the hub (`mmdeploy-llm[datasets]`):

    mmdeploy-llm batch photos.parquet --output captions.jsonl --id-column name
    mmdeploy-llm batch 'hf://datasets/OWNER/NAME?split=train' --output captions.jsonl
"""

import json
import tempfile
from pathlib import Path

import pyarrow
from pyarrow import parquet

from mmdeploy_llm import LLM, SamplingParams

IMAGES = Path(__file__).parent / "images"


def write_dataset(path: Path) -> None:
    """Writes a table whose images are {"bytes", "path"}: files as they are, not decoded."""
    rows = [
        {"image": {"bytes": file.read_bytes(), "path": file.name}, "name": file.stem}
        for file in sorted(IMAGES.glob("*.png"))[:4]
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def main() -> None:
    """Prints one line for each row. The column with the images is found by its values."""
    with tempfile.TemporaryDirectory() as name, LLM("shapes-vl", reasoning_parser="auto") as llm:
        folder = Path(name)
        write_dataset(folder / "photos.parquet")
        llm.run_batch(
            folder / "photos.parquet",
            folder / "captions.jsonl",
            prompt="Describe the image.",
            id_column="name",
            sampling_params=SamplingParams(temperature=0, max_tokens=100),
            use_tqdm=False,
        )
        for line in (folder / "captions.jsonl").read_text().splitlines():
            record = json.loads(line)
            print(record["id"], record["text"])


if __name__ == "__main__":
    main()
