"""Checks of plugins that are no models: parsers, processors, fetchers, observers, and a plugin as
a whole. `testing/` makes pytest classes of them, `plugins check` runs them."""
