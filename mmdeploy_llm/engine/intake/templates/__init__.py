"""Runs what strangers have programmed, chat templates and the expressions of tokenizers, within
limits of time and memory.

Renderer --> a process that can be killed --> sandbox.py: jinja2's, as transformers sets it up
Encoder  --> a process that can be killed --> the library tokenizers
"""

from .encoder import Encoder
from .renderer import Renderer, TemplateFailedError
from .sandbox import TemplateTimeError

__all__ = ["Encoder", "Renderer", "TemplateFailedError", "TemplateTimeError"]
