"""Opens what only reads media. It needs no model, no torch, and of the options only the limits."""

from __future__ import annotations

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import MediaLimits, PluginManager
from mmdeploy_llm.values.options.config import EngineConfig

from .kinds import ModelMedia
from .loader import MediaLoader


def open_reader(config: EngineConfig) -> MediaLoader:
    """Returns a loader that only reads media, within the same limits: it has no processors and
    needs no files of the model. Raises PluginError for plugins that are named and missing."""
    plugins = PluginManager.of(config)
    return MediaLoader(
        media=ModelMedia(),
        fetch=plugins.fetch_media,
        limits=media_limits(config),
        max_items={},
        guard=plugins.guard,
    )


def media_limits(config: EngineConfig) -> MediaLimits:
    """Returns the limits on one item that the options set."""
    root = config.allowed_media_root
    try:
        root = root.resolve() if root is not None else None
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a lone surrogate
        raise ConfigError(f"allowed_media_root {str(root)!r} is not a usable path") from error
    return MediaLimits(
        max_bytes=config.max_media_bytes,
        max_pixels=config.max_image_pixels,
        fetch_timeout=config.media_fetch_timeout,
        allowed_root=root,
        allow_urls=config.allow_media_urls or bool(config.allowed_media_domains),
        allowed_domains=config.allowed_media_domains,
        allow_private_addresses=config.allow_private_media_addresses,
        allowed_schemes=config.allowed_media_schemes,
        max_duration=config.max_video_seconds,
        max_frames=config.max_video_frames,
        pixels=config.pixels,
        isolation=config.media_isolation,
        decode_timeout=config.media_timeout,
        decode_memory=config.media_process_memory,
    )
