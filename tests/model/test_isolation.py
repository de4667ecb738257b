"""No bit crosses a document boundary, in outputs or gradients, through any mixer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from model import HybridModel, ModelConfig, document_index

EOS = 0
Build = Callable[..., ModelConfig]


def packed(lengths: list[int], vocab_size: int, seed: int) -> Tensor:
    """Random documents of these lengths in a row, each ended by EOS."""
    generator = torch.Generator().manual_seed(seed)
    row = torch.randint(1, vocab_size, (sum(lengths),), generator=generator)
    row[torch.tensor(lengths).cumsum(0) - 1] = EOS
    return row


def outputs_and_gradients(
    model: HybridModel, tokens: Tensor, seq_idx: Tensor, watched: Tensor
) -> dict[str, Tensor]:
    """Logits of the watched tokens; gradients of their loss, of the loss of all at their inputs."""
    labels = tokens.roll(-1, 1).where(seq_idx == seq_idx.roll(-1, 1), -100)
    labels[:, -1] = -100
    embedded = []
    hook = model.embedding.register_forward_hook(lambda *call: embedded.append(call[2]))
    result = {"logits": model.logits(tokens, seq_idx).detach()[watched]}
    model.zero_grad()
    embedded.clear()
    loss, _ = model.loss(tokens, labels, seq_idx)
    (input_grad,) = torch.autograd.grad(loss, embedded, retain_graph=False)
    result["input gradient"] = input_grad[watched]
    loss, _ = model.loss(tokens, labels.where(watched, -100), seq_idx)
    loss.backward()
    hook.remove()
    for name, parameter in model.named_parameters():
        result[f"gradient of {name}"] = parameter.grad
    return result


PACKINGS = {
    "inside a chunk": [[3, 2, 19]],
    "on a chunk's edge": [[8, 8, 8]],
    "over several chunks": [[13, 11]],
    "one-token documents": [[1, 1, 1, 21]],
    "in a batch": [[13, 11], [5, 19], [24]],
}


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("pattern", ["M", "*", "M-M*-"])
@pytest.mark.parametrize("lengths", PACKINGS.values(), ids=PACKINGS.keys())
def test_perturbing_a_document_leaves_the_others_bits(
    small_config: Build, lengths: list[list[int]], pattern: str, checkpointing: str
) -> None:
    config = small_config(pattern=pattern, rope_theta=100.0)
    model = HybridModel(config, activation_checkpointing=checkpointing)  # type: ignore[arg-type]
    tokens = torch.stack([packed(row, 101, seed) for seed, row in enumerate(lengths)])
    seq_idx = document_index(tokens, EOS)
    for document in range(len(lengths[0])):
        perturbed = tokens.clone()
        changed = torch.zeros_like(tokens, dtype=torch.bool)
        changed[0] = seq_idx[0] == document
        inside = changed & (tokens != EOS)
        perturbed[inside] = (tokens[inside] + 50) % 100 + 1
        before = outputs_and_gradients(model, tokens, seq_idx, ~changed)
        after = outputs_and_gradients(model, perturbed, seq_idx, ~changed)
        for name, tensor in before.items():
            assert torch.equal(tensor, after[name]), (name, document)


def test_a_flattened_batch_equals_its_rows(small_config: Build) -> None:
    model = HybridModel(small_config())
    rows = torch.stack([packed([13, 11], 101, 0), packed([20, 4], 101, 1)])
    flat = rows.view(1, -1)
    logits = model.logits(rows, document_index(rows, EOS)).flatten(0, 1)
    flat_logits = model.logits(flat, document_index(flat, EOS))[0]
    torch.testing.assert_close(logits, flat_logits, atol=1e-5, rtol=1e-5)


def test_a_packed_document_equals_itself_alone(small_config: Build) -> None:
    model = HybridModel(small_config(rope_theta=100.0))
    row = packed([13, 11], 101, 0)[None]
    together = model.logits(row, document_index(row, EOS))[:, 13:]
    alone = model.logits(row[:, 13:], torch.zeros(1, 11, dtype=torch.int32))
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


def test_document_index_gives_eos_to_the_document_it_ends() -> None:
    tokens = torch.tensor([[5, EOS, 7, 8, EOS, 9], [EOS, EOS, 1, 1, 1, 1]])
    expected = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 2, 2, 2, 2]], dtype=torch.int32)
    assert torch.equal(document_index(tokens, EOS), expected)
    assert document_index(tokens, EOS).dtype == torch.int32


def test_seq_idx_of_another_type_is_refused(small_config: Build) -> None:
    tokens = torch.ones(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="document_index"):
        HybridModel(small_config()).logits(tokens, torch.zeros(1, 4))
