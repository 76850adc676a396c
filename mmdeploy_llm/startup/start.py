"""start: turns the options into a running engine. Called once for each engine; no option is decided
later."""

from __future__ import annotations

import logging

from mmdeploy_llm.config import EngineConfig

from .blueprint import draw_blueprint
from .computer import build_computer, build_ranks
from .host import Host
from .machine import read_machine
from .model_files import read_model_files
from .rooms import Assembly, build_rooms

logger = logging.getLogger(__name__)


def start(config: EngineConfig) -> Assembly:
    """Returns a running engine. Raises ConfigError, ModelError and PluginError, before the weights
    are read if the check is cheap."""
    files = read_model_files(config)
    machine = read_machine(config)
    blueprint = draw_blueprint(config, files, machine)
    if config.tensor_parallel_size > 1:
        computer = build_ranks(blueprint, files, machine)
    else:
        host = Host(blueprint.runtime, machine)
        try:
            computer = build_computer(blueprint, files, machine, host)
        except BaseException:
            host.close()
            raise
    facts = computer.facts
    logger.info(
        "total_block_num:%d, block size %d, %d cacheable tokens, %.1f MiB",
        facts.num_blocks,
        facts.shape.block_size,
        facts.num_blocks * facts.shape.block_size,
        facts.num_blocks * facts.shape.bytes_per_block / 2**20,
    )
    return build_rooms(blueprint, files, machine, computer)
