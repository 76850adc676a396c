"""The share of the machine that each of several processes may use."""

import pickle

import pytest

from mmdeploy_llm.engine.startup import shares
from mmdeploy_llm.engine.startup.options import warn_of_threads
from mmdeploy_llm.engine.startup.shares import engine_configs, rank_runtimes
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.kernels.cpu import NumaNode, Placement
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.values.options.runtime_config import (
    AttentionChoice,
    MachineLimits,
    ModelLimits,
    resolve,
)

LIMITS = ModelLimits(dtype="bfloat16", max_position_embeddings=4096, hidden_size=8)
CHOICE = AttentionChoice(name="reference", block_size=16)


def config(**options):
    return EngineConfig(model="m", **options)


def runtime(machine, **options):
    given = config(**options)
    host = MachineLimits(has_cuda=bool(machine.cuda.cards), num_cpus=4, num_threads=4)
    return resolve(given, LIMITS, host, lambda needs: CHOICE)


@pytest.mark.parametrize(("num_threads", "each"), [(8, 4), (1, 1)])
def test_threads_are_shared_out(machine, num_threads, each):
    one = machine()
    whole = runtime(one, device="cpu", num_threads=num_threads, tensor_parallel_size=2)
    ranks = rank_runtimes(whole, one)
    assert [rank.num_threads for rank in ranks] == [each, each]
    assert [rank.options.num_threads for rank in ranks] == [each, each]
    assert [rank.device for rank in ranks] == ["cpu", "cpu"]


def test_the_options_of_a_rank_can_be_sent_to_a_process(machine):
    one = machine()
    for rank in rank_runtimes(runtime(one, device="cpu", tensor_parallel_size=2), one):
        assert pickle.loads(pickle.dumps(rank)) == rank


def test_chosen_cpus_are_divided(machine):
    cpus = (0, 1, 2, 3, 4)
    one = machine(placement=Placement(cpus=cpus, pinned=cpus, node=None, num_threads=5))
    engines = engine_configs(config(device="cpu", cpu_affinity=cpus, data_parallel_size=2), one)
    assert [engine.cpu_affinity for engine in engines] == [(0, 1), (2, 3)]
    assert [engine.num_threads for engine in engines] == [2, 2]
    with pytest.raises(ConfigError, match="has 5 CPUs for 6 processes"):
        engine_configs(config(device="cpu", cpu_affinity=cpus, data_parallel_size=6), one)


def test_cuda_devices_are_numbered_in_order(machine):
    five = machine(num_cards=5)
    given = config(device="cuda:1", tensor_parallel_size=2, data_parallel_size=2)
    engines = engine_configs(given, five)
    assert [engine.device for engine in engines] == ["cuda:1", "cuda:3"]
    assert [engine.data_parallel_size for engine in engines] == [1, 1]
    whole = [
        runtime(five, device=engine.device, tensor_parallel_size=engine.tensor_parallel_size)
        for engine in engines
    ]
    ranks = [rank for one in whole for rank in rank_runtimes(one, five)]
    assert [rank.device for rank in ranks] == ["cuda:1", "cuda:2", "cuda:3", "cuda:4"]
    assert [rank.options.device for rank in ranks] == [rank.device for rank in ranks]
    assert all(rank.options.num_threads is None for rank in ranks)
    with pytest.raises(ConfigError, match="'cuda:3' and 2 more, but there is only cuda:0"):
        rank_runtimes(runtime(five, device="cuda:3", tensor_parallel_size=3), five)
    text = r"'cuda:1' and 5 more, .* or lower tensor_parallel_size or data_parallel_size"
    many = config(device="cuda:1", tensor_parallel_size=2, data_parallel_size=3)
    with pytest.raises(ConfigError, match=text):  # before a process is started for any of them
        engine_configs(many, five)


def test_engines_share_memory_and_intake_threads(machine, monkeypatch):
    monkeypatch.setattr(shares, "available_memory", lambda device, utilization: 1000)
    six = machine(num_cpus=6)
    engines = engine_configs(config(device="cpu", data_parallel_size=3), six)
    assert [engine.kv_cache_memory for engine in engines] == [333] * 3
    assert [engine.num_intake_threads for engine in engines] == [2] * 3
    given = config(device="cpu", kv_cache_memory=7, data_parallel_size=2)
    assert engine_configs(given, six)[0].kv_cache_memory == 7


def two_nodes(num_cores=4):
    return tuple(NumaNode(number=number, num_cores=num_cores) for number in (0, 2))


@pytest.mark.parametrize(
    ("count", "num_threads", "nodes"),
    [
        (2, None, [0, 2]),
        (4, None, [0, 0, 2, 2]),
        (3, None, [None] * 3),  # one node would have two
        (2, 8, [0, 2]),
        (2, 12, [None] * 2),  # more threads than a node has cores
    ],
)
def test_engines_are_placed_on_numa_nodes(machine, count, num_threads, nodes):
    one = machine(num_cpus=8, host_threads=8, nodes=two_nodes())
    given = config(device="cpu", data_parallel_size=count, num_threads=num_threads)
    assert [engine.numa_node for engine in engine_configs(given, one)] == nodes
    whole = runtime(one, device="cpu", num_threads=num_threads or 8, tensor_parallel_size=count)
    assert [rank.options.numa_node for rank in rank_runtimes(whole, one)] == nodes


def test_no_core_is_left_over(machine):
    one = machine(num_cpus=8, host_threads=8)
    engines = engine_configs(config(device="cpu", data_parallel_size=3), one)
    assert [engine.num_threads for engine in engines] == [3, 3, 2]
    more = engine_configs(config(device="cpu", data_parallel_size=9), one)
    assert [engine.num_threads for engine in more] == [1] * 9
    whole = runtime(one, device="cpu", num_threads=8, tensor_parallel_size=3)
    assert [rank.num_threads for rank in rank_runtimes(whole, one)] == [2] * 3  # they wait


def test_a_container_has_threads_for_its_share(machine, monkeypatch):
    """OMP_NUM_THREADS of a job script may be that of another machine."""
    many = machine(num_cpus=64, host_threads=48)
    assert (many.num_threads, many.num_cpus) == (48, 64)
    monkeypatch.setattr(
        "mmdeploy_llm.system.portable.cgroups.within_quota", lambda count: min(count, 2)
    )
    assert (many.num_threads, many.num_cpus, many.limits.num_cpus) == (2, 2, 2)
    assert machine(num_cpus=2, host_threads=8).num_threads == 2


def test_more_threads_than_cpus_are_told(machine, caplog):
    two = machine(num_cpus=2)
    warn_of_threads(runtime(two, device="cpu", num_threads=2), two)
    assert not caplog.records
    warn_of_threads(runtime(two, device="cpu", num_threads=8), two)
    assert "num_threads = 8 is slower than 2, the CPUs" in caplog.text
