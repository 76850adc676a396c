"""Captions one picture: `python examples/quickstart.py`."""

from pathlib import Path

from mmdeploy_llm import LLM, SamplingParams

picture = Path(__file__).parent / "images" / "picture-2.jpg"
messages = [
    {
        "role": "user",
        "content": [
            {"type": "image", "image": str(picture)},
            {"type": "text", "text": "Describe the image."},
        ],
    }
]

with LLM(model="shapes-vl", reasoning_parser="ernie-45-vl") as llm:
    (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=200), use_tqdm=False)

print("reasoning:   ", output.outputs.reasoning_content.strip())
print("caption:     ", output.outputs.text.strip())
print("image tokens:", output.num_input_image_tokens)
print(f"seconds:      {output.metrics.model_execute_time:.2f}")
