"""A user's script: several models, streams and tokenizers. Lines that end with "wrong" are
mistakes."""

import asyncio
from collections.abc import Iterator
from os import PathLike

from transformers import AutoTokenizer

from mmdeploy_llm import LLM, AsyncLLM, ModelPool, RequestOutput, SamplingParams, TokenCounter


def questions() -> Iterator[dict[str, str]]:
    """Yields prompts."""
    yield {"prompt": "a text"}


def stream(folder: PathLike[str]) -> str:
    """Reads an answer while it is generated."""
    text = ""
    with LLM(folder, tokenizer="other", reasoning_parser="auto") as llm:
        for delta in llm.stream([{"role": "user", "content": "a text"}], SamplingParams()):
            text += delta.outputs.text
        for output in llm.generate_iter(questions(), SamplingParams(n=2)):
            print(output.outputs[1].reasoning_content, output.metrics.time_in_queue)
        tokenizer = AutoTokenizer.from_pretrained("model")
        llm.generate(tokenizer(["a text"], padding=True))
        llm.generate(tokenizer.encode("a text"))
        llm.generate(4)  # wrong
        llm.stream("a text", use_tqdm=False)  # wrong
    return text


async def main() -> None:
    """Asks two models."""
    async with AsyncLLM("model", max_queued=8, max_num_seqs=2) as llm:
        handle = llm.submit("a text", SamplingParams(max_tokens=4), timeout=3.0)
        output: RequestOutput = await handle
        async for partial in llm.generate("a text", SamplingParams(output_kind="delta")):
            print(partial.outputs.text, output)
        SamplingParams(output_kind="deltas")  # wrong
    AsyncLLM("model", max_queue=8)  # wrong
    with ModelPool(cores="shares") as pool, TokenCounter("model", max_model_len=9) as counter:
        pool.install("first", "model", num_threads=1, seed=3)
        pool.install("second", "model", num_thread=1)  # wrong
        print(pool.start("first").stats(), counter.count_tokens("a text"))


asyncio.run(main())
