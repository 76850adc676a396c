"""A user's script: batches, counted and estimated. Lines that end with "wrong" are mistakes."""

from pathlib import Path

from pydantic import BaseModel

from mmdeploy_llm import LLM, GuidedDecodingParams, ItemError, SamplingParams, count_tokens


class Picture(BaseModel):
    """Holds what a picture shows."""

    color: str
    shape: str


llm = LLM(model="model", quiet=True, device="cpu", plugins=["qwen"], quantization="int8")
summary = llm.run_batch("pictures", "out.jsonl", prompt="Describe.", resume=True, limit=4)
llm.run_batch("pictures", Path("out.parquet"), prompts="Describe.")  # wrong
llm.run_batch([{"id": "1", "prompt": "a text"}], "out.jsonl", schema=Picture, use_tqdm=False)
print(summary.ending, summary.num_failed, summary.output / "x", summary.num_fail)  # wrong

found = llm.extract(["a text"], Picture, SamplingParams(max_tokens=40))
colors = [each.color for each in found if not isinstance(each, ItemError)]

guided = SamplingParams(guided_decoding=GuidedDecodingParams(json=Picture))
GuidedDecodingParams(choice=["a", "b"])
GuidedDecodingParams(choices=["a", "b"])  # wrong
SamplingParams(response_format={"type": "json_object"}, no_repeat_ngram={"size": 3})
SamplingParams(logit_bias={1: 0.5}, stop=None, stop_words_ids=[[1, 2]])
SamplingParams(guided_decoding={"json": Picture.model_json_schema()}, seed=1.5)  # wrong

tokens = count_tokens("model", "a text", max_model_len=128)
print(tokens, count_tokens("model", "a text", max_len=128))  # wrong
llm.read(["a.pdf", Path("b.pdf")], "pages.jsonl", markdown="pages", dpi=150)
llm.read("a.pdf", "pages.jsonl", dbi=150)  # wrong
print(llm.estimate_batch("pictures", prompt="Describe.", num_items=4))
