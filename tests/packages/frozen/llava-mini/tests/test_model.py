from types import SimpleNamespace

from llava_mini_llm import provide_media_processors, provide_models
from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm.testing import MediaProcessorConformance, ModelConformance, PluginConformance


class TestPlugin(PluginConformance):
    plugin = "llava_mini_llm"


class TestModel(ModelConformance):
    spec = provide_models()[0]
    cases = {"text": (), "two images": ((1, 4, 4), (1, 4, 4))}


class TestImages(MediaProcessorConformance):
    spec = provide_media_processors()[0]
    other_options = {"resample": 0}

    @staticmethod
    def checkpoint(folder):
        vision = SimpleNamespace(image_size=56, patch_size=14)
        return Checkpoint(folder=folder, config=SimpleNamespace(vision_config=vision))
