"""PluginChoice: the options of an engine that say which plugins it has, and which of them serve."""

from __future__ import annotations

from pydantic import Field

from .option_types import Choices, Names
from .params import FrozenParams


class PluginChoice(FrozenParams):
    """The plugins of an engine."""

    plugins: Names | None = Field(
        default=None, description="names of the only plugins to load; None: all that are installed"
    )
    blocked_plugins: Names = Field(default=(), description="names of plugins that are not loaded")
    use: Choices = Field(
        default={},
        description='which plugin serves what several could, such as {"AcmeForCausalLM": "acme"}: '
        "an architecture, parser, logits processor or kind of media",
    )
