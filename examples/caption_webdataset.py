"""Captions WebDataset shards: writes two small ones, asks about each picture with a text that lies
beside it, and prints the records.

python examples/caption_webdataset.py

The same from a shell:

    mmdeploy-llm batch 'shards/{000000..000001}.tar' --output captions.jsonl \\
        --prompt "Describe the {what}." --columns what
"""

import io
import json
import tarfile
import tempfile
from pathlib import Path

from mmdeploy_llm import LLM, SamplingParams

IMAGES = Path(__file__).parent / "images"


def write_shards(folder: Path) -> None:
    """Writes two shards; each sample is an image and a json with more about it."""
    pictures = sorted(IMAGES.glob("*.png"))
    for number in range(2):
        with tarfile.open(folder / f"{number:06}.tar", "w") as tar:
            for path in pictures[number::2]:
                add(tar, path.name, path.read_bytes())
                add(tar, f"{path.stem}.json", json.dumps({"what": "image"}).encode())


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    """Adds a member. Members of one key, the name up to its first dot, are one sample."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def main() -> None:
    """Prints one line for each sample; its id is the shard and the key."""
    with tempfile.TemporaryDirectory() as name, LLM("shapes-vl", reasoning_parser="auto") as llm:
        folder = Path(name)
        write_shards(folder)
        llm.run_batch(
            str(folder / "{000000..000001}.tar"),
            folder / "captions.jsonl",
            prompt="Describe the {what}.",
            columns=["what"],
            sampling_params=SamplingParams(temperature=0, max_tokens=100),
            use_tqdm=False,
        )
        for line in (folder / "captions.jsonl").read_text().splitlines():
            record = json.loads(line)
            print(record["id"], record["columns"], record["text"])


if __name__ == "__main__":
    main()
