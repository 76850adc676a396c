"""The core engine: five calls a step, in engine.py, over the four rooms."""
