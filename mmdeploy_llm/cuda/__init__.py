"""Triton kernels for CUDA: what torch has no single operation for.

triton is imported in this folder alone, and only when kernels are asked for; without it the plain
torch paths compute the same.
"""
