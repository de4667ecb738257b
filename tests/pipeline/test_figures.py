"""What the figures show; how they look is for eyes."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.curves import Curve
from pipeline.figures import draw_all, draw_loss, draw_quantization, draw_validation

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
