"""Writes checkpoints of real architectures with random bf16 weights: checkpoints.py FOLDER
[ernie03] [qwen05].

The values of the weights do not change the work when end-of-sequence is ignored.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

SPECIAL = ["<|endoftext|>", "<unk>", "<s>", "</s>"]


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on Python's standard library, which is on every machine."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    files = sorted(str(path) for path in Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:150]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=16000, special_tokens=SPECIAL, show_progress=False, initial_alphabet=alphabet
    )
    bpe.train(files, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="</s>",
        pad_token="<|endoftext|>",
        unk_token="<unk>",
        bos_token="<s>",
    )


def build(name: str, ids: dict[str, int]) -> torch.nn.Module:
    """The model of that name, with random weights in torch's default dtype."""
    if name == "ernie03":
        return Ernie4_5ForCausalLM(Ernie4_5Config(**ids))  # its defaults are ERNIE-4.5-0.3B
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=151936,
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            max_position_embeddings=32768,
            **ids,
        )
    )


def main(folder: str, names: list[str]) -> None:
    """Writes the named models, or all, below `folder`."""
    words = tokenizer()
    ids = {f"{kind}_token_id": getattr(words, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    for name in names or ["ernie03", "qwen05"]:
        model = build(name, ids)
        model.save_pretrained(Path(folder) / name)
        words.save_pretrained(Path(folder) / name)
        num_params = sum(parameter.numel() for parameter in model.parameters())
        print(f"{folder}/{name}: {num_params / 1e6:.0f} M parameters")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2:])
