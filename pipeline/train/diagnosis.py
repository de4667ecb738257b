"""What to look at where training gives up: the last step once more, with statistics on."""

from __future__ import annotations

from collections import Counter

import torch

from model import HybridModel
from pipeline.train.parallel import local
from pipeline.train.reduction import Reduction
from pipeline.train.step import MicroBatches, forward_backward
from quant import Precision

SHOWN = 3  # layers of each kind


def layers_at_fault(
    model: HybridModel,
    precision: Precision,
    micro_batches: MicroBatches,
    step: int,
    reduction: Reduction,
) -> str:
    """The layers with non-finite values, else those with the largest errors and gradients.

    Runs the step's forward and backward passes again, and no update. Every rank calls it.
    """
    precision.statistics.restart()
    forward_backward(model, precision, micro_batches, step, reduction)
    statistics = precision.statistics.collect()
    precision.nonfinite()
    reduction.finish()
    norms = {
        name: float(torch.linalg.vector_norm(local(parameter.grad)))
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad(set_to_none=True)
    counts = {name: value for name, value in statistics.items() if name.endswith("/nonfinite")}
    errors = {name: value for name, value in statistics.items() if name.endswith("/error")}
    bad_gradients = [name for name, norm in norms.items() if not norm < float("inf")]
    parts = [
        _largest("non-finite values", {n: v for n, v in counts.items() if v}),
        f"non-finite gradients: {', '.join(bad_gradients[:SHOWN])}" if bad_gradients else "",
        _largest("largest rounding errors", errors),
        _largest("largest gradients", norms) if not bad_gradients else "",
    ]
    return "; ".join(part for part in parts if part)


def source_mix(names: tuple[str, ...], micro_batches: MicroBatches) -> str:
    """How many rows of each source this rank's micro-batches hold."""
    rows = Counter(
        names[source]
        for index, batch in micro_batches
        if index is not None
        for source in batch.source_B.tolist()
    )
    return ", ".join(f"{count} rows of {name}" for name, count in rows.most_common())


def _largest(title: str, values: dict[str, float]) -> str:
    largest = sorted(values.items(), key=lambda item: -item[1])[:SHOWN]
    listed = ", ".join(f"{name.rsplit('/', 1)[0]} {value:.3g}" for name, value in largest)
    return f"{title}: {listed}" if listed else ""
