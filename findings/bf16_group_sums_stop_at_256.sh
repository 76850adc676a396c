#!/usr/bin/env bash
# Sums by group in PyTorch 2.13.0 on a CPU: 4,096 ones of bfloat16, all in one group. There are many
# functions for it, of which one picks what fits the shapes:
#
#     x.sum(0), one_hot @ x, embedding_bag("sum")               4096    right
#     scatter_add, scatter_reduce("sum"), and its "mean"        4096    right
#     index_add of rows                                         4096    right
#     index_add of a vector                                      256
#     index_put(accumulate=True), segment_reduce("sum")          256
#     segment_reduce("mean"), index_reduce("mean")                 0.06 instead of 1
#
# and the gradient that 4,096 uses of one row give that row:
#
#     index_select, gather, take_along_dim, expand              4096    right
#     weight[index], torch.nn.functional.embedding               256
#
# The wrong ones add in bfloat16, one after the other: 256 + 1 is rounded to 256 from there on. (In
# float16 it is 2048, in float32 all are right.) x.sum() adds in float32, so does scatter_add, hence
# one takes it for granted. The step is not the usual rounding of a percent: a mean pooling of 4,000
# tokens comes out at less than half its length, a frequent token's embedding gets a fraction of its
# gradient, and a change from weight.index_select(0, index) to weight[index] trains differently. Tests
# do not see it: they have a dozen rows, and up to 256 ones all is exact; nor does the cosine of pooled
# vectors, as their numbers shrink alike (here it is above 0.999 while the length falls to 0.43). Sum
# in float32: convert before, not after.
#
# Seen with Python 3.11, Linux x86-64, 2026-11-29. Needs Python 3.11 or newer and the package index.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.3.4
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch
import torch.nn.functional as F

NUM, WIDTH = 4096, 8
into = torch.zeros(NUM, dtype=torch.long)  # all in group 0
rows_into, lengths = into[:, None].expand(NUM, WIDTH), torch.tensor([NUM])


def sums(dtype):
    """Returns what each function makes of a sum of NUM ones, or of their mean times NUM."""
    rows, row = torch.ones(NUM, WIDTH, dtype=dtype), torch.zeros(1, WIDTH, dtype=dtype)
    index_reduce = row.index_reduce(0, into, rows, "mean", include_self=False)
    scatter_mean = row.scatter_reduce(0, rows_into, rows, "mean", include_self=False)
    made = {
        "sum": rows.sum(0),
        "matmul": torch.ones(1, NUM, dtype=dtype) @ rows,
        "embedding_bag": F.embedding_bag(torch.arange(NUM)[None], rows, mode="sum"),
        "scatter_add": row.scatter_add(0, rows_into, rows),
        "scatter_reduce sum": row.scatter_reduce(0, rows_into, rows, "sum"),
        "scatter_reduce mean": scatter_mean * NUM,
        "index_add of rows": row.index_add(0, into, rows),
        "index_add of a vector": row[:, 0].index_add(0, into, rows[:, 0]),
        "index_put": row.index_put((into,), rows, accumulate=True),
        "segment_reduce sum": torch.segment_reduce(rows, "sum", lengths=lengths, axis=0),
        "segment_reduce mean": torch.segment_reduce(rows, "mean", lengths=lengths, axis=0) * NUM,
        "index_reduce mean": index_reduce * NUM,
    }
    return {name: value.flatten()[0].item() for name, value in made.items()}


def gradients(dtype):
    """Returns the gradient of a row that is used NUM times."""
    uses = {
        "index_select": lambda weight: weight.index_select(0, into),
        "gather": lambda weight: weight.gather(0, rows_into),
        "take_along_dim": lambda weight: torch.take_along_dim(weight, into[:, None], 0),
        "expand": lambda weight: weight[:1].expand(NUM, WIDTH),
        "weight[index]": lambda weight: weight[into],
        "embedding": lambda weight: F.embedding(into, weight),
    }
    found = {}
    for name, use in uses.items():
        weight = torch.ones(4, WIDTH, dtype=dtype, requires_grad=True)
        use(weight).sum().backward()
        found[f"gradient of {name}"] = weight.grad[0, 0].item()
    return found


WRONG = {
    "index_add of a vector",
    "index_put",
    "segment_reduce sum",
    "segment_reduce mean",
    "index_reduce mean",
    "gradient of weight[index]",
    "gradient of embedding",
}
for dtype, most in ((torch.bfloat16, 256), (torch.float16, 2048), (torch.float32, NUM)):
    found = sums(dtype) | gradients(dtype)
    for name, value in found.items():
        print(f"{dtype}, {NUM} ones, {name:26s} {value:6.0f}")
        assert value == (most if name in WRONG else NUM), f"{name} has changed"

generator = torch.Generator().manual_seed(0)
states = (torch.randn(4000, 64, generator=generator) * 0.5 + 0.3).to(torch.bfloat16)
pooled = torch.segment_reduce(states, "mean", lengths=torch.tensor([4000]), axis=0)[0].float()
right = states.float().mean(0)
length, cosine = (pooled.norm() / right.norm()).item(), F.cosine_similarity(pooled, right, 0).item()
print(f"4,000 noisy rows, segment_reduce mean: {length:.2f} of the length, cosine {cosine:.4f}")
assert abs(length - 0.43) < 0.02 and cosine > 0.999
PYTHON
