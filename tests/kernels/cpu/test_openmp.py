"""The number of torch's threads: the engine's while it computes, the program's otherwise."""

import contextlib
import os
import threading

import pytest
import torch

from mmdeploy_llm.kernels.cpu import THREAD_COUNT, own_choice
from mmdeploy_llm.kernels.cpu.openmp import end_pool, pool_number


@pytest.fixture(autouse=True)
def own_number():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def in_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def test_only_while_computing():
    with THREAD_COUNT.computing(2):
        assert torch.get_num_threads() == 2
        with contextlib.suppress(KeyError), THREAD_COUNT.computing(5):
            assert (torch.get_num_threads(), THREAD_COUNT.of_host) == (5, 5)
            raise KeyError
        assert torch.get_num_threads() == 2
    assert (torch.get_num_threads(), THREAD_COUNT.of_host) == (3, 3)
    assert in_thread(torch.get_num_threads) == 3


def test_a_new_thread_has_the_programs_number():
    """Also one that first computes while another engine does, whose number torch would tell it."""

    def compute():
        host = THREAD_COUNT.of_host
        with THREAD_COUNT.computing(2):
            inside = torch.get_num_threads()
        return host, inside, torch.get_num_threads()

    with THREAD_COUNT.computing(5):
        assert in_thread(compute) == (3, 2, 3)
    assert torch.get_num_threads() == 3


def test_what_the_program_chose():
    cpus = tuple(range(os.cpu_count()))
    assert own_choice(97, cpus) == 97
    with_smt = {len(cpus), torch.get_num_interop_threads()}
    assert None in {own_choice(number, cpus) for number in with_smt}


def test_a_pool_can_be_ended():
    torch.ones(1000, 1000).add_(1)
    before = pool_number()
    end_pool()
    assert pool_number() == before + 1
    assert in_thread(pool_number) == 0
    assert torch.ones(1000, 1000).add_(1).sum() == 2_000_000
