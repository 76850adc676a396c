from mmdeploy_llm.testing import ModelConformance, PluginConformance
from phi_long_llm import provide_models


class TestPlugin(PluginConformance):
    plugin = "phi_long_llm"


class TestModel(ModelConformance):
    spec = provide_models()[0]
