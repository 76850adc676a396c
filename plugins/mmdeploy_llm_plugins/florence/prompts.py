"""How Florence-2 reads a prompt: the encoder gets the picture and the question, the decoder begins
with tokens of its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b

import torch

from mmdeploy_llm.errors import PromptTooLongError, RequestError
from mmdeploy_llm.hooks import Checkpoint, EncoderPrompt, MediaInput
from mmdeploy_llm_plugins.encoder_decoder.prompts import one_item, setting, start_id

MARKER = "<image>"
# Tasks -> what the model was trained to be asked, as in transformers' Florence2Processor.
TASKS = {
    "<OCR>": "What is the text in the image?",
    "<OCR_WITH_REGION>": "What is the text in the image, with regions?",
    "<CAPTION>": "What does the image describe?",
    "<DETAILED_CAPTION>": "Describe in detail what is shown in the image.",
    "<MORE_DETAILED_CAPTION>": "Describe with a paragraph what is shown in the image.",
    "<OD>": "Locate the objects with category name in the image.",
    "<DENSE_REGION_CAPTION>": "Locate the objects in the image, with their descriptions.",
    "<REGION_PROPOSAL>": "Locate the region proposals in the image.",
}
TASKS_WITH_INPUT = {
    "<CAPTION_TO_PHRASE_GROUNDING>": "Locate the phrases in the caption: {}",
    "<REFERRING_EXPRESSION_SEGMENTATION>": "Locate {} in the image with mask",
    "<REGION_TO_SEGMENTATION>": "What is the polygon mask of region {}",
    "<OPEN_VOCABULARY_DETECTION>": "Locate {} in the image.",
    "<REGION_TO_CATEGORY>": "What is the region {}?",
    "<REGION_TO_DESCRIPTION>": "What does the region {} describe?",
    "<REGION_TO_OCR>": "What text is in the region {}?",
}
NUM_BINS = 1000  # places from left to right, and from top to bottom
LOCATION = re.compile(r"<loc_(\d+)>")
REGION = re.compile(r"(?:<loc_\d+><loc_\d+>){2,}")
UNKNOWN = re.compile(r"<[A-Z][A-Z_ ]+>")  # tokens of the model's own have small letters


class FlorencePrompts:
    """See hooks.EncoderPrompts. Raises CheckpointError where nothing says how a decoder begins."""

    has_places = False

    def __init__(self, checkpoint: Checkpoint) -> None:
        config = checkpoint.config
        text = config.text_config
        self._most = text.max_position_embeddings
        self._image_id = config.image_token_id
        self._frame = text.bos_token_id, text.eos_token_id
        first = setting(checkpoint, text, "forced_bos_token_id")
        self._begin = start_id(checkpoint, config, text), *(() if first is None else (first,))

    def divide(
        self,
        text: str | None,
        ids: Sequence[int],
        media: Sequence[MediaInput],
        encode: Callable[[str], list[int]],
    ) -> EncoderPrompt:
        """Joins picture and question to one item of the encoder."""
        item = one_item(media, "image")
        if text is not None:
            bos, eos = self._frame
            ids = [bos, *encode(question(text)), eos]
        own = torch.tensor([token for token in ids if token != self._image_id])
        if item.num_tokens + len(own) > self._most:
            raise PromptTooLongError(
                f"the question has {len(own)} tokens and the image {item.num_tokens}, but the "
                f"encoder takes {self._most} together; shorten the question"
            )
        key = blake2b(f"{item.key}\0{own.tolist()}".encode(), digest_size=20).hexdigest()
        joined = replace(
            item,
            tensors={**item.tensors, "input_ids": own},
            num_tokens=item.num_tokens + len(own),
            num_text_tokens=len(own),
            key=key if item.key else "",
            prompt_text=None,
        )
        return EncoderPrompt(ids=self._begin, items=(joined,))


def question(text: str) -> str:
    """Returns what the model is asked by a prompt: a task's name stands for its question, with what
    follows it. Raises RequestError for a task with text that it does not take, or without text that
    it needs, a task that is not known, and a region that is none."""
    text = text.replace(MARKER, "").strip()
    wrong = next((name for name in LOCATION.findall(text) if int(name) >= NUM_BINS), None)
    if wrong is not None:
        raise RequestError(f"there is no <loc_{wrong}>, only <loc_0> to <loc_{NUM_BINS - 1}>")
    for task, asked in TASKS.items():
        if task in text:
            if text != task:
                raise RequestError(f"the task {task} takes no further text, found {text!r:.80}")
            return asked
    for task, asked in TASKS_WITH_INPUT.items():
        if task in text:
            return asked.format(_given(task, text.replace(task, "").strip()))
    unknown = UNKNOWN.match(text)
    if unknown is not None:
        known = ", ".join((*TASKS, *TASKS_WITH_INPUT))
        raise RequestError(f"the task {unknown[0]} is not known; there are {known}")
    return text


def _given(task: str, text: str) -> str:
    """Returns the text after a task's name. Raises RequestError where it is not what is needed."""
    if not text:
        raise RequestError(f"the task {task} needs a text after it")
    if task.startswith("<REGION") and not REGION.fullmatch(text):
        raise RequestError(
            f"the task {task} needs a region after it, the corners of a box as four tokens such as "
            f"<loc_10><loc_20><loc_500><loc_600>, or of a polygon as more pairs; found {text!r:.80}"
        )
    return text
