"""What the figures show; how they look is for eyes."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.curves import Branch, Curve
from pipeline.figures import (
    draw_all,
    draw_family,
    draw_loss,
    draw_quantization,
    draw_validation,
)

TOKENS = np.array([1e6, 2e6, 3e6])


def curve(*values: float) -> Curve:
    return Curve(TOKENS, np.array(values))


def test_a_run_without_numbers_has_no_figures() -> None:
    assert draw_all({}, {}) == {}


def test_phase_boundaries_stand_at_their_tokens_in_the_axis_unit() -> None:
    phases = [{"name": f"phase {i + 1}", "start_tokens": i * 1_500_000} for i in range(2)]
    figure = draw_loss({"train/loss": curve(5, 4, 3)}, {"train": {"phases": phases}})
    assert figure is not None
    (axes,) = figure.axes
    dashed = [line for line in axes.lines if line.get_linestyle() == "--"]
    assert [line.get_xdata()[0] for line in dashed] == [1.5]
    assert [text.get_text() for text in axes.texts] == ["phase 2"]
    assert axes.get_xlabel() == "tokens trained (millions)"


def test_validation_shows_each_domain_and_not_the_mean_of_all() -> None:
    figure = draw_validation(
        {
            "validation/loss_bf16": curve(4, 3, 2),
            "validation/code/loss_bf16": curve(5, 4, 3),
            "validation/code/loss_recipe": curve(5, 4, 3),
        },
        {},
    )
    assert figure is not None
    legend = figure.axes[0].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["code"]


def test_a_spike_does_not_flatten_the_loss() -> None:
    figure = draw_loss({"train/loss": Curve(np.arange(1.0, 301), spiked())}, {})
    assert figure is not None
    low, high = figure.axes[0].get_ylim()
    assert 2.5 < low < 3.0
    assert 5.0 < high < 6.0


def spiked() -> np.ndarray:
    values = np.linspace(5, 3, 300)
    values[150] = 500.0
    return values


@pytest.mark.parametrize(("panel", "stat"), [(0, "error"), (1, "flushed")])
def test_quantization_shows_the_median_linear_of_each_operand(panel: int, stat: str) -> None:
    curves = {
        f"quant/blocks.{i}.ffn.up/{role}/{stat}": curve(i, i, i)
        for i in range(3)
        for role in ("input", "weight")
    }
    figure = draw_quantization(curves, {})
    assert figure is not None
    lines = figure.axes[panel].lines
    assert [line.get_label() for line in lines] == ["input", "weight"]
    assert all(list(line.get_ydata()) == [1, 1, 1] for line in lines)


def test_a_child_s_curve_begins_at_the_fork_on_its_parent_s() -> None:
    changed = ("train.tokens (1 then, 2 now)",)
    children = Curve(np.array([2.5e6, 4e6]), np.array([3.8, 3.0]))
    branches = [
        Branch("parent", Curve(TOKENS, np.array([5.0, 4.0, 4.0]))),
        Branch("child", children, "parent", 20, 2_000_000, changed),
        Branch("untrained", None, "child", 40, 4_000_000),
    ]
    axes = draw_family(branches, "child").axes[0]
    lines = {line.get_label(): line for line in axes.lines}
    child = lines["child, from step 20: train.tokens (1 then, 2 now)"]
    assert child.get_xdata().tolist() == [2.0, 2.5, 4.0]
    stem = lines["parent"]
    assert stem.get_xdata().tolist() == [1.0, 2.0, 3.0]
    assert child.get_ydata()[0] == stem.get_ydata()[1]
    assert child.get_linewidth() > stem.get_linewidth()
    assert "untrained" not in "".join(map(str, lines))


def test_a_child_whose_parent_was_removed_begins_where_it_was_born() -> None:
    child = Branch("child", curve(4, 3, 2), "gone", 10, 500_000)
    axes = draw_family([child, Branch("other", curve(3, 2, 1), "child", 20, 2_000_000)], "x").axes[
        0
    ]
    assert axes.lines[0].get_xdata().tolist() == [1.0, 2.0, 3.0]
