"""Renders chat templates, which are programs of strangers, within limits of time and memory.

Renderer --> a process that can be killed --> sandbox.py: jinja2's, as transformers sets it up
"""

from .renderer import Renderer, TemplateFailedError
from .sandbox import TemplateTimeError

__all__ = ["Renderer", "TemplateFailedError", "TemplateTimeError"]
