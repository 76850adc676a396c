"""Simulated machines for the tests of start-up."""

import pytest

from mmdeploy_llm.engine.startup.cards import Card, CudaSetup
from mmdeploy_llm.engine.startup.machine import Machine
from mmdeploy_llm.kernels import TORCH


@pytest.fixture
def machine():
    """Returns a machine with the given CPUs and cards, with CPUs pinned as cpu_affinity would."""

    def make(num_cpus=4, num_cards=0, placement=None, **others):
        card = Card(name="card", capability=(9, 0), total_bytes=1)
        cuda = CudaSetup(torch="2", cuda=None)
        if num_cards:
            cards = (card,) * num_cards
            cuda = CudaSetup(torch="2", cuda=(12, 8), architectures=("sm_90",), cards=cards)
        return Machine(
            cpus=tuple(range(num_cpus)),
            placement=placement,
            cuda=cuda,
            kernels=TORCH,
            **others,
        )

    return make
