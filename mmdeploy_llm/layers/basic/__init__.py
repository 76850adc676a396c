"""The smallest layers, of which `layers` builds decoders, experts and vision towers. Plugins import
them from mmdeploy_llm.layers."""
