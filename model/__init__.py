"""Hybrid Mamba-Transformer language models in pure PyTorch."""

from model.config import ModelConfig
from model.counts import count_parameters, flops_per_token
from model.hybrid import HybridModel
from model.init import init_weights, materialize
from model.packing import document_index

__all__ = [
    "HybridModel",
    "ModelConfig",
    "count_parameters",
    "document_index",
    "flops_per_token",
    "init_weights",
    "materialize",
]
