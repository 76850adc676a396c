"""Renders chat templates, which are programs of strangers, within limits of time and memory.

    Renderer --simple.py: only operations of bounded cost?--> metered.py   in this process
                        otherwise, or when it is too much --> sandbox.py   in a process with limits

All of it follows jinja2's sandbox as transformers sets it up, so both places give the same text.
"""

from .renderer import Renderer, TemplateFailedError
from .sandbox import TemplateTimeError

__all__ = ["Renderer", "TemplateFailedError", "TemplateTimeError"]
