"""Checks of media processors, with the media that they are tried on and transformers' processors as
their reference."""
