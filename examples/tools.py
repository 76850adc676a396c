"""Lets a model call a Python function and answer with its result.

python examples/tools.py [MODEL]

MODEL defaults to Qwen/Qwen3-0.6B from the hub: the bundled model has not learned to call tools.
"""

import json
import sys
from pathlib import Path

from PIL import Image

from mmdeploy_llm import LLM, SamplingParams

PICTURE = Path(__file__).parent / "images" / "picture-5.png"


def image_size(path: str) -> str:
    """Returns the size of a picture.

    Args:
        path: the picture's file
    """
    with Image.open(path) as image:
        return f"{image.width} x {image.height} pixels"


def main(model: str) -> None:
    """Asks, runs the tool calls of the answer, and asks again with their results."""
    params = SamplingParams(temperature=0, max_tokens=1000)
    messages = [{"role": "user", "content": f"How large is the picture {PICTURE}?"}]
    options = {"tools": [image_size], "use_tqdm": False, "on_error": "raise"}
    with LLM(model=model, reasoning_parser="auto", tool_call_parser="auto") as llm:
        (output,) = llm.chat(messages, params, **options)
        said = {"role": "assistant", "content": output.outputs.text}
        messages.append({**said, "tool_calls": output.outputs.tool_calls})
        for call in output.outputs.tool_calls:
            result = image_size(**json.loads(call.arguments))
            print(f"{call.name}({call.arguments}) gives {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if output.outputs.tool_calls:
            (output,) = llm.chat(messages, params, **options)
        print(output.outputs.text.strip())


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen3-0.6B")
