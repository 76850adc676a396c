"""What each process may use of the machine."""

import pytest

from mmdeploy_llm import native
from mmdeploy_llm.config import EngineConfig
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.native import Placement
from mmdeploy_llm.runner.devices import CardFacts, CudaFacts
from mmdeploy_llm.runner.parts import engine_configs, rank_configs


def config(**options):
    return EngineConfig(model="m", **options)


def test_threads_are_divided():
    parts = rank_configs(config(device="cpu", num_threads=8, tensor_parallel_size=2))
    assert [part.num_threads for part in parts] == [4, 4]
    assert [part.device for part in parts] == ["cpu", "cpu"]
    parts = rank_configs(config(device="cpu", num_threads=1, tensor_parallel_size=2))
    assert [part.num_threads for part in parts] == [1, 1]


def test_chosen_cpus_are_divided(monkeypatch):
    def placed(affinity, node):
        return Placement(cpus=(0, 1, 2, 3, 4), pinned=(0, 1, 2, 3, 4), node=node, num_threads=5)

    monkeypatch.setattr(native, "choose_placement", placed)
    parts = engine_configs(config(device="cpu", cpu_affinity="auto", data_parallel_size=2))
    assert [part.cpu_affinity for part in parts] == [(0, 1), (2, 3)]
    assert [part.num_threads for part in parts] == [2, 2]
    with pytest.raises(ConfigError, match="gives 5 CPUs to 6 processes"):
        engine_configs(config(device="cpu", cpu_affinity="auto", data_parallel_size=6))


def test_cuda_devices_follow_each_other(monkeypatch):
    cards = (CardFacts(name="card", capability=(9, 0), total_bytes=1),) * 5
    facts = CudaFacts(torch="2", cuda=(12, 8), architectures=("sm_90",), cards=cards)
    monkeypatch.setattr("mmdeploy_llm.runner.parts.read_cuda", lambda: facts)
    asked = config(device="cuda:1", tensor_parallel_size=2, data_parallel_size=2)
    engines = engine_configs(asked)
    assert [engine.device for engine in engines] == ["cuda:1", "cuda:3"]
    assert [engine.data_parallel_size for engine in engines] == [1, 1]
    ranks = [rank for engine in engines for rank in rank_configs(engine)]
    assert [rank.device for rank in ranks] == ["cuda:1", "cuda:2", "cuda:3", "cuda:4"]
    # The first of each looks whether the others are there.
    assert [rank.tensor_parallel_size for rank in ranks] == [2, 1, 2, 1]
    assert all(rank.num_threads is None for rank in ranks)
    with pytest.raises(ConfigError, match="'cuda:3' and 2 more, but there is only cuda:0"):
        rank_configs(config(device="cuda:3", tensor_parallel_size=3))
    text = r"'cuda:1' and 5 more, .* or lower tensor_parallel_size or data_parallel_size"
    with pytest.raises(ConfigError, match=text):  # before a process is started for any of them
        engine_configs(config(device="cuda:1", tensor_parallel_size=2, data_parallel_size=3))


def test_engines_share_memory_and_intake_threads(monkeypatch):
    monkeypatch.setattr("mmdeploy_llm.runner.parts.available_memory", lambda device, share: 1000)
    monkeypatch.setattr(native, "usable_cpus", lambda: tuple(range(6)))
    parts = engine_configs(config(device="cpu", data_parallel_size=3))
    assert [part.kv_cache_memory for part in parts] == [333] * 3
    assert [part.num_intake_threads for part in parts] == [2] * 3
    (part, _) = engine_configs(config(device="cpu", kv_cache_memory=7, data_parallel_size=2))
    assert part.kv_cache_memory == 7
