"""The options of an engine: what the user asked for, and what the engine runs with."""
