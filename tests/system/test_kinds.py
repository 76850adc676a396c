"""A model that takes images and a plugin's own kind of media: each processor gets only its own
options."""

import sys
import types

import mmdeploy_llm_plugins.ernie
import mmdeploy_llm_processors.sources
import pytest

from mmdeploy_llm import ConfigError, EngineConfig
from mmdeploy_llm.hooks import (
    MediaInput,
    MediaProcessor,
    MediaProcessorSpec,
    ModelSpec,
    PluginManager,
    hookimpl,
)
from mmdeploy_llm.messages import MediaItem
from mmdeploy_llm.startup import media

FAMILY = "ernie4_5_vl_moe"


class ChartProcessor(MediaProcessor):
    kind = "chart"
    token = "<|VIDEO_PLACEHOLDER|>"
    markers = ("<chart>",)

    def __init__(self, checkpoint, options):
        if set(options) - {"chart_size", "image_max_pixels"}:
            raise ConfigError(f"unknown: {sorted(options)}")
        self.size = options.get("chart_size", 1)

    def decode(self, source, limits):
        return source

    def process(self, item, options):
        return MediaInput(kind="chart", tensors={}, num_tokens=self.size, key="k")

    def count_tokens(self, item, options):
        return self.size


class Charts:
    @hookimpl
    def provide_models(self):
        name = "Ernie4_5_VLMoeForConditionalGeneration"
        return [
            ModelSpec(
                name=FAMILY,
                architectures=(name,),
                factory="json:loads",
                media=("image", "chart"),
                priority=1,  # rather than the plugin that also serves images of this family
            )
        ]

    @hookimpl
    def provide_media_processors(self):
        factory = "charts_in_process:ChartProcessor"
        return [MediaProcessorSpec(name="c", kind="chart", factory=factory, models=(FAMILY,))]


@pytest.fixture
def open_media(monkeypatch):
    manager = PluginManager()
    manager.register(mmdeploy_llm_plugins.ernie, "ernie")
    manager.register(mmdeploy_llm_processors.sources, "sources")
    manager.register(Charts(), "charts")
    monkeypatch.setattr(PluginManager, "load", lambda *names: manager)
    module = types.ModuleType("charts_in_process")
    module.ChartProcessor = ChartProcessor
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def open_(**options):
        return media.open_media(EngineConfig(model="shapes-vl", mm_processor_kwargs=options))

    return open_


def test_each_processor_gets_its_own(open_media):
    media = open_media(chart_size=5, image_max_pixels=224 * 224)
    (item,) = media.count([MediaItem(kind="chart", source=[1], options={})])
    assert item.num_tokens == 5
    assert media.media.read == ("image", "chart")


def test_an_option_of_nobody_is_refused(open_media):
    with pytest.raises(ConfigError, match="chartsize"):
        open_media(chartsize=5)
