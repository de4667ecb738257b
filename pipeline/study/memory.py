"""Bytes that a training step keeps, by precision: measured on tensors, not computed.

Against the paper's "half of FP8": what autograd saves between forward and backward, and what a
checkpoint takes (which holds FP32 masters in every precision).
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from pipeline.config import Config
from pipeline.train.build import build_model, build_recipe
from quant import apply_recipe


def saved_bytes_per_token(config: Config) -> float:
    """Bytes that autograd holds after the forward of one micro-batch, parameters left out.

    The same storage counts once. Activation checkpointing is off, so that every operand shows.
    """
    train = dataclasses.replace(config.train, activation_checkpointing="none")
    config = dataclasses.replace(config, train=train)
    model = build_model(config, torch.device("cpu"))
    blocks = len(config.model.pattern)
    apply_recipe(model, build_recipe(config), num_blocks=blocks, seed=config.seed)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, int] = {}
    kept: list[Tensor] = []  # or a freed storage's address would be given to the next

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    shape = (config.train.micro_batch, config.train.sequence_length)
    tokens = torch.zeros(shape, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model.loss(tokens, tokens, torch.zeros(shape, dtype=torch.int32))
    del loss
    return sum(storages.values()) / tokens.numel()
