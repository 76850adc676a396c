"""Recorded kernel calls, compared with the same calls made one by one."""

import threading

import pytest
import torch

K, N = 24, 8


@pytest.fixture
def layer(kernels):
    """Maps x and residual [T, 24] to [T, 8] by kernels alone; slices of results are used."""
    torch.manual_seed(0)
    packed = kernels.pack_float(torch.randn(2 * K, K).bfloat16())
    rounded, scales = kernels.quantize_rows(torch.randn(N, K).bfloat16())
    packed_s8 = kernels.pack_s8(rounded)
    in_codes = kernels.pack(torch.randn(K, K).bfloat16(), "int4")
    columns = torch.randperm(K)
    weight, bias = torch.randn(2, K).bfloat16()
    cosines, sines = torch.rand(2, 9, 4)

    def run(x, residual):
        normed = kernels.rms_norm(x, weight, 1e-5, residual)
        mixed = in_codes.product(kernels.take_columns(normed, columns), weight)
        hidden = kernels.silu_mul(*kernels.linear_float(mixed, packed, 2 * K, None).chunk(2, -1))
        heads = hidden.view(len(x), -1, 8)
        kernels.rotate(heads, cosines[: len(x)], sines[: len(x)], is_interleaved=False)
        return kernels.linear_s8(heads.flatten(1), packed_s8, scales, bias[:N])

    return run


def some_inputs(num_rows):
    return torch.randn(num_rows, K).bfloat16(), torch.randn(num_rows, K).bfloat16()


def test_runs_as_the_function(kernels, layer):
    """The recording gives the same bits as the function, on later inputs and for several numbers of
    rows."""
    recordings = {}
    for num_rows in (1, 7):
        given = some_inputs(num_rows)
        out, recordings[num_rows] = kernels.record(layer, *given)
        assert torch.equal(out, layer(*given))
    for num_rows in (7, 1, 7, 1):
        given = some_inputs(num_rows)
        expected = layer(given[0], given[1].clone())
        assert torch.equal(recordings[num_rows].run(*given), expected)


def test_inputs_stay_as_they_are(kernels, layer):
    """The function adds to its residual; the caller's tensor must not change."""
    x, residual = some_inputs(3)
    before = residual.clone()
    _, recording = kernels.record(layer, x, residual)
    recording.run(x, residual)
    assert torch.equal(residual, before)


OPERATIONS = {
    "new values": lambda x: x + 1,
    "values written in place": lambda x: x.mul_(2),
    "a copy": lambda x: x.T.contiguous().T,
    "memory of its own": lambda x: torch.empty_like(x).copy_(x),
    "a number": lambda x: x[: 3 if x.sum().item() > 0 else len(x)],
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_operations_of_torch_are_noticed(kernels, layer, operation):
    def function(x, residual):
        return layer(operation(x), residual)

    given = some_inputs(3)
    out, recording = kernels.record(function, *given)
    assert recording is None
    assert torch.equal(out, function(*given))


def test_kernels_that_cannot_be_recorded_are_noticed(kernels):
    out, recording = kernels.record(lambda x: kernels.first_largest(x)[1], torch.randn(3, 9))
    assert recording is None
    assert out.shape == (3,)


def test_calls_of_other_threads_are_left_out(kernels, layer):
    """Media are prepared while the engine's thread records a step."""
    pixels, table = torch.zeros(4, 4, 3, dtype=torch.uint8), torch.ones(3, 256)
    patches = torch.zeros(4, 3, 1, 2, 2)

    def prepare():
        kernels.patchify(pixels, table, patches, patch_size=2, merge_size=1, frames=range(1))

    def function(x, residual):
        other = threading.Thread(target=prepare)
        other.start()
        other.join()
        return layer(x, residual)

    given = some_inputs(3)
    expected = layer(given[0], given[1].clone())
    out, recording = kernels.record(function, *given)
    assert patches.eq(1).all()
    assert torch.equal(out, expected)
    patches.zero_()
    assert recording is not None
    assert torch.equal(recording.run(*given), expected)
    assert patches.eq(0).all()


def test_kernels_work_on_after_an_error(kernels, layer):
    def function(x, residual):
        layer(x, residual)
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        kernels.record(function, *some_inputs(2))
    _, recording = kernels.record(layer, *some_inputs(2))
    assert recording is not None


def test_memory_of_results_in_use_is_not_given_away(kernels):
    """A slice of a result keeps its values while other results are computed."""
    weight = torch.ones(K).bfloat16()

    def function(x):
        held = kernels.rms_norm(x, weight, 1e-5)[:, : K // 2]
        for _ in range(4):
            x = kernels.rms_norm(x, weight, 1e-5)
        return kernels.silu_mul(held, x[:, K // 2 :])

    x, y = some_inputs(4)
    expected = function(y)
    _, recording = kernels.record(function, x)
    assert torch.equal(recording.run(y), expected)
