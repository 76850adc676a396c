"""Packs random integers as the formats of quantised checkpoints do, one value at a time, so that
nothing is shared with the code that unpacks them."""

from __future__ import annotations

import torch

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # the outputs of a word, lowest bits first


def words_of(codes, num_bits):
    """Packs codes [r, c] into int32 [r, c * num_bits / 32]."""
    per_word = 32 // num_bits
    rows = []
    for row in codes.tolist():
        words = []
        for start in range(0, len(row), per_word):
            word = sum(code << num_bits * i for i, code in enumerate(row[start : start + per_word]))
            words.append(word - 2**32 if word >= 2**31 else word)
        rows.append(words)
    return torch.tensor(rows, dtype=torch.int32)


def grouped(codes, zeros, scales, group_of):
    """Dequantises codes [n, k] with zeros and scales [n, G] of the group of each column [k]."""
    return (codes - zeros[:, group_of]).to(scales.dtype) * scales[:, group_of]


def awq_tensors(name, codes, zeros, scales):
    """Returns the tensors of a layer as AutoAWQ stores them."""

    def packed(values):
        return words_of(values.T.reshape(values.shape[1], -1, 8)[..., AWQ_ORDER].flatten(1), 4)

    return {
        f"{name}.qweight": packed(codes),
        f"{name}.qzeros": packed(zeros),
        f"{name}.scales": scales.T,
    }


def gptq_tensors(name, codes, zeros, scales, group_of, *, num_bits=4, version="gptq"):
    """Returns the tensors of a layer as GPTQ stores them."""
    return {
        f"{name}.qweight": words_of(codes, num_bits).T,
        f"{name}.qzeros": words_of((zeros - int(version == "gptq")).T, num_bits),
        f"{name}.scales": scales.T,
        f"{name}.g_idx": group_of.int(),
    }


def random_codes(n, k, size, generator, num_bits=4):
    """Returns codes, zeros and scales of a random matrix with groups of `size` columns, whose
    values are as large as those of weights."""
    codes = torch.randint(0, 2**num_bits, (n, k), generator=generator)
    zeros = torch.randint(1, 2**num_bits, (n, k // size), generator=generator)
    scales = torch.rand(n, k // size, generator=generator) * 2 / (2**num_bits * k**0.5)
    return codes, zeros, scales.half()
