"""The pipeline's training step is the oracle's, on every path; and the comparison can tell."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from kernels import cpu
from model import HybridModel
from quant import Precision
from quant.backend import Backend
from quant.backend import backend as use_quantizers
from tests.oracle import step as step_module
from tests.oracle.codes import as_bytes, compare_codes, operand_bytes
from tests.oracle.compare import compare, same_bits, shown
from tests.oracle.linear import Rules
from tests.oracle.mutants import MUTANTS, StaleWeights
from tests.oracle.paths import FIRST_STEP, PATHS, Path, walk
from tests.oracle.step import MicroBatch, Passes, Step, run_step
from tests.oracle.witness import Witness
from tests.quant.toy_hybrid import one_linear, recorded_copies


@cache
def walked(path: Path) -> list[tuple[Step, Witness]]:
    if path.quantizers == "cpu" and not cpu.available():
        pytest.skip(f"no compiled CPU kernels: {cpu.reason()}")
    return walk(path)


def disagreements(step: Step, witness: Witness, rules: Rules | None = None) -> set[str]:
    """The kinds of values that disagree, codes included."""
    mismatches, passes = compare(step, witness, rules)
    return {m.what for m in mismatches + compare_codes(step, witness, passes)}


@pytest.mark.parametrize("name", PATHS)
def test_every_figure_of_two_steps_is_the_oracle_s(name: str) -> None:
    for step, witness in walked(PATHS[name]):
        assert witness.result is not None
        assert witness.result.taken
        mismatches, passes = compare(step, witness)
        assert not mismatches, shown(mismatches)
        wrong_codes = compare_codes(step, witness, passes)
        assert not wrong_codes, shown(wrong_codes)


# Paths that must not change a bit


@pytest.mark.parametrize(
    ("change", "repeats"),
    [
        ({"checkpointing": "full"}, True),
        ({"checkpointing": "selective"}, False),
        ({"quantizers": "reference"}, False),
        ({"quantizers": "cpu"}, False),
    ],
    ids=["full recompute", "selective recompute", "plain torch", "C++"],
)
def test_recompute_and_the_quantizers_implementation_change_no_bit(
    change: dict[str, Any], repeats: bool
) -> None:
    plain = walked(PATHS["the production recipe"])
    changed = walked(replace(PATHS["the production recipe"], **change))
    for (_, expected), (_, other) in zip(plain, changed, strict=True):
        assert other.result == expected.result
        assert (other.repeats > 0) == repeats
        for what in ("clipped", "weights_after"):
            for name, value in getattr(expected, what).items():
                assert same_bits(value, getattr(other, what)[name]).all(), name
        for place, call in expected.calls.items():
            assert all(same_bits(call[what], other.calls[place][what]).all() for what in call)


def test_the_layers_themselves_make_the_oracle_s_bytes() -> None:
    """Not only ``quantize``, asked again: the copies that passed through the layers."""
    with recorded_copies() as copies:
        step, witness = walk(Path(recipe="nvfp4", row_length=20))[1]
    seen = {
        (x_TC.contiguous().numpy().tobytes(), as_bytes(row), as_bytes(column))
        for x_TC, row, column in copies
    }
    compared = 0
    for (name, microbatch), record in compare(step, witness)[1].records.items():
        if step.formats[name].backward != "bf16":
            for what in ("x", "dy"):
                source = witness.calls[name, microbatch][what].tobytes()
                row, column = record.operands[what], record.operands[f"{what}_t"]
                assert (source, operand_bytes(row), operand_bytes(column)) in seen, (name, what)
                compared += 1
    assert compared == 4 * 2 * 2  # linears, micro-batches, x and dy


# Autocast, which decides nothing about a linear


@pytest.mark.parametrize("quantizers", ["auto", "reference"])
def test_autocast_changes_no_bit_of_a_linear(quantizers: Backend) -> None:
    def passes() -> list[torch.Tensor]:
        layer, precision = one_linear()
        precision.begin(step=3, microbatch=1)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(32, layer.in_features, generator=generator, requires_grad=True)
        y = layer(x)
        y.backward(torch.randn(y.shape, generator=generator))
        assert x.grad is not None
        assert layer.weight.grad is not None
        return [y.detach(), x.grad, layer.weight.grad]

    with use_quantizers(quantizers):
        plain = passes()
        with torch.autocast("cpu", torch.bfloat16):
            under_autocast = passes()
    for expected, tensor in zip(plain, under_autocast, strict=True):
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, expected)


def test_autocast_turned_off_changes_no_bit() -> None:
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        step, witness = walk(Path(modes=("recipe",)))[0]
    assert not disagreements(step, witness)


# The oracle alone


@pytest.mark.parametrize("recipe", ["nvfp4_paper", "nvfp4", "bf16"])
def test_the_oracle_left_to_itself_takes_nearly_the_same_step(recipe: str) -> None:
    """Measured, not derived: a sum on the other side of a BF16 tie moves all that follows."""
    for step, witness in walked(Path(recipe=recipe)):
        own, replayed = run_step(step), compare(step, witness)[1]
        assert witness.result is not None
        assert sum(own.losses) / own.num_valid == pytest.approx(witness.result.loss, rel=1e-4)
        assert own.grad_norm == pytest.approx(witness.result.grad_norm, rel=1e-2)
        assert np.mean(equal_codes(own, replayed)) > 0.98
        mine, theirs = (
            np.concatenate([(after[n] - w).ravel() for n, w in step.weights.items()])
            for after in (own.weights, witness.weights_after)
        )
        assert np.linalg.norm(mine - theirs) < 0.2 * np.linalg.norm(mine)


def equal_codes(a: Passes, b: Passes) -> list[float]:
    """The share of equal code bytes of each quantized operand; 1 where there is none."""
    shares = [1.0]
    for place, record in a.records.items():
        for name, operand in record.operands.items():
            if operand.codes is not None:
                shares.append(
                    float(np.mean(operand.codes == b.records[place].operands[name].codes))
                )
    return shares


# What the comparison notices


@pytest.mark.parametrize(
    ("rules", "expected"), MUTANTS, ids=[type(rules).__name__ for rules, _ in MUTANTS]
)
def test_a_wrong_rule_is_noticed_and_nothing_beside_it(rules: Rules, expected: set[str]) -> None:
    step, witness = walked(Path(row_length=20, micro_batches=(1,)))[0]
    assert disagreements(step, witness, rules) == expected


def test_quantized_weights_of_the_step_before_are_noticed() -> None:
    (before, _), (step, witness) = walked(Path())
    assert {"y", "dx", "codes of w", "codes of w_t"} == disagreements(
        step, witness, StaleWeights(before.weights)
    )


@pytest.mark.parametrize("invalidate", [True, False])
def test_weights_changed_unseen_within_a_step_need_their_cache_dropped(invalidate: bool) -> None:
    def change(model: HybridModel, precision: Precision) -> None:
        precision.begin(FIRST_STEP + 1, 0)
        tokens = torch.ones(1, 16, dtype=torch.int64)
        model.token_losses(tokens, tokens, torch.zeros(1, 16, dtype=torch.int32))
        for parameter in model.parameters():
            parameter.data.mul_(1.5)  # autograd's version counter stands still
        if invalidate:
            precision.invalidate()

    step, witness = walk(Path(between=change))[1]
    assert disagreements(step, witness) == (set() if invalidate else {"y", "dx"})


def without_a_label(micro_batch: MicroBatch) -> MicroBatch:
    labels = micro_batch.labels.clone()
    labels[torch.nonzero(labels != step_module.IGNORED, as_tuple=True)[0][0]] = step_module.IGNORED
    return replace(micro_batch, labels=labels)


WRONG_STEPS = {
    "a label less": lambda s: replace(
        s, micro_batches=[without_a_label(s.micro_batches[0]), *s.micro_batches[1:]]
    ),
    "documents that run together": lambda s: replace(
        s, micro_batches=[replace(m, seq_idx=m.seq_idx * 0) for m in s.micro_batches]
    ),
    "another number of BF16 blocks": lambda s: replace(
        s, formats={n: s.formats["head"] if "ffn" in n else f for n, f in s.formats.items()}
    ),
    "another learning rate": lambda s: replace(
        s, adamw=replace(s.adamw, learning_rate=s.adamw.learning_rate * 1.001)
    ),
    "no weight decay": lambda s: replace(s, adamw=replace(s.adamw, weight_decay=0.0)),
    "no clipping": lambda s: replace(s, clip_norm=100.0),
    "moments left out": lambda s: replace(s, moments=None),
}


@pytest.mark.parametrize(
    ("name", "expected"),
    list(
        zip(
            WRONG_STEPS,
            [
                {"dy", "loss", "num_valid"},
                {"x"},
                {"y"},
                {"weight"},
                {"weight"},
                {"clipped"},
                {"weight"},
            ],
            strict=True,
        )
    ),
)
def test_another_step_is_noticed(name: str, expected: set[str]) -> None:
    step, witness = walked(Path())[1]
    assert expected <= disagreements(WRONG_STEPS[name](step), witness)


def test_decay_of_the_convolution_s_filters_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    step, witness = walked(Path())[0]
    monkeypatch.setattr(step_module, "decays", lambda name, value: value.ndim == 2)
    mismatches, _ = compare(step, witness)
    assert {(m.what, m.where) for m in mismatches} == {("weight", "blocks.0.mamba.conv.weight")}
