from mmdeploy_llm.hooks import MediaLimits
from mmdeploy_llm.testing import MediaProcessorConformance, PluginConformance
from palette_llm import provide_media_processors


class TestPlugin(PluginConformance):
    plugin = "palette_llm"


class TestPalettes(MediaProcessorConformance):
    spec = provide_media_processors()[0]
    samples = {"file": b"255 0 0\n0 99 200\n", "list": [(1, 2, 3), (40, 50, 60)]}
    twins = {"last colours": (b"255 0 0\n0 99 200\n", b"255 0 0\n0 99 100\n")}
    corrupt = {"words": b"red green blue\n", "no text": b"\xff\xfe\x00", "empty": b""}
    too_large = {"colours": ([(1, 2, 3)] * 257, MediaLimits())}
    other_options = {"depth": 4}
