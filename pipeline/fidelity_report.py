"""What `compare fidelity` concludes and prints, from its result alone.

Each verdict is computed from the measured numbers, and says so where a claim does not hold.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

GEMMS = {"fprop": "Fprop", "dgrad": "Dgrad", "wgrad": "Wgrad"}
ORDER = ("fp8_block", "nvfp4_paper", "mxfp4")  # error rises in this order
RHT = ("no_rht", "nvfp4_paper")  # without and with the transform
SCALES = ("no_2d", "nvfp4_paper")  # without and with a weight's two-dimensional scales
MOST_LINEARS = 20  # rows of a table; the files hold all
OUTLIERS = 10.0  # kurtosis from which a linear's operands count as having outliers; Gaussian: 3
TOLERANCE = 0.05  # between the bias over draws and what the rounding rule predicts

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Verdict:
    """A claim, whether the numbers bear it out (None: not measured), and the numbers."""

    claim: str
    holds: bool | None
    evidence: str


def rms(values: Iterable[float]) -> float:
    """Root mean square; 0 of nothing."""
    squares = [value**2 for value in values]
    return math.sqrt(sum(squares) / max(len(squares), 1))


def verdicts(result: Result) -> list[Verdict]:
    """All claims about the recipe, in the order in which they are printed."""
    return [
        _formats_in_order(result),
        _rht_lowers_error(result),
        _rht_flushes_less(result),
        _sr_is_unbiased(result),
        _one_weight(result),
        _bf16_blocks_are_worst(result),
    ]


def _formats_in_order(result: Result) -> Verdict:
    claim = "error FP8 < NVFP4 < MXFP4 in every GEMM of every linear"
    if not set(ORDER) <= result["recipes"].keys():
        return Verdict(claim, None, f"needs the recipes {', '.join(ORDER)}")
    counts = {}
    linears = result["linears"].values()
    for gemm in GEMMS:
        errors = [[each["gemms"][r][gemm]["relative_error"] for r in ORDER] for each in linears]
        counts[gemm] = sum(a < b < c for a, b, c in errors)
    evidence = ", ".join(f"{GEMMS[gemm]} {n} of {len(linears)}" for gemm, n in counts.items())
    return Verdict(claim, all(n == len(linears) for n in counts.values()), evidence)


def has_outliers(linear: Mapping[str, Any]) -> bool:
    """Whether one of Wgrad's operands has outliers along the tokens."""
    return max(linear["kurtosis"].values()) >= OUTLIERS


def _rht_lowers_error(result: Result) -> Verdict:
    claim = "RHT lowers Wgrad's error where there are outliers"
    pairs = [
        [each["gemms"][label]["wgrad"]["relative_error"] for label in RHT]
        for each in _with_outliers(result)
    ]
    return _lower_with_rht(claim, pairs, "linears")


def _rht_flushes_less(result: Result) -> Verdict:
    claim = "RHT flushes less of Wgrad's operands to zero where there are outliers"
    pairs = [
        [each["flushed"][label][operand] for label in RHT]
        for each in _with_outliers(result)
        for operand, value in each["kurtosis"].items()
        if value >= OUTLIERS
    ]
    return _lower_with_rht(claim, pairs, "operands")


def _with_outliers(result: Result) -> list[Mapping[str, Any]]:
    """The linears, if measured with and without RHT, where an operand of Wgrad has outliers."""
    if not set(RHT) <= result["recipes"].keys():
        return []
    linears = result["linears"].values()
    return [each for each in linears if max(each["kurtosis"].values()) >= OUTLIERS]


def _lower_with_rht(claim: str, pairs: Sequence[Sequence[float]], things: str) -> Verdict:
    if not pairs:
        needed = f"needs the recipes {', '.join(RHT)} and a kurtosis of {OUTLIERS:g}"
        return Verdict(claim, None, needed)
    lower = sum(after < before for before, after in pairs)
    before, after = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
    evidence = f"lower in {lower} of {len(pairs)} {things}; mean {before:.2%} without, {after:.2%}"
    return Verdict(claim, lower == len(pairs), f"{evidence} with")


def _sr_is_unbiased(result: Result) -> Verdict:
    nearest, drawn = result["rounding"]["nearest"], result["rounding"]["stochastic"]
    pairs = zip(drawn["bias"], drawn["predicted"], strict=True)
    as_predicted = all(abs(bias - rule) <= TOLERANCE * rule for bias, rule in pairs)
    less_bias = drawn["bias"][-1] < nearest["bias"][-1]
    more_error = drawn["error"] > nearest["error"]
    series = ", ".join(map(_percent, drawn["bias"]))
    return Verdict(
        "SR: bias falls as 1/sqrt(draws) to its floor, at more variance than RNE",
        as_predicted and less_bias and more_error,
        f"bias {series} after {_listed(drawn['draws'])} draws, floor {drawn['floor']:.2%}, RNE "
        f"{nearest['bias'][-1]:.2%}; error of one draw {drawn['error']:.2%}, RNE "
        f"{nearest['error']:.2%}",
    )


