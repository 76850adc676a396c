"""The emulated card finds faults that tensors on the CPU do not show; each test makes one of
them."""

import pytest
import torch


@pytest.fixture
def faulty(triton_device, emulated, monkeypatch):
    """Returns a card whose faults the test checks itself."""
    if triton_device.type == "cuda":
        pytest.skip("there is a real one")
    with emulated(monkeypatch, total=2**20) as card:
        yield card


def test_tensors_report_their_device(faulty):
    x = torch.arange(6, device="cuda").view(2, 3)
    x[:, 1] = 7
    assert (str(x.device), x.is_cuda, x[0].is_cuda, x.cpu().is_cuda) == (
        "cuda:0",
        True,
        True,
        False,
    )
    assert (x + 1).tolist() == [[1, 8, 3], [4, 8, 6]]
    with pytest.raises(RuntimeError, match="found cuda:0 and cpu"):
        x + torch.ones(2, 3)
    assert len(faulty.faults) == 1


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x[0].item(),
        lambda x: x.tolist(),
        lambda x: x[x > 1],
        lambda x: x.nonzero(),
        lambda x: x[torch.tensor([0, 1])],
        lambda x: x.cpu(),
        lambda x: torch.tensor([1.0], device=x.device),
        lambda x: torch.ones(3).to(x.device, non_blocking=True),
        lambda x: torch.ones(3).pin_memory().to(x.device),
        lambda x: bool((x > 0).any()),
    ],
)
def test_waits(faulty, wait):
    x = torch.ones(3, device="cuda")
    assert not faulty.waits
    wait(x)
    assert faulty.waits


def test_operations_that_do_not_wait(faulty):
    x = torch.ones(3, device="cuda")
    index = torch.tensor([0, 2]).pin_memory().to("cuda", non_blocking=True)
    x[index] = 3.0
    x.masked_fill_(x > 2, 1.0).sum()
    assert not faulty.waits


def test_copies_to_the_host_arrive_when_they_are_waited_for(faulty):
    x, out = torch.ones(3, device="cuda"), torch.zeros(3, pin_memory=True)
    out.copy_(x, non_blocking=True)
    assert out.isnan().all()
    event = torch.cuda.Event()
    event.record()
    x.zero_()
    event.synchronize()
    assert out.tolist() == [1, 1, 1]


def test_a_buffer_that_is_written_while_it_is_copied(faulty):
    staged = torch.ones(3, pin_memory=True)
    staged.to("cuda", non_blocking=True)
    staged[0] = 2.0
    with pytest.raises(RuntimeError, match="pinned buffer"):
        torch.cuda.synchronize()


def test_streams_that_do_not_wait_for_each_other(faulty):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="may still be computing"):
        x + 1
    torch.cuda.current_stream().wait_stream(side)
    y = x + 1
    with pytest.raises(RuntimeError, match="given back"):
        x.memory.__del__()  # the side stream's allocator would reuse it
    x.record_stream(torch.cuda.current_stream())
    x.memory.__del__()
    assert y.tolist() == [2, 2, 2]
    faulty.allocated += 2 * x.memory.size


def test_graphs_keep_host_values_and_addresses_of_their_capture(faulty):
    x, out, count = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda"), 2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = x * count
        out.copy_(made)
    assert made.isnan().all()
    x.fill_(5)
    count = 3
    graph.replay()
    assert out.tolist() == made.tolist() == [10, 10, 10]
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(RuntimeError, match="capturing"):
        x.sum().item()


def test_memory_is_counted_and_ends(faulty):
    x = torch.ones(2**17, device="cuda")
    assert faulty.allocated == torch.cuda.memory_reserved() == 2**19
    view = x[5:]
    del x
    assert faulty.allocated == 2**19
    with pytest.raises(torch.OutOfMemoryError):
        torch.ones(2**18, device="cuda")
    del view
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info() == (2**20, 2**20)
    assert torch.empty(3, device="cuda").isnan().all()
