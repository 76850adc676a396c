"""A model that takes images and a plugin's own kind of media: each processor gets only its own
options."""

import sys
import types

import mmdeploy_llm_plugins.ernie
import mmdeploy_llm_processors.sources
import pytest
import torch

from mmdeploy_llm import ConfigError, EngineConfig
from mmdeploy_llm.engine.startup import media
from mmdeploy_llm.errors import MediaError, UnsupportedMediaError
from mmdeploy_llm.hooks import (
    MediaInput,
    MediaProcessor,
    MediaProcessorSpec,
    MediaSplitter,
    ModelSpec,
    PluginManager,
    SplitPart,
    hookimpl,
)
from mmdeploy_llm.messages import MediaItem

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
    monkeypatch.setattr(PluginManager, "load", lambda *names, **core: manager)
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


class Sounds(MediaProcessor):
    """Encodes a sound, a list of numbers, itself: each is a row of the model's width."""

    kind = "noise"
    token = "<|VIDEO_END|>"
    markers = ("<|noise|>",)
    width = 4

    def __init__(self, checkpoint, options):
        self.options = options

    def decode(self, source, limits):
        return source

    def process(self, item, options):
        rows = torch.ones(len(item), self.width) if self.width else None
        return MediaInput(kind="noise", tensors={}, num_tokens=len(item), key="k", embeds=rows)

    def count_tokens(self, item, options):
        return len(item)


class Leaflet(MediaSplitter):
    kind = "leaflet"
    markers = ("<|leaflet|>",)

    def __init__(self, checkpoint, options):
        self.options = options

    def split(self, source, options, limits):
        return [SplitPart(source=own) for own in source]


class Ring(Leaflet):
    kind = "ring"


class Needy(Leaflet):
    kind = "needy"

    def __init__(self, checkpoint, options):
        raise UnsupportedMediaError("a library is missing")


def spec(kind, made, **fields):
    fields = {"models": ("ERNIE4-5-vl_moe",), **fields}
    return MediaProcessorSpec(name=kind, kind=kind, factory=f"{__name__}:{made.__name__}", **fields)


@pytest.fixture
def serve(monkeypatch):
    """Returns specs -> the media of ERNIE, which another plugin serves."""

    def load(*specs, **options):
        class Added:
            @hookimpl
            def provide_media_processors(self):
                return specs

        manager = PluginManager()
        manager.register(mmdeploy_llm_plugins.ernie, "ernie")
        manager.register(Added(), "added")
        monkeypatch.setattr(PluginManager, "load", lambda *names, **others: manager)
        return media.open_media(EngineConfig(model="shapes-vl", **options))

    return load


def test_a_plugin_completes_a_kind_for_a_family_of_another(serve, monkeypatch):
    loader = serve(
        spec("noise", Sounds, part_text="<|noise|>", part_types=("input_noise",)),
        spec("leaflet", Leaflet, models=("*",), yields="image"),
        mm_processor_kwargs={"leaflet_dpi": 5, "noise_rate": 3},
    )
    assert loader.media.read == ("image", "video", "noise", "leaflet")
    assert loader.media.kind_of_part("input_noise") == "noise"
    assert loader.media.part_text("noise") == "<|noise|>"
    assert loader.media.processors["noise"].options == {"noise_rate": 3}
    assert loader.media.splitters["leaflet"].options == {"leaflet_dpi": 5}
    assert loader.media.owner("leaflet") == (
        "leaflet processor leaflet of plugin 'added' (registered in process)"
    )
    item = MediaItem(kind="noise", source=[1, 2], options={})
    (made,) = loader.load([item])
    assert made.embeds.shape == (2, 4)
    monkeypatch.setattr(Sounds, "width", 0)
    with pytest.raises(MediaError, match="without `embeds`, and the model encodes image, video"):
        loader.load([item])


def test_embeddings_of_a_processor_are_checked(serve, monkeypatch):
    loader = serve(spec("noise", Sounds))
    monkeypatch.setattr(
        Sounds,
        "process",
        lambda self, item, options: MediaInput(
            kind="noise", tensors={}, num_tokens=3, key="k", embeds=torch.ones(2, 4)
        ),
    )
    with pytest.raises(MediaError, match=r"must have the shape \[3, 4\] .* got \[2, 4\]"):
        loader.load([MediaItem(kind="noise", source=[1, 2], options={})])


def test_kinds_that_yield_nothing_the_model_reads_are_left_out(serve, caplog):
    caplog.set_level("INFO")
    loader = serve(
        spec("leaflet", Leaflet, yields="ring"),
        spec("ring", Ring, yields="leaflet"),
        spec("needy", Needy, yields="image"),
        spec("noise", Sounds, models=("*",)),  # a model of any family says itself what it takes
        spec("video", Sounds, models=("other",)),
    )
    assert loader.media.read == ("image", "video")
    assert "the model takes no needy: a library is missing" in caplog.text
    with pytest.raises(UnsupportedMediaError, match="a leaflet is split into items of kind ring"):
        loader.check([MediaItem(kind="leaflet", source=b"", options={})])
    for kind in ("noise", "needy"):
        with pytest.raises(UnsupportedMediaError, match=f"processes {kind} for this model"):
            loader.check([MediaItem(kind=kind, source=b"", options={})])


def test_a_limit_of_an_unknown_kind(serve):
    with pytest.raises(ConfigError, match="unknown kind 'imgae'; did you mean 'image'"):
        serve(limit_mm_per_prompt={"imgae": 5})
    serve(spec("noise", Sounds), limit_mm_per_prompt={"noise": 5})
