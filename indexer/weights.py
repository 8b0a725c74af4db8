"""A model's weights, hashed whole."""

from __future__ import annotations

import hashlib

import torch

from engine.model import LoadedModel
from engine.placement import tensors


def weights_hash(loaded: LoadedModel) -> str:
    """SHA-256 over names, shapes, dtypes and every value of the model's tensors, adapters included, in name order."""
    digest = hashlib.sha256()
    for name, tensor in tensors(loaded.model):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\0".encode())
        digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
