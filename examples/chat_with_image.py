"""Asks several questions about one picture, which is encoded only once.

python examples/chat_with_image.py [PICTURE]
"""

import sys
from pathlib import Path

from mmdeploy_llm import LLM, SamplingParams

QUESTIONS = ("Describe the image.", "How many shapes are there?", "Is there a red star?")


def main() -> None:
    """Keeps the conversation, so that the model sees the earlier questions and answers."""
    default = Path(__file__).parent / "images" / "picture-5.png"
    picture = sys.argv[1] if len(sys.argv) > 1 else str(default)
    params = SamplingParams(temperature=0, max_tokens=200)
    messages = []
    with LLM(model="shapes-vl", reasoning_parser="ernie-45-vl") as llm:
        for question in QUESTIONS:
            content = [{"type": "text", "text": question}]
            if not messages:
                content.insert(0, {"type": "image", "image": picture})
            messages.append({"role": "user", "content": content})
            (output,) = llm.chat(
                messages, params, use_tqdm=False, chat_template_kwargs={"enable_thinking": False}
            )
            print(f"{question}  {output.outputs.text.strip()}")
            print(f"    {output.num_cached_tokens} prompt tokens came from the prefix cache")
            messages.append({"role": "assistant", "content": output.outputs.text})


if __name__ == "__main__":
    main()
