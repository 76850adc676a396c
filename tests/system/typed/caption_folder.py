"""A user's script: captions a folder. Lines that end with "wrong" are mistakes."""

import functools
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm

from mmdeploy_llm import LLM, RequestOutput, SamplingParams

params = SamplingParams(stop=["a"], stop_token_ids=[1], bad_words="x", temperature=0.0)
SamplingParams(max_token=4)  # wrong
SamplingParams(temperature="hot")  # wrong

with LLM(Path("model"), max_num_seqs=4, dtype="bf16", limit_mm_per_prompt={"image": 2}) as llm:
    one = llm.generate("a text")
    many = llm.generate(["a text", "another"], params)
    mixed: list[str | list[int] | dict[str, str]] = ["a text", [1, 2, 3], {"prompt": "a text"}]
    every = llm.generate(mixed, params)
    ids = llm.generate([1, 2, 3], [params])
    picture = Image.new("RGB", (8, 8))
    frames = np.zeros((4, 8, 8, 3), dtype=np.uint8)
    seen = llm.generate(
        {"prompt": "<image>", "multimodal_data": {"image": [picture], "video": frames}},
        use_tqdm=functools.partial(tqdm, leave=False),
    )
    chat: list[dict[str, object]] = []
    for path in Path("pictures").iterdir():
        chat = [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "What is it?"},
                    {"type": "image_url", "image_url": {"url": str(path)}},
                    {"type": "image", "image": path},
                ],
            }
        ]
        outputs: list[RequestOutput] = llm.chat(chat, params, use_tqdm=False)
        text: str = outputs[0].outputs.text
        also: str = outputs[0].outputs[0].text
        reason: int = outputs[0].outputs.finish_reason  # wrong
        row: dict[str, object] = outputs[0].to_row()
        line: str = outputs[0].to_json()
        print(text, also, row, line, outputs[0].num_input_image_tokens + 1)
        print(outputs[0].texts)  # wrong
    llm.chat(chat, params, on_error="ignore")  # wrong
    llm.chat([chat, chat], params, chat_template_kwargs={"enable_thinking": False})

LLM("model", max_num_seq=4)  # wrong
LLM(model="model", media_isolation="threads")  # wrong
