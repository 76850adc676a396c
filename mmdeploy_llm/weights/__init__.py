"""Loads safetensors files into the parameters of a model: finds files, maps keys, reads values."""
