"""The front page's answers of a real model are those that it gives."""

import re

from mmdeploy_llm import LLM, SamplingParams
from tests.real.packages import file_of
from tests.tree import ROOT


def test_the_answers_of_the_front_page():
    text = (ROOT / "README.md").read_text()
    table = text.partition("SmolLM2-135M-Instruct.Q4_1.gguf answers |\n|---|---|\n")[2]
    rows = dict(re.findall(r"^\| (.*) \| (.*) \|$", table.partition("\n\n")[0], re.MULTILINE))
    assert len(rows) == 3
    conversations = [[{"role": "user", "content": question}] for question in rows]
    with LLM(str(file_of("smollm2"))) as llm:
        outputs = llm.chat(conversations, SamplingParams(temperature=0), use_tqdm=False)
    assert [output.outputs.text for output in outputs] == list(rows.values())
