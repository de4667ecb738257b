"""What the tests against transformers' model share."""

from __future__ import annotations

import torch

from model import HybridModel, ModelConfig
from model.hf import from_nemotron_h


def randomized(config: ModelConfig, seed: int = 3) -> HybridModel:
    """A model with no parameter at a special value, so that each one's place matters."""
    model = HybridModel(config, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise, alpha=0.1 if parameter.dim() == 1 else 0.05)
    return model


def assert_same_computation(model: HybridModel, theirs: torch.nn.Module) -> None:
    """Logits, loss and every gradient agree within 1e-4 in FP32."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, model.config.vocab_size, (2, 29), generator=generator)
    labels = tokens.roll(-1, 1)
    labels[:, -1] = -100
    seq_idx = torch.zeros(2, 29, dtype=torch.int32)
    loss_sum, num_valid = model.loss(tokens, labels, seq_idx)
    (loss_sum / num_valid).backward()
    output = theirs(tokens, labels=tokens, use_cache=False)
    output.loss.backward()
    torch.testing.assert_close(model.logits(tokens, seq_idx), output.logits, atol=1e-4, rtol=0)
    torch.testing.assert_close(loss_sum / num_valid, output.loss, atol=1e-4, rtol=0)
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    if model.config.tie_embeddings:
        gradients["model.embeddings.weight"] += gradients["lm_head.weight"]
        gradients["lm_head.weight"] = gradients["model.embeddings.weight"]
    for name, gradient in from_nemotron_h(gradients, model.config).items():
        torch.testing.assert_close(
            model.get_parameter(name).grad, gradient, atol=1e-4, rtol=0, msg=name
        )
