"""Linear biases of positions (ALiBi): every backend that computes them equals plain dense
attention, on every level of the kernels and with every cache; the others refuse them."""

import pytest
import torch

from mmdeploy_llm.attention.native import NativeAttention
from mmdeploy_llm.attention.reference import ReferenceAttention
from mmdeploy_llm.forward import Alibi

HEADS, KV_HEADS = 6, 2
SIZES = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": 64, "block_size": 16}
# In float32; rounded as Bloom in bf16 and Falcon do.
ROUNDED = {"factor": 0.125, "dtype": torch.bfloat16}


def alibi_of(**options):
    return Alibi(slopes=1.5 ** -torch.arange(1.0, HEADS + 1), **options)


@pytest.fixture(params=["reference", "native"])
def backend(request):
    if request.param == "reference":
        return ReferenceAttention()
    return NativeAttention(request.getfixturevalue("kernels"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("own", [{}, ROUNDED])
@pytest.mark.parametrize("options", [{}, {"window": 6, "softcap": 2.0}])
def test_equals_dense_attention(cases, backend, dtype, own, options):
    for query_lens, earlier in cases.BATCHES:
        case = cases.Case(len(query_lens), query_lens, earlier, HEADS, KV_HEADS, dtype=dtype)
        case.check(backend, **options, alibi=alibi_of(**own))
