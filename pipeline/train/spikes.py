"""Which steps are outliers: the robust z-score of loss and gradient norm in a window of steps.

    z = (value - median) / sigma      sigma = 1.4826 * median absolute deviation

The median and its deviation are not moved by the outliers themselves. Only a value above the window
is a spike. Every finite value enters, also a skipped step's: where the level has truly changed, the
window follows. A new phase starts an empty window, since another blend has another loss.
"""

from __future__ import annotations

import math
import statistics

NORMAL = 1.4826  # of a normal distribution, the standard deviation over the MAD
LEAST_SHARE = 0.01  # sigma is at least this share of the median: a flat curve has no outliers
NAMES = ("loss", "gradient norm")


class SpikeWindow:
    """The last `size` finite (loss, gradient norm) pairs. `threshold` 0 finds no spikes.

    Nothing is judged before the window is half full.
    """

    def __init__(self, size: int, threshold: float) -> None:
        self.size, self.threshold = size, threshold
        self.values: list[tuple[float, float]] = []

    def judge(self, loss: float, grad_norm: float) -> str:
        """Why this step is an outlier, in words; empty where it is none."""
        if not self.threshold or len(self.values) < max(self.size // 2, 2):
            return ""
        for name, value, seen in zip(
            NAMES, (loss, grad_norm), zip(*self.values, strict=True), strict=True
        ):
            median = statistics.median(seen)
            mad = statistics.median(abs(other - median) for other in seen)
            sigma = max(NORMAL * mad, LEAST_SHARE * abs(median))
            if sigma and value - median > self.threshold * sigma:
                return (
                    f"{name} {value:.4g} lies {(value - median) / sigma:.1f} sigma above the "
                    f"median {median:.4g} of the last {len(seen)} steps"
                )
        return ""

    def add(self, loss: float, grad_norm: float) -> None:
        """Note a step; one that is not finite stays out."""
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.values = [*self.values, (loss, grad_norm)][-self.size :]

    def clear(self) -> None:
        self.values = []
