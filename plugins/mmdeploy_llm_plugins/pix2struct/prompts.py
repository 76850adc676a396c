"""How Pix2Struct reads a prompt: its text begins the answer, or is a question that is drawn above
the picture, where the checkpoint was trained so (is_vqa)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from mmdeploy_llm_processors.from_transformers.loading import load_image_processor
from transformers.models.pix2struct.image_processing_pil_pix2struct import (
    DEFAULT_FONT_PATH,
    render_text,
)

from mmdeploy_llm.errors import CheckpointError, PromptTooLongError, RequestError
from mmdeploy_llm.hooks import Checkpoint, EncoderPrompt, MediaInput
from mmdeploy_llm_plugins.encoder_decoder.patches import check_grid, grid
from mmdeploy_llm_plugins.encoder_decoder.prompts import MARKER, BegunByText, one_item, start_id

from .image import PATCHES, PICTURE, SOURCE, is_asked

FONT = "Arial.TTF"
MAX_QUESTION = 2000  # characters: a line of 80 is 40 pixels high


class Pix2StructPrompts(BegunByText):
    """Raises CheckpointError where nothing says how a decoder begins, and where questions are drawn
    and the folder has no font."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        config = checkpoint.config
        super().__init__(start_id(checkpoint, config, config.text_config))
        self._drawn = Questions(checkpoint) if is_asked(checkpoint) else None

    def divide(
        self,
        text: str | None,
        ids: Sequence[int],
        media: Sequence[MediaInput],
        encode: Callable[[str], list[int]],
    ) -> EncoderPrompt:
        """Returns the tokens with which the answer begins, and the picture."""
        if self._drawn is None:
            return super().divide(text, ids, media, encode)
        item = one_item(media, "image")
        question = "" if text is None else text.replace(MARKER, "").strip()
        if not question:
            raise RequestError(
                "this model reads its question in the picture, above which it is drawn: give the "
                "question as the text of the prompt"
            )
        return EncoderPrompt(ids=(self._start,), items=(self._drawn.asked(item, question),))


class Questions:
    """Draws questions above pictures, as transformers does."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._font = str(font_of(checkpoint.folder))
        self._most_patches: int = checkpoint.config.vision_config.seq_len
        self._checkpoint = checkpoint

    def asked(self, item: MediaInput, question: str) -> MediaInput:
        """Returns what the encoder reads of a picture with its question. item: its tokens are the
        most that it may have."""
        if len(question) > MAX_QUESTION:
            raise PromptTooLongError(
                f"the question has {len(question)} characters, {MAX_QUESTION} can be drawn above a "
                "picture; shorten it"
            )
        fields = {"is_vqa": False, "max_patches": item.num_tokens}
        processor = load_image_processor(self._checkpoint, SOURCE, {}, fields=fields)
        key = blake2b(f"{item.key}\0{question}".encode(), digest_size=20).hexdigest()
        if PICTURE not in item.tensors:  # it is only counted
            assert item.size is not None, "of every picture that is counted"
            rows, columns = grid(processor.to_dict(), self._whole(item.size, question))
            return replace(item, num_tokens=rows * columns)
        whole = processor.render_header(_first(item), question, font_path=self._font)
        rows, columns = grid(processor.to_dict(), (whole.shape[2], whole.shape[1]))
        check_grid(rows, columns, self._most_patches)
        made = processor(images=[whole], input_data_format="channels_first", return_tensors="pt")
        return replace(
            item,
            tensors={PATCHES: made[PATCHES]},
            num_tokens=rows * columns,
            key=key if item.key else "",
            prompt_text=None,
        )

    def _whole(self, size: tuple[int, int], question: str) -> tuple[int, int]:
        """Returns the (width, height) of a picture below its question."""
        draw: Any = render_text
        header = draw(question, font_path=self._font)
        width = max(header.width, size[0])
        scaled = (int(one[1] * (width / one[0])) for one in (header.size, size))
        return width, sum(scaled)


def font_of(folder: Path) -> Path:
    """Returns the font in a checkpoint's folder. Raises CheckpointError without one."""
    found = sorted(path for path in folder.iterdir() if path.name.lower() == FONT.lower())
    if not found:
        raise CheckpointError(
            "the questions of this checkpoint are drawn above its pictures (is_vqa), for which its "
            f"folder needs the font {FONT}: transformers loads that of {DEFAULT_FONT_PATH} on "
            "Hugging Face"
        )
    return found[0]


def _first(item: MediaInput) -> Any:
    """Returns the picture with its channels first."""
    return np.moveaxis(item.tensors[PICTURE].numpy(), -1, 0)
