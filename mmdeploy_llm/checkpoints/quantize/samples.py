"""Samples: the prompts of a calibration set with the answers that the unrounded model gives."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mmdeploy_llm.batch.sources import open_source
from mmdeploy_llm.checkpoints.saving.folders import write_whole
from mmdeploy_llm.data.records.ids import Selection
from mmdeploy_llm.data.records.item import Item
from mmdeploy_llm.data.rows.rows import BadItem
from mmdeploy_llm.engine.desk.answerer import GeneratingModel
from mmdeploy_llm.engine.startup.media import ChatMedia
from mmdeploy_llm.errors import ConfigError, RequestError
from mmdeploy_llm.system.guarding.folder_files import MAX_INDEX_BYTES, read_object
from mmdeploy_llm.values.options.weight_formats import BUILT_IN
from mmdeploy_llm.values.outputs.request_output import RequestOutput
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.prompt import PromptParts

ANSWERS = "answers.json"
PROMPTS = Path(__file__).with_name("prompts.jsonl")  # prose, code and chats in many languages
HELD_OUT = 10  # every tenth item is held out
PARAMS = SamplingParams(temperature=0, max_tokens=128, skip_special_tokens=False)


# Opens a model with options of an engine, as LLM does.
OpenModel = Callable[..., AbstractContextManager[GeneratingModel]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A prompt that ends with its answer. start: the number of tokens before the answer."""

    prompt: PromptParts
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """A calibration set. held_out: the samples that say what was lost, and are not calibrated with
    unless there is only one. skipped: what is wrong with the items that are not used."""

    used: Sequence[Sample]
    held_out: Sequence[Sample]
    skipped: Sequence[str]


def read_items(given: str) -> Sequence[Item | BadItem]:
    """Reads a folder of images and videos, or a corpus, as `mmdeploy-llm batch` does, or the
    prompts of this package for BUILT_IN."""
    return tuple(open_source(str(PROMPTS) if given == BUILT_IN else given, PARAMS, Selection()))


def digests_of(items: Sequence[Item | BadItem]) -> Sequence[str]:
    """Returns a digest of each item; another one when its line or its files change."""
    return [item.digest if isinstance(item, Item) else item.message for item in items]


def answered(
    llm: GeneratingModel, items: Sequence[Item | BadItem], folder: Path, media: ChatMedia
) -> Samples:
    """Returns the samples of all items that have an answer. The answers are kept in `folder`, where
    a later run finds them. media: takes those of messages. Raises ConfigError when no item is
    left."""
    path = folder / ANSWERS
    if not path.exists():
        found = _answers(llm, [item for item in items if isinstance(item, Item)], media)
        write_whole(path, json.dumps({"answers": found}).encode())
    answers = iter(read_object(path, MAX_INDEX_BYTES)["answers"])
    good, skipped = [], []
    for item in items:
        if isinstance(item, BadItem):
            skipped.append(f"line {item.line}: {item.message}")
        elif "error" in (answer := next(answers)):
            skipped.append(f"{item.id}: {answer['error']}")
        else:
            prompt = _completed(item.prompt, answer, media)
            good.append(Sample(prompt=prompt, start=answer["start"]))
    if not good:
        reasons = "; ".join(skipped[:3])
        raise ConfigError(f"none of {len(items)} calibration items can be used: {reasons}")
    last = len(good) - 1
    chosen = {index for index in range(len(good)) if index % HELD_OUT == HELD_OUT - 1} or {last}
    used = [own for index, own in enumerate(good) if index not in chosen]
    held_out = [good[index] for index in sorted(chosen)]
    return Samples(used=used or held_out, held_out=held_out, skipped=skipped)


def _answers(llm: GeneratingModel, items: Sequence[Item], media: ChatMedia) -> list[dict[str, Any]]:
    outputs = llm.generate([item.prompt for item in items], [item.params for item in items])
    answers = [_answer(output) for output in outputs]
    for index, item in enumerate(items):
        if "error" not in answers[index]:
            try:
                llm.count_tokens(_completed(item.prompt, answers[index], media))
            except RequestError as error:
                answers[index] = {"error": f"with its answer: {error}"}
    return answers


def _answer(output: RequestOutput) -> dict[str, Any]:
    """Returns what an answer adds to its prompt, or what is wrong with it."""
    if not output.is_ok:
        return {"error": output.error_msg}
    ids = list(output.outputs[0].token_ids)
    if not ids:
        return {"error": "the answer is empty"}
    text = None if output.prompt is None else output.prompt + output.outputs[0].text
    return {"text": text, "ids": ids, "start": len(output.prompt_token_ids)}


def _completed(prompt: PromptParts, answer: Mapping[str, Any], media: ChatMedia) -> PromptParts:
    """Returns a prompt with its answer at its end: text for a text or a chat, else ids."""
    if prompt.ids is not None:
        return replace(prompt, ids=(*prompt.ids, *answer["ids"]))
    if prompt.messages is None:
        return replace(prompt, text=answer["text"])
    kwargs = prompt.processor_kwargs
    return PromptParts(text=answer["text"], media=media.of(prompt), processor_kwargs=kwargs)
