"""The check of a model with media from end to end: a conversation, through the chat template, the
processors and the engine, against transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from mmdeploy_llm.client.llm import LLM
from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.hooks import PluginManager
from mmdeploy_llm.testing.models.base import Check, CheckSkipped, attributed, demand
from mmdeploy_llm.testing.models.models import ModelSubject, transformers_reference
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.weights.folder import read_checkpoint

from .samples import image_bytes, noise, sounds
from .truth import inputs_of_media

NUM_TOKENS = 12
SIZES = ((84, 140), (140, 84))  # of the images: as many tokens, in other rows
SOUND_SECONDS = 0.5
KV_BYTES = 2**26


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """Token ids of a conversation's prompt, and of its answer."""

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]


# Called with (model folder, messages, number of tokens of the answer).
ChatReference = Callable[[Path, Sequence[Any], int], ChatAnswer]


def conversation(kinds: Sequence[str] = ("image",)) -> list[dict[str, Any]]:
    """Returns messages with two images, a sound, or all three, and text around them."""
    parts: list[dict[str, Any]] = []
    if "image" in kinds:
        one, two = (
            image_bytes(noise(*size, seed=seed), "PNG") for seed, size in enumerate(SIZES, start=20)
        )
        for text, image in (("First ", one), (" then ", two)):
            parts += [{"type": "text", "text": text}, {"type": "image", "image": image}]
    if "audio" in kinds:
        sound = sounds.wav_bytes(sounds.tone(SOUND_SECONDS, seed=20))
        parts += [{"type": "text", "text": " heard "}, {"type": "audio", "audio": sound}]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": " which is larger?"}]}]


def transformers_chat(folder: Path, messages: Sequence[Any], num_tokens: int) -> ChatAnswer:
    """Asks transformers: its chat template, its processor of images and its model. Raises
    CheckSkipped where it cannot be asked."""
    try:
        inputs = _inputs(folder, messages)
        ids = inputs["input_ids"][0].tolist()  # none of a model that hears outside of its tokens
        model = transformers_reference(folder).model
        with torch.inference_mode():
            out = model.generate(
                **inputs, max_new_tokens=num_tokens, do_sample=False, eos_token_id=None
            )
    except Exception as error:  # transformers raises whatever its classes raise
        reason = str(error).strip().splitlines()[:1]
        raise CheckSkipped(
            f"transformers cannot be asked ({' '.join(reason)[:200]}); give its tokens yourself: "
            "add `chat_reference` to the test class"
        ) from error
    if model.config.is_encoder_decoder:  # the encoder reads the prompt; the decoder has its own
        ids = out[0, :-num_tokens].tolist()
    return ChatAnswer(prompt_ids=ids, token_ids=out[0, len(ids) :].tolist())


def _inputs(folder: Path, messages: Sequence[Any]) -> dict[str, Any]:
    """Returns what transformers' model gets of a conversation with images and sounds."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    parts = [part for message in messages for part in message["content"]]
    media = {
        kind: [part[kind] for part in parts if part["type"] == kind] for kind in ("image", "audio")
    }
    return inputs_of_media(read_checkpoint(folder), text, media["image"], media["audio"])


def _asked(subject: ModelSubject) -> tuple[list[Any], ChatAnswer, str | None]:
    """Returns the messages, the reference's answer, and what was left out of them: the sounds of a
    model with images, where the reference cannot be asked about both."""
    ask: ChatReference = subject.chat_reference or transformers_chat
    kinds = [kind for kind in ("image", "audio") if kind in subject.spec.media]
    note = None
    if subject.messages is not None:
        messages = list(subject.messages)
    elif subject.chat_reference is not None or len(kinds) < 2:
        messages = conversation(kinds[:1])
    else:
        messages = conversation(kinds)
        try:
            return messages, ask(subject.folder, messages, NUM_TOKENS), None
        except CheckSkipped as error:
            messages, note = conversation(kinds[:1]), f"asked about images only: {error}"
    return messages, ask(subject.folder, messages, NUM_TOKENS), note


def a_chat_equals_the_reference(subject: ModelSubject) -> str | None:
    """`LLM.chat` with two images and a sound, those that the model reads, gives the prompt and the
    greedy tokens of transformers."""
    if not subject.spec.media:
        raise CheckSkipped("the model reads no media: nothing to add")
    if not {"image", "audio"} & {*subject.spec.media} and subject.messages is None:
        raise CheckSkipped(
            "the model reads no images or sounds; add `messages` and `chat_reference`"
        )
    _demand_served(subject)
    messages, expected, note = _asked(subject)
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
    return note


def _demand_served(subject: ModelSubject) -> None:
    """Raises CheckSkipped unless an engine would run the subject's model."""
    architectures = subject.config.architectures or ()
    try:
        serves = PluginManager.load().model_for(architectures, subject.config)
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
