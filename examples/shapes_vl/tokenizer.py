"""The tokenizer of shapes-vl: byte-level BPE over the words of the task, any other text as bytes.

Every text can be encoded and is decoded unchanged, and the same seed gives the same
`tokenizer.json`. The special tokens carry ERNIE's names.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import questions as asking
from scenes import draw_scene
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 768
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")

# In the order of their ids.
CONTROL_TOKENS = (
    "<unk>",
    "<s>",
    "</s>",
    "<pad>",
    "<|begin_of_sentence|>",
    "<|end_of_sentence|>",
    "<|IMAGE_START|>",
    "<|IMAGE_END|>",
    "<|VIDEO_START|>",
    "<|VIDEO_END|>",
    "<|IMAGE_PLACEHOLDER|>",
    "<|VIDEO_PLACEHOLDER|>",
    "<|image@placeholder|>",
    "<|video@placeholder|>",
)
# One token each, but kept by `skip_special_tokens` because a reasoning parser reads them.
TEXT_TOKENS = ("<think>", "</think>", "<response>", "</response>")
# Attribute names under which transformers' ERNIE processor looks for tokens.
NAMED_TOKENS = {
    "image_token": "<|IMAGE_PLACEHOLDER|>",
    "image_start_token": "<|IMAGE_START|>",
    "image_end_token": "<|IMAGE_END|>",
    "video_token": "<|VIDEO_PLACEHOLDER|>",
    "video_start_token": "<|VIDEO_START|>",
    "video_end_token": "<|VIDEO_END|>",
}
# Words for future tasks, so that the vocabulary need not change for them.
RESERVED_WORDS = (
    "moves moved moving move clip video left right up down to the away from stays still then and "
    "first last frame from left to right before after bigger smaller grows shrinks appears "
    "disappears fast slow black white gray grey brown hexagon rectangle oval time second seconds"
)


def train_tokenizer(seed: int = 0) -> PreTrainedTokenizerFast:
    """Train the tokenizer on text of the data generator."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[*CONTROL_TOKENS, *TEXT_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(seed), trainer)
    return _wrap(tokenizer)


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    tokenizer.save_pretrained(folder)


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Wrap the tokenizer for transformers, with token names, a chat template and TEXT_TOKENS."""
    spec = json.loads(tokenizer.to_str())
    for token in spec["added_tokens"]:
        token["special"] = token["content"] not in TEXT_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(spec)),
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        cls_token="<|begin_of_sentence|>",
        sep_token="<|end_of_sentence|>",
        extra_special_tokens=NAMED_TOKENS,
        chat_template=CHAT_TEMPLATE.read_text(encoding="utf-8"),
        clean_up_tokenization_spaces=False,
        model_max_length=32768,
    )


def _corpus(seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    texts = ["User: Picture 1:", "User: Picture 2: Video 1:", "\nAssistant: ", "\nUser: "] * 200
    for _ in range(1500):
        _, scene = draw_scene(rng, size=(64, 64))
        asked = [asking.ask(rng, scene) for _ in range(8)]
        asked += [asking.ask_caption(rng, scene), asking.ask_about_picture(rng, scene, 2)]
        asked.append(asking.ask_no_picture(rng))
        for question in asked:
            texts += [question.prompt, question.thought, question.answer]
    texts += [*RESERVED_WORDS.split(), RESERVED_WORDS, *asking.SYSTEM_PROMPTS] * 100
    return texts
