"""The formats of this plugin pass the kit, as a stranger's do."""

from importlib.util import find_spec

import pytest
from mmdeploy_llm_plugins.outputs import provide_output_sinks

from mmdeploy_llm.testing import OutputSinkConformance, PluginConformance

WEBDATASET, NPY, LANCE = provide_output_sinks()


class TestPlugin(PluginConformance):
    plugin = "mmdeploy_llm_plugins.outputs"


class TestWebDataset(OutputSinkConformance):
    spec = WEBDATASET


class TestNpy(OutputSinkConformance):
    spec = NPY


@pytest.mark.full
@pytest.mark.skipif(find_spec("lance") is None, reason="needs pylance: the extra 'lance'")
class TestLance(OutputSinkConformance):
    spec = LANCE
