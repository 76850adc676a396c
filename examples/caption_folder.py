# /// script
# requires-python = ">=3.11"
# dependencies = ["mmdeploy-llm", "torch"]
#
# [[tool.uv.index]]
# name = "pytorch-cpu"
# url = "https://download.pytorch.org/whl/cpu"
# explicit = true
#
# [tool.uv.sources]
# torch = [{ index = "pytorch-cpu", marker = "sys_platform == 'linux'" }]
# ///
"""Captions the pictures and videos of a folder, in an environment that uv makes for it:

uv run examples/caption_folder.py photos/ --model MODEL

The comment above names what the script needs, with the CPU build of torch (docs/install.md). In an
environment that has the package it runs with `python`, too.
"""

import argparse

from mmdeploy_llm import LLM, SamplingParams


def main() -> None:
    """Writes a line of JSON for each file. Started again, it does only what is left."""
    parser = argparse.ArgumentParser(description="Caption the pictures and videos of a folder.")
    parser.add_argument("folder")
    parser.add_argument("--model", default="shapes-vl", help="a folder or a hub id")
    parser.add_argument("--prompt", default="Describe the image.")
    parser.add_argument("--output", default="captions.jsonl")
    given = parser.parse_args()
    params = SamplingParams(temperature=0, max_tokens=300)
    with LLM(given.model, reasoning_parser="auto") as llm:
        summary = llm.run_batch(
            given.folder, given.output, prompt=given.prompt, sampling_params=params, resume=True
        )
    print(f"{given.output}: {summary.run.num_done} captions, {summary.run.num_failed} failed")


if __name__ == "__main__":
    main()
