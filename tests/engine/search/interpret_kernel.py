"""Run by test_gpu.py: the Triton kernel, interpreted, against plain torch in float64."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path.cwd()))

import numpy as np
import torch

from engine.search import gpu_kernel

rng = np.random.default_rng(0)
for n, widths in ((70, (3, 17)), (1, (16,)), (130, (40, 1))):
    codes = torch.from_numpy(rng.integers(0, 256, (n, sum(widths)), dtype=np.uint8))
    scales = torch.from_numpy(rng.random((n, len(widths))).astype(np.float16))
    out, expected, first = torch.zeros(n, 16), torch.zeros(n, 16, dtype=torch.float64), 0
    for b, n_bytes in enumerate(widths):
        y = torch.zeros(8 * gpu_kernel.padded_bytes(n_bytes), 16, dtype=torch.float64)
        y[: 8 * n_bytes] = torch.from_numpy(rng.uniform(-1, 1, (8 * n_bytes, 16)))
        high, low = gpu_kernel.split(y)
        kept = high.double() + low.double()
        assert float((y - kept).abs().max()) < 2e-7
        gpu_kernel.add_block(codes, scales, b, first, n_bytes, high, low, kept.sum(0).float(), 0.5, out)
        bits = torch.from_numpy(np.unpackbits(codes[:, first : first + n_bytes].numpy(), axis=1, bitorder="little")).double()
        expected += 0.5 * scales[:, b : b + 1].double() * (2 * bits @ kept[: 8 * n_bytes] - kept.sum(0))
        first += n_bytes
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-4)
sys.stdout.write("exact\n")
