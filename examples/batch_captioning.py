"""Captions a folder from Python: results as they finish, constant memory for any number of files.

python examples/batch_captioning.py [FOLDER]

The command `mmdeploy-llm caption` does this and more; this shows how to build your own.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from mmdeploy_llm import LLM, SamplingParams


def prompts(folder: Path) -> Iterator[dict]:
    """Yields a prompt for each file; the engine asks for the next one when it can take it."""
    for path in sorted(folder.iterdir()):
        content = [
            {"type": "image", "image": str(path)},
            {"type": "text", "text": "Describe the image."},
        ]
        yield {
            "messages": [{"role": "user", "content": content}],
            "chat_template_kwargs": {"enable_thinking": False},
        }


def main() -> None:
    """Prints a line of JSON for each file; one that cannot be read gives a line with an error."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "images"
    params = SamplingParams(temperature=0, max_tokens=200)
    with LLM(model="shapes-vl", reasoning_parser="ernie-45-vl") as llm:
        for output in llm.generate_iter(prompts(folder), params):
            # `output.item` is the object that `prompts` yielded.
            path = output.item["messages"][0]["content"][0]["image"]
            line = {"path": path, "caption": output.outputs.text.strip(), "error": output.error_msg}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
