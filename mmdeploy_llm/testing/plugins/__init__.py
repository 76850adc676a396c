"""Checks of plugins that are no models and no media processors: parsers, logits processors,
fetchers, observers, and a plugin as a whole."""
