"""Captions a folder on a Ray cluster, or on this machine, with a table of captions as Parquet.

python examples/ray_captioning.py [FOLDER [OUTPUT]]
RAY_ADDRESS=HOST:6379 python examples/ray_captioning.py /shared/photos /shared/captions

Without RAY_ADDRESS a cluster of this machine alone is started, which ends with the program. Run it
again after it was killed: rows that have been written are skipped. Needs mmdeploy-llm[ray].
"""

import os
import sys
import tempfile
from pathlib import Path

import ray
from ray.data.checkpoint import CheckpointConfig

from mmdeploy_llm import SamplingParams
from mmdeploy_llm.client.ray import caption_dataset

SUFFIXES = (".png", ".jpg", ".webp")


def main() -> None:
    """Writes the captions and prints them; a file that cannot be read has its error there."""
    images = Path(__file__).parent / "images"
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else images
    output = Path(sys.argv[2] if len(sys.argv) > 2 else tempfile.mkdtemp()).resolve()
    # The engine takes one CPU; the others are for reading, writing and the filter of a second run.
    here = {"address": "local", "num_cpus": 3, "include_dashboard": False}
    ray.init(**({} if os.environ.get("RAY_ADDRESS") else here))
    ray.data.DataContext.get_current().checkpoint_config = CheckpointConfig(
        id_column="path", checkpoint_path=str(output / "done"), delete_checkpoint_on_success=False
    )
    # The bytes travel to the machines with the engines, so that only readers need the folder.
    files = ray.data.read_binary_files(
        [str(path.resolve()) for path in sorted(folder.iterdir()) if path.suffix in SUFFIXES],
        include_paths=True,
    )
    captions = caption_dataset(
        files,
        model="shapes-vl",
        prompt="Describe the image.",
        image_column="bytes",
        concurrency=1,
        sampling_params=SamplingParams(temperature=0, max_tokens=100),
        chat_template_kwargs={"enable_thinking": False},
        num_threads=1,
    )
    captions.drop_columns(["bytes"]).write_parquet(str(output / "captions"))
    found = ray.data.read_parquet(str(output / "captions")).take_all()
    for row in sorted(found, key=lambda row: row["path"]):
        print(os.path.basename(row["path"]), row["text"] or row["error_message"], sep=": ")


if __name__ == "__main__":
    main()
