"""Prepares images and videos with the processors that transformers has for a model, on Pillow, PyAV
and torch alone. The plugin transformers_any provides them."""
