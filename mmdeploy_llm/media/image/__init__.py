"""Decodes images: files within their limits, arrays and tensors, as upright RGB."""
