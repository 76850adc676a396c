"""Copies from the host to a device; on a CPU nothing is copied."""

import numpy as np
import torch

from mmdeploy_llm.layers.transfer import buffer_slices, pack, to_device, to_device_together

CPU = torch.device("cpu")


def test_packed_arrays_are_the_arrays():
    """One buffer and one copy hold arrays of any odd sizes."""
    arrays = (
        np.arange(5, dtype=np.int64) - 2,
        np.array([[True], [False], [True]]),
        np.arange(12, dtype=np.int32).reshape(3, 4).T,
        np.arange(3, dtype=np.int64).reshape(3, 1),
    )
    packed = pack(arrays, CPU)
    for array, tensor in zip(arrays, packed, strict=True):
        assert tensor.numpy().dtype == array.dtype
        assert np.array_equal(tensor.numpy(), array)
    assert len({tensor.untyped_storage().data_ptr() for tensor in packed}) == 1


def test_on_the_cpu_nothing_is_copied():
    array = np.arange(4)
    (tensor,) = to_device_together([array], CPU)
    assert tensor.data_ptr() == array.ctypes.data


def test_what_is_on_the_device_is_not_copied():
    tensor, array = torch.arange(4), np.arange(4)
    assert to_device(tensor, CPU) is tensor
    assert to_device(array, CPU).data_ptr() == array.ctypes.data


def test_an_array_with_gaps_is_made_contiguous():
    array = np.arange(12).reshape(3, 4)[:, ::2]
    assert to_device(array, CPU).tolist() == array.tolist()


def test_slices_of_a_buffer_do_not_overlap_and_can_be_viewed():
    slices = buffer_slices([((3,), torch.bool), ((2, 2), torch.int64), ((0,), torch.int32)])
    assert [(own.offset, own.end) for own in slices] == [(0, 3), (16, 48), (48, 48)]
    buffer = torch.zeros(slices[-1].end, dtype=torch.uint8)
    slices[1].view(buffer).fill_(7)
    assert slices[0].view(buffer).tolist() == [False] * 3
    assert slices[1].view(buffer).tolist() == [[7, 7], [7, 7]]
