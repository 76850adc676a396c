"""How Parakeet reads a prompt: a sound, and nothing besides. "<|timestamps|>" asks for the frames
of each token as `CompletionOutput.attention`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mmdeploy_llm.errors import CheckpointError, RequestError
from mmdeploy_llm.hooks import Checkpoint, EncoderPrompt, MediaInput
from mmdeploy_llm_plugins.encoder_decoder.prompts import one_item, setting

MARKER, TIMES = "<|audio|>", "<|timestamps|>"
HEADS = ((0, 0), (0, 1))  # the frames at which a token begins and ends
GREEDY = (
    "this model hears one answer in a sound, the likeliest token at each frame; leave it out, or "
    "take a model that writes, such as Whisper"
)


def blank_of(checkpoint: Checkpoint) -> int:
    """Returns the token of frames that say none, with which answers end."""
    config = checkpoint.config
    return int(getattr(config, "blank_token_id", config.pad_token_id))


class ParakeetPrompts:
    """See hooks.EncoderPrompts. Raises CheckpointError for a decoder that begins with another token
    than that of frames that say none."""

    has_places = False

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._blank = blank_of(checkpoint)
        start = setting(checkpoint, checkpoint.config, "decoder_start_token_id")
        if start is not None and start != self._blank:
            raise CheckpointError(
                f"decoder_start_token_id is {start}, must be the blank token {self._blank}, with "
                "which decoders of this family begin"
            )

    def divide(
        self,
        text: str | None,
        ids: Sequence[int],
        media: Sequence[MediaInput],
        encode: Callable[[str], list[int]],
    ) -> EncoderPrompt:
        """Returns the token with which the answer begins, and the sound. Raises RequestError for
        any words."""
        item = one_item(media, "sound")
        words = "" if text is None else text.replace(MARKER, "").replace(TIMES, "").strip()
        if words or (text is None and tuple(ids) not in ((), (self._blank,))):
            raise RequestError(
                f"this model hears and reads no words, found {words or list(ids)!r:.60}; leave the "
                f"prompt empty, or {TIMES!r} for the frames of each token"
            )
        return EncoderPrompt(
            ids=(self._blank,),
            items=(item,),
            end_ids=(self._blank,),
            unguided=GREEDY,
            greedy=GREEDY,
            heads=HEADS if TIMES in (text or "") else (),
        )
