"""Linear biases of positions (ALiBi): every backend that computes them equals plain dense
attention, with caches of few bits too; the others refuse them."""

from dataclasses import replace

import pytest
import torch

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.forward import Alibi
from mmdeploy_llm.layers.attention.native import NativeAttention
from mmdeploy_llm.layers.attention.reference import ReferenceAttention

HEADS, KV_HEADS = 6, 2
# In float32; rounded as Bloom in bf16 and Falcon do.
ROUNDED = {"factor": 0.125, "dtype": torch.bfloat16}


def alibi_of(**options):
    return Alibi(slopes=1.5 ** -torch.arange(1.0, HEADS + 1), **options)


@pytest.fixture(params=["reference", "native"])
def backend(request):
    if request.param == "reference":
        return ReferenceAttention()
    return NativeAttention(request.getfixturevalue("kernels"))


@pytest.mark.one_is_quick
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("own", [{}, ROUNDED])
@pytest.mark.parametrize("options", [{}, {"window": 6, "softcap": 2.0}])
def test_equals_dense_attention(cases, backend, dtype, own, options):
    for query_lens, earlier in cases.BATCHES:
        case = cases.Case(len(query_lens), query_lens, earlier, HEADS, KV_HEADS, dtype=dtype)
        case.check(backend, **options, alibi=alibi_of(**own))


@pytest.mark.one_is_quick
@pytest.mark.parametrize("cache_dtype", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_of_few_bits(cases, kernels, cache_dtype, dtype):
    options = {"window": 20, "alibi": alibi_of(**ROUNDED)}
    native = NativeAttention(kernels)
    cases.check_few_bits(native, cache_dtype, dtype, HEADS, KV_HEADS, **options)


def test_both_backends_agree_over_a_cache_of_4_bits(cases, backend):
    case = cases.Case(2, [1, 1, 9], [5, 64, 0], HEADS, KV_HEADS)
    case.check_int4(backend, alibi=alibi_of())


def test_a_backend_on_cuda_refuses_them(cases, triton_attention, triton_device):
    case = cases.Case(1, [1, 1], [5, 3], HEADS, KV_HEADS, device=triton_device)
    context = triton_attention.begin(cases.with_lengths(case.layout), case.cache)
    alibi = replace(alibi_of(), slopes=alibi_of().slopes.to(triton_device))
    with pytest.raises(ModelNotSupportedError, match=r"layer 0 has linear biases .*'reference'"):
        context.attend(0, case.q, case.k, case.v, alibi=alibi)
