"""Weights and inputs that follow from a name: the formula of tests/support/hash_weights.h."""

import zlib

import numpy as np


def uniform(name, numel):
    """Float64 values in [-1, 1) that depend on the name and the index alone."""
    h = (np.arange(numel, dtype=np.uint64) * 0x9E3779B1 + zlib.crc32(name.encode())).astype(np.uint32)
    h ^= h >> 16
    h *= np.uint32(0x85EBCA6B)
    h ^= h >> 13
    h *= np.uint32(0xC2B2AE35)
    h ^= h >> 16
    return h.astype(np.float64) / 2.0**32 * 2 - 1
