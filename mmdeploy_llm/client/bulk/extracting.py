"""Extracts objects of a class from answers, for LLM.extract."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmdeploy_llm.batch.answers.checks import open_checks
from mmdeploy_llm.batch.answers.rules import TextRules
from mmdeploy_llm.batch.answers.schemas import AnswerSchema
from mmdeploy_llm.batch.answers.validated import Validated
from mmdeploy_llm.client.answering import Progress
from mmdeploy_llm.client.arguments import as_prompt, as_prompts, is_conversation, params_for
from mmdeploy_llm.data.records.making import error_of
from mmdeploy_llm.data.records.record import ItemError
from mmdeploy_llm.engine.desk.answerer import Answerer
from mmdeploy_llm.engine.desk.ask import Ask
from mmdeploy_llm.engine.desk.outcome import Answer
from mmdeploy_llm.errors import ConfigError, InvalidAnswerError
from mmdeploy_llm.messages import Conversation, Prompts
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.text.progress_bars import UseTqdm


def extract(
    llm: Answerer,
    prompts: Prompts | Conversation,
    schema: Any,
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    use_tqdm: UseTqdm,
    retries: int,
) -> list[Any]:
    """Returns an object for each prompt, or an ItemError in its place, see LLM.extract."""
    shape = AnswerSchema.given(schema)
    if shape is None:
        raise ConfigError("extract needs a schema: a class of pydantic, or a JSON schema")
    conversation = [prompts] if is_conversation(prompts) else as_prompts(prompts)
    items = [as_prompt(item) for item in conversation]
    each = params_for(sampling_params, len(items), "prompts")
    asks = [
        Ask(prompt=item, params=shape.guided(own), item=number)
        for number, (item, own) in enumerate(zip(items, each, strict=True))
    ]
    found: dict[int, Any] = {}
    with open_checks(shape, TextRules()) as checks, Progress(len(asks), use_tqdm) as progress:
        for answer in Validated(llm, checks, retries).answer_each(asks):
            found[answer.ask.item] = _extracted(answer, shape)
            progress.count(answer.output)
    return [found[number] for number in range(len(items))]


def _extracted(answer: Answer, shape: AnswerSchema) -> Any:
    """Returns the object of an answer, or an ItemError."""
    output, first = answer.output, answer.output.outputs[0]
    if not output.is_ok:
        return error_of(output, answer.error)
    if first.finish_reason == "length" and not first.is_valid:
        words = "the answer was cut off before its JSON was whole; raise max_tokens"
        kind = InvalidAnswerError.__name__
        return ItemError(code=InvalidAnswerError.code, kind=kind, message=words)
    return shape.value_of(first.text.strip())