def _one_weight(result: Result) -> Verdict:
    linears = result["linears"].values()
    without, with_2d = ([each["weight_mismatch"][label] for each in linears] for label in SCALES)
    equal = sum(value == 0 for value in with_2d)
    return Verdict(
        "2D scales: forward and backward multiply one weight",
        equal == len(linears) and all(value > 0 for value in without),
        f"equal bit for bit in {equal} of {len(linears)} linears; without, the two are "
        f"{rms(without):.1%} of the weight's norm apart",
    )


def _bf16_blocks_are_worst(result: Result) -> Verdict:
    claim = "the BF16 blocks are those whose quantization errs most"
    kept = {each["block"] for each in result["blocks"] if each["bf16"]}
    if not kept:
        return Verdict(claim, None, "needs the recipe all_layers and a run with BF16 blocks")

    def worst(key: str) -> list[int]:
        ranked = sorted(result["blocks"], key=lambda each: -each[key])
        return [each["block"] for each in ranked[: len(kept)]]

    alone, local = worst("alone"), worst("wgrad")
    return Verdict(
        claim,
        set(alone) == kept,
        f"BF16: {_listed(sorted(kept))}; largest error of the whole gradient, alone: "
        f"{_listed(alone)}; largest Wgrad error: {_listed(local)}",
    )


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def lines(result: Result) -> list[str]:
    """The tables and verdicts, at most 80 columns wide."""
    return [
        f"step {result['step']} of {result['run']}",
        f"micro-batches: {result['num_batches']}, held-out tokens: {result['tokens']:,}",
        "",
        "Relative error against BF16. Fprop, Dgrad, Wgrad: each linear alone, root mean",
        f"square over {len(result['linears'])}. Gradient: a whole backward pass, the run's BF16 "
        "blocks kept.",
        *_recipe_table(result),
        "",
        "The RHT, and outliers along the tokens (kurtosis of x and dy; Gaussian: 3)",
        *_rht_table(result),
        "",
        "Rounding dy to NVFP4: error of one draw, and of the mean of N draws",
        *_rounding_table(result),
        *_block_lines(result),
        "",
        *(line for verdict in result["verdicts"] for line in _verdict_lines(verdict)),
    ]


def _recipe_table(result: Result) -> list[str]:
    rows = [["recipe", *GEMMS.values(), "gradient", "cosine"]]
    for label, each in result["recipes"].items():
        errors = [each[gemm] for gemm in GEMMS] + [each["gradient"]["relative_error"]]
        rows.append([label, *map(_percent, errors), f"{each['gradient']['cosine']:.5f}"])
    return _table(rows)


def _rht_table(result: Result) -> list[str]:
    if not set(RHT) <= result["recipes"].keys():
        return [f"  (needs the recipes {', '.join(RHT)})"]
    linears = sorted(result["linears"].items(), key=lambda item: -max(item[1]["kurtosis"].values()))
    rows = [["linear", "x", "dy", "Wgrad without", "with", "flushed without", "with"]]
    for name, each in linears[:MOST_LINEARS]:
        wgrad = [each["gemms"][label]["wgrad"]["relative_error"] for label in RHT]
        flushed = [max(each["flushed"][label].values()) for label in RHT]
        outliers = [f"{value:.1f}" for value in each["kurtosis"].values()]
        rows.append([name.removeprefix("blocks."), *outliers, *map(_percent, [*wgrad, *flushed])])
    return _table(rows)


def _rounding_table(result: Result) -> list[str]:
    draws = result["rounding"]["stochastic"]["draws"]
    rows = [["rounding", "one draw", *(f"N={n}" for n in draws), "floor", "slope"]]
    for label, each in result["rounding"].items():
        # What draws nothing is as far off after any number.
        bias = each["bias"] if each["draws"] == draws else each["bias"] * len(draws)
        numbers = [each["error"], *bias, each["floor"]]
        rows.append([label, *map(_percent, numbers), f"{each['slope']:+.2%}"])
    return _table(rows)


def _block_lines(result: Result) -> list[str]:
    if not result["blocks"]:
        return []
    rows = [["block", "kind", *GEMMS.values(), "gradient", "alone", "in BF16"]]
    for each in result["blocks"]:
        errors = [each[key] for key in (*GEMMS, "gradient", "alone")]
        mark = "yes" if each["bf16"] else ""
        rows.append([str(each["block"]), each["kind"], *map(_percent, errors), mark])
    return [
        "",
        "Blocks under all_layers: their GEMMs, their part of the gradient; and alone: the",
        "error of the whole gradient with only that block in NVFP4",
        *_table(rows),
    ]


def _verdict_lines(verdict: Mapping[str, Any]) -> list[str]:
    word = {True: "holds", False: "DOES NOT HOLD", None: "not measured"}[verdict["holds"]]
    evidence = textwrap.wrap(verdict["evidence"], 76)
    return [*textwrap.wrap(f"{word}: {verdict['claim']}", 80), *(f"    {e}" for e in evidence)]


def _percent(value: float) -> str:
    return f"{value:.2%}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns aligned: the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
