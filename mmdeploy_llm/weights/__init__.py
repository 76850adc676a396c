"""From a folder of safetensors files to the parameters of a model: find, map, load."""
