"""The check of a model with media from end to end: a conversation, through the chat template, the
processors and the engine, against transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.hooks import PluginManager
from mmdeploy_llm.llm import LLM
from mmdeploy_llm.model_checks.base import Check, CheckSkipped, attributed, demand
from mmdeploy_llm.model_checks.models import ModelSubject, transformers_reference
from mmdeploy_llm.model_folder import read_checkpoint
from mmdeploy_llm.params import SamplingParams

from .samples import image_bytes, noise
from .truth import TransformersImages

NUM_TOKENS = 12
SIZES = ((84, 140), (140, 84))  # of the images: as many tokens, in other rows
KV_BYTES = 2**26


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """Token ids of a conversation's prompt, and of its answer."""

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]


# Called with (model folder, messages, number of tokens of the answer).
ChatReference = Callable[[Path, Sequence[Any], int], ChatAnswer]


def conversation() -> list[dict[str, Any]]:
    """Returns messages with two images and text around them."""
    one, two = (
        image_bytes(noise(*size, seed=seed), "PNG") for seed, size in enumerate(SIZES, start=20)
    )
    parts = [
        {"type": "text", "text": "First "},
        {"type": "image", "image": one},
        {"type": "text", "text": " then "},
        {"type": "image", "image": two},
        {"type": "text", "text": " which is larger?"},
    ]
    return [{"role": "user", "content": parts}]


def transformers_chat(folder: Path, messages: Sequence[Any], num_tokens: int) -> ChatAnswer:
    """Asks transformers: its chat template, its processor of images and its model. Raises
    CheckSkipped where it cannot be asked."""
    try:
        inputs = _inputs(folder, messages)
    except Exception as error:  # transformers raises whatever its classes raise
        reason = str(error).strip().splitlines()[:1]
        raise CheckSkipped(
            f"transformers cannot be asked ({' '.join(reason)[:200]}); give its tokens yourself: "
            "add `chat_reference` to the test class"
        ) from error
    model = transformers_reference(folder).model
    with torch.inference_mode():
        out = model.generate(
            **inputs, max_new_tokens=num_tokens, do_sample=False, eos_token_id=None
        )
    ids = inputs["input_ids"][0].tolist()
    return ChatAnswer(prompt_ids=ids, token_ids=out[0, len(ids) :].tolist())


def _inputs(folder: Path, messages: Sequence[Any]) -> dict[str, Any]:
    """Returns what transformers' model gets of a conversation with images."""
    images = TransformersImages(read_checkpoint(folder))
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    parts = [part for message in messages for part in message["content"]]
    return images.inputs(text, [part["image"] for part in parts if part["type"] == "image"])


def a_chat_equals_the_reference(subject: ModelSubject) -> None:
    """`LLM.chat` with two images gives the prompt and the greedy tokens of transformers."""
    if not subject.spec.media:
        raise CheckSkipped("the model reads no media: nothing to add")
    if "image" not in subject.spec.media and subject.messages is None:
        raise CheckSkipped("the model reads no images; add `messages` and `chat_reference`")
    _demand_served(subject)
    messages = conversation() if subject.messages is None else list(subject.messages)
    ask: ChatReference = subject.chat_reference or transformers_chat
    expected = ask(subject.folder, messages, NUM_TOKENS)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with (
        attributed("LLM.chat", "every conversation of the check must be answered"),
        LLM(
            str(subject.folder),
            dtype="float32",
            device="cpu",
            quiet=True,
            use_warmup=False,
            kv_cache_memory=KV_BYTES,
            limit_mm_per_prompt=dict.fromkeys(subject.spec.media, len(messages[0]["content"])),
        ) as llm,
    ):
        (output,) = llm.chat(messages, params, use_tqdm=False)
    demand(output.error_msg is None, f"LLM.chat answers with an error: {output.error_msg}")
    _demand_same_ids(
        "the prompt of a conversation",
        output.prompt_token_ids,
        expected.prompt_ids,
        "the chat template's text of an item, the processor's markers, count and prompt_text",
    )
    _demand_same_ids(
        "the answer of a conversation",
        output.outputs.token_ids,
        expected.token_ids,
        "the order of the items, their tensors' names and shapes in encode_media, and positions",
    )


def _demand_served(subject: ModelSubject) -> None:
    """Raises CheckSkipped unless an engine would run the subject's model."""
    architectures = subject.config.architectures or ()
    try:
        serves = PluginManager.load().model_for(architectures)
    except ModelNotSupportedError as error:
        raise CheckSkipped(
            "no installed plugin serves the checkpoint; install yours (pip install -e .)"
        ) from error
    if serves.factory != subject.spec.factory:
        raise CheckSkipped(
            f"an engine runs {serves.factory!r} for this checkpoint, not {subject.spec.factory!r}; "
            "install your package (pip install -e .)"
        )


def _demand_same_ids(what: str, found: Sequence[int], expected: Sequence[int], where: str) -> None:
    found, expected = list(found), list(expected)
    pairs = enumerate(zip(found, expected, strict=False))
    at = next((at for at, (one, two) in pairs if one != two), min(len(found), len(expected)))
    demand(
        found == expected,
        f"{what} has {len(found)} tokens, by the reference {len(expected)}; they differ from index "
        f"{at} on ({found[at : at + 6]}, not {expected[at : at + 6]}); look at {where}",
    )


CHECKS: tuple[Check, ...] = (a_chat_equals_the_reference,)
