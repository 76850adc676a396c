"""The model: the standard decoder."""

from mmdeploy_llm.layers import CausalLM, standard_decoder
from mmdeploy_llm.weights.map import WeightMap


class AcmeForCausalLM(CausalLM):
    """Computes what transformers' SeedOssForCausalLM does without biases."""

    def __init__(self, config):
        super().__init__(standard_decoder(config))
        self._weights = WeightMap(self)

    def weight_targets(self, key):
        """See weights.map."""
        return self._weights.targets(key)
