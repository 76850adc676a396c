"""Captions pictures with one model and has another one check each caption, in one process:
`python examples/two_models.py`. The two take turns on the cores, a step each."""

import asyncio
import re
from pathlib import Path

from mmdeploy_llm import AsyncLLM, ModelPool, SamplingParams

PICTURES = sorted((Path(__file__).parent / "images").glob("picture-[1-5].*"))
SHAPE = re.compile(r"(?:large|small) \w+ \w+")
PARAMS = SamplingParams(temperature=0, max_tokens=200)


async def ask(model: AsyncLLM, picture: Path, question: str) -> str:
    """Returns a model's answer to a question about a picture."""
    image = {"type": "image", "image": str(picture)}
    content = [image, {"type": "text", "text": question}]
    output = await model.submit({"messages": [{"role": "user", "content": content}]}, PARAMS)
    return output.outputs.text if output.is_ok else f"error: {output.error_msg}"


async def caption_and_check(captioner: AsyncLLM, judge: AsyncLLM, picture: Path) -> str:
    """Returns a line with the caption of a picture and the shapes in it that the judge sees too."""
    caption = await ask(captioner, picture, "What is in this picture?")
    shapes = SHAPE.findall(caption)
    answers = await asyncio.gather(
        *(ask(judge, picture, f"Is there a {shape}?") for shape in shapes)
    )
    seen = [shape for shape, answer in zip(shapes, answers, strict=True) if answer == "yes"]
    return f"{picture.name}: {caption} The judge sees {len(seen)} of {len(shapes)}."


async def main() -> None:
    """Runs all pictures at once: while one caption is checked, others are written."""
    with ModelPool() as pool:
        # The bundled model plays both roles here; take a model of your own for each.
        for name in ("captioner", "judge"):
            pool.install(name, "shapes-vl", reasoning_parser="auto", kv_cache_memory=2**26)
            pool.start(name)
        tasks = (caption_and_check(pool["captioner"], pool["judge"], file) for file in PICTURES)
        for line in await asyncio.gather(*tasks):
            print(line)
        for status in pool.status():
            taken = (status.weights + status.kv_cache) / 2**20
            print(f"{status.name}: {status.state}, at most {taken:.0f} MiB")


if __name__ == "__main__":
    asyncio.run(main())
