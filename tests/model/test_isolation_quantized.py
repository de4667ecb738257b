"""With 4-bit linears the documents of a micro-batch share each tensor's scale, and nothing else.

A document is changed so that no tensor's largest magnitude changes: then the others keep every bit
of their outputs and gradients. Rounding bits are keyed by the element's index, and the Hadamard
transform runs along tokens only in the product that sums them anyway (Wgrad), so neither couples
documents. Where the largest magnitude does change, the others move, by the scale.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from model import HybridModel, ModelConfig, document_index
from quant import apply_recipe, named_recipe

Build = Callable[..., ModelConfig]
EOS = 0
CHANGED = 5  # the position whose token is replaced, in the first document
OUTLIER = 100  # a token whose norm's output has a larger amax than any other's


def quantized(config: ModelConfig) -> HybridModel:
    model = HybridModel(config)
    precision = apply_recipe(
        model, named_recipe("nvfp4_paper").with_blocks(0, 0), num_blocks=config.num_blocks, seed=3
    )
    with torch.no_grad():
        model.embedding.weight[OUTLIER] = torch.eye(config.hidden_size)[0]
    precision.begin(step=2, microbatch=1)
    return model


def observe(
    model: HybridModel, tokens: Tensor, seq_idx: Tensor
) -> tuple[list[float], list[Tensor]]:
    """The amax of all that a linear's quantizers see, and every token's output and gradient."""
    largest: list[float] = []

    def note(_: object, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        largest.append(inputs[0].abs().max().item())
        output.register_hook(lambda grad: largest.append(grad.abs().max().item()))

    names = [name for name, _ in model.named_modules() if name.endswith(LINEARS)]
    hooks = [model.get_submodule(name).register_forward_hook(note) for name in names]
    embedded: list[Tensor] = []
    hooks.append(model.embedding.register_forward_hook(lambda *call: embedded.append(call[2])))
    logits: list[Tensor] = []
    hooks.append(model.head.register_forward_hook(lambda *call: logits.append(call[2].detach())))
    labels = tokens.roll(-1, 1).where(seq_idx == seq_idx.roll(-1, 1), -100)
    loss, _ = model.loss(tokens, labels, seq_idx)
    (gradient,) = torch.autograd.grad(loss, embedded)
    for hook in hooks:
        hook.remove()
    assert len(largest) == 2 * len(names) > 0
    return largest, [logits[0].view(*tokens.shape, -1).clone(), gradient]


LINEARS = ("in_zxbc", "mamba.out", "qkv", "attention.o", "ffn.up", "ffn.down")


@pytest.mark.parametrize("pattern", ["-", "M", "*", "M-*"])
def test_documents_share_the_tensor_scale_and_nothing_else(
    small_config: Build, pattern: str
) -> None:
    config = small_config(
        pattern=pattern, hidden_size=64, ffn_hidden_size=96, mamba_head_dim=16, mamba_state_size=16
    )
    model = quantized(config)
    tokens = torch.randint(1, OUTLIER, (2, 40), generator=torch.Generator().manual_seed(1))
    tokens[0, 7] = EOS
    seq_idx = document_index(tokens, EOS)
    others = torch.ones_like(tokens, dtype=torch.bool)
    others[0, :8] = False
    amax, before = observe(model, tokens, seq_idx)

    def change(token: int) -> tuple[bool, bool]:
        """Whether every amax is kept, and every bit of the other documents, with another token."""
        changed = tokens.clone()
        changed[0, CHANGED] = token
        largest, after = observe(model, changed, seq_idx)
        pairs = zip(before, after, strict=True)
        return largest == amax, all(torch.equal(a[others], b[others]) for a, b in pairs)

    tried = [change(token) for token in range(1, 7) if token != tokens[0, CHANGED]]
    assert (True, True) in tried
    assert (True, False) not in tried
    assert change(OUTLIER) == (False, False)
