"""ColQwen2: Qwen2-VL with a projection."""

from __future__ import annotations

from typing import Any

from mmdeploy_llm_plugins.qwen.vl import RENAMES, Qwen2VLForConditionalGeneration

from .late import LateInteraction

NAMES = ((r"^language_model\.(model\.)?", "model."), *RENAMES)


class ColQwen2ForRetrieval(LateInteraction, Qwen2VLForConditionalGeneration):
    """transformers' ColQwen2ForRetrieval, with the M-RoPE positions of its training, which that
    class leaves out where it is not given any."""

    def __init__(self, config: Any) -> None:
        Qwen2VLForConditionalGeneration.__init__(self, config.vlm_config)
        self.add_vectors(config, self.hidden_size, NAMES)
