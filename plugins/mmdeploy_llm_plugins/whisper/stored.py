"""A Whisper model in a file that is not transformers': its sizes and tokens as the JSON files that
transformers' folder of the model would have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmdeploy_llm.errors import CheckpointError

from .vocabulary import END

# A vocabulary of this size or more knows languages; English-only models have one token fewer.
MULTILINGUAL = 51_865
LATEST = 50  # number of the last time with which an answer may begin, one second
NEEDED = (END, "<|startoftranscript|>", "<|translate|>", "<|transcribe|>", "<|notimestamps|>")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWhisper:
    """Sizes and tokens of a model. tokens: the special ones, with their ids. dtype: name of that
    of the weights. is_tied: whether the head is the embedding."""

    vocab_size: int
    num_mels: int
    d_model: int
    encoder: tuple[int, int, int]  # layers, heads, channels of the MLP
    decoder: tuple[int, int, int]
    num_frames: int  # positions of the encoder
    num_positions: int  # of the decoder
    dtype: str
    tokens: Mapping[str, int]
    is_tied: bool = True

    def config(self) -> dict[str, Any]:
        """Returns config.json."""
        end = self.tokens[END]
        parts: dict[str, int] = {}
        for side, sizes in (("encoder", self.encoder), ("decoder", self.decoder)):
            names = (f"{side}_layers", f"{side}_attention_heads", f"{side}_ffn_dim")
            parts.update(zip(names, sizes, strict=True))
        return {
            "model_type": "whisper",
            "architectures": ["WhisperForConditionalGeneration"],
            "vocab_size": self.vocab_size,
            "num_mel_bins": self.num_mels,
            "d_model": self.d_model,
            **parts,
            "max_source_positions": self.num_frames,
            "max_target_positions": self.num_positions,
            "activation_function": "gelu",
            "tie_word_embeddings": self.is_tied,
            "decoder_start_token_id": self.tokens["<|startoftranscript|>"],
            "bos_token_id": end,
            "eos_token_id": end,
            "pad_token_id": end,
            "dtype": self.dtype,
        }

    def generation(
        self, suppressed: Sequence[int] | None, first: Sequence[int] | None
    ) -> dict[str, Any]:
        """Returns generation_config.json. suppressed: tokens that are never written. first: those
        with which no answer begins."""
        end, start = self.tokens[END], self.tokens["<|startoftranscript|>"]
        values = {
            "suppress_tokens": list(suppressed or ()),
            "begin_suppress_tokens": list(first or ()),
            "is_multilingual": self.vocab_size >= MULTILINGUAL,
            "no_timestamps_token_id": self.tokens["<|notimestamps|>"],
            "max_initial_timestamp_index": LATEST,
            "decoder_start_token_id": start,
            "bos_token_id": end,
            "eos_token_id": end,
            "pad_token_id": end,
            "max_length": self.num_positions,
            "return_timestamps": False,
        }
        if "<|startofprev|>" in self.tokens:
            values["prev_sot_token_id"] = self.tokens["<|startofprev|>"]
        if self.vocab_size >= MULTILINGUAL:
            last = self.tokens["<|translate|>"]
            values["lang_to_id"] = {
                name: number for name, number in self.tokens.items() if start < number < last
            }
            values["task_to_id"] = {
                name: self.tokens[f"<|{name}|>"] for name in ("translate", "transcribe")
            }
        return values

    def preprocessor(self) -> dict[str, Any]:
        """Returns preprocessor_config.json, with the frames that all Whisper models hear."""
        return {
            "feature_extractor_type": "WhisperFeatureExtractor",
            "feature_size": self.num_mels,
            "sampling_rate": 16_000,
            "hop_length": 160,
            "n_fft": 400,
            "chunk_length": 2 * self.num_frames // 100,
            "padding_side": "right",
            "padding_value": 0.0,
            "return_attention_mask": False,
        }


def check_tokens(tokens: Mapping[str, int], file_name: str) -> None:
    """Raises CheckpointError for a vocabulary without the tokens that every Whisper model has, or
    in another order."""
    missing = [name for name in NEEDED if name not in tokens]
    if missing:
        raise CheckpointError(f"the vocabulary of {file_name} has no {', '.join(missing)}")
    places = [tokens[name] for name in NEEDED]
    if places[0] > places[1] or not places[1] < min(places[2:4]) < places[4]:
        raise CheckpointError(
            f"the special tokens of {file_name} have another order than in Whisper models"
        )
