"""Python's own help, signatures and completion show what the public names are for."""

import inspect
import pydoc
import re
from pathlib import Path

import pytest

import mmdeploy_llm
from mmdeploy_llm import LLM, AsyncLLM, EngineConfig, ModelPool, SamplingParams
from mmdeploy_llm.batch.arguments import BatchOptions
from mmdeploy_llm.batch.documents.reading.arguments import ReadArguments

GUIDE = Path(__file__).parent.parent / "docs"
MAX_SIGNATURE = 400  # characters before the sentence; of SamplingParams there were 3,188


def names(function):
    return list(inspect.signature(function).parameters)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("name", mmdeploy_llm.__all__)
def test_help_begins_with_a_sentence(name):
    text = pydoc.plain(pydoc.render_doc(getattr(mmdeploy_llm, name)))
    found = re.search(r"^ *(\| *)?[A-Z][a-z]*( [\w'(,:.`-]+)+.*$", text.partition("\n\n")[2], re.M)
    assert (found.start() if found else len(text)) < MAX_SIGNATURE, text[:600]


@pytest.mark.parametrize("door", [LLM, AsyncLLM, ModelPool.install, mmdeploy_llm.count_tokens])
def test_signatures_have_the_options_of_the_engine(door):
    assert set(EngineConfig.model_fields) <= set(names(door))
    assert inspect.signature(door).parameters["quiet"].default is False
    assert str(inspect.signature(door)).count(",") < 8


def test_signatures_have_the_options_of_params_and_batches():
    assert {"stop", "max_tokens", "seed"} <= set(names(SamplingParams))
    assert "json" in names(mmdeploy_llm.GuidedDecodingParams)
    assert set(BatchOptions.__annotations__) < set(names(LLM.run_batch))
    assert set(BatchOptions.__annotations__) < set(names(LLM.estimate_batch))
    assert set(ReadArguments.__annotations__) < set(names(LLM.read))
    assert names(LLM.generate)[:4] == ["self", "prompts", "sampling_params", "use_tqdm"]
    assert names(LLM.run_batch)[:3] == ["self", "input", "output"]


@pytest.mark.one_is_quick
@pytest.mark.parametrize("door", [LLM, AsyncLLM, ModelPool])
def test_the_guide_documents_what_the_tab_key_shows(door):
    guide = "\n".join(page.read_text(encoding="utf-8") for page in GUIDE.glob("*.md"))
    shown = [name for name in dir(door) if not name.startswith("_")]
    assert "restart" in shown or door is ModelPool
    lacking = [name for name in shown if not re.search(rf"\b(llm|pool)\.{name}\b|`{name}\b", guide)]
    assert lacking == []
