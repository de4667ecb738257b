"""Measure how far recipes are from BF16 on a checkpoint's model: the numbers of `compare fidelity`.

The tensor arithmetic is `quant.fidelity`; here a model, micro-batches and recipes go in, and one
result of plain JSON types comes out.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from model import HybridModel
from model.config import BLOCK_KINDS
from pipeline.config import ConfigError
from pipeline.fidelity_report import RHT, SCALES, rms
from quant import LINEAR_RECIPES, Copy, Precision, Recipe, Role, RoundingKey, named_recipe
from quant.fidelity import (
    GEMM_NAMES,
    Captured,
    Distance,
    Products,
    capturing,
    gemm_distances,
    gemms,
    gradients,
    kurtosis,
    rounding_bias,
    true_gemms,
    under_recipe,
    weight_mismatch,
)
from quant.policy import linear_recipe
from quant.recipe import ALWAYS_BF16

Local = dict[str, dict[str, Distance]]  # by linear, then GEMM
ROUNDINGS = {  # whether stochastic, whether with the 16/17 guard
    "nearest": (False, False),
    "stochastic": (True, False),
    "stochastic, guard": (True, True),
}


@dataclass(frozen=True)
class Rows:
    """One micro-batch of held-out text, on the model's device."""

    tokens_BT: Tensor
    labels_BT: Tensor
    seq_idx_BT: Tensor


@dataclass(frozen=True)
class Subject:
    """A checkpoint's model, still of plain linears, and the micro-batches it is measured on."""

    model: HybridModel
    batches: Sequence[Rows]
    step: int
    seed: int
    bf16_ends: tuple[int, int]  # blocks that the run keeps in BF16, first and last

    @property
    def num_blocks(self) -> int:
        return len(self.model.config.pattern)

    @property
    def linears(self) -> list[str]:
        """Names, in the order that gives each linear the index of its rounding keys."""
        modules = self.model.named_modules()
        return [name for name, module in modules if isinstance(module, nn.Linear)]

    def under(self, recipe: Recipe) -> tuple[HybridModel, Precision]:
        """A copy of the model in a recipe. Raises `ConfigError` where its sizes do not fit."""
        try:
            model, precision = under_recipe(
                self.model, recipe, num_blocks=self.num_blocks, seed=self.seed
            )
        except ValueError as error:
            raise ConfigError(
                f"{recipe.name}: {error}; or leave it out of fidelity.recipes"
            ) from error
        assert isinstance(model, HybridModel)
        return model, precision

    def losses(self, model: HybridModel, precision: Precision) -> list[Callable[[], Tensor]]:
        """For each micro-batch its share of the mean loss, under the keys of this step."""
        num_valid = sum(int((rows.labels_BT >= 0).sum()) for rows in self.batches)

        def loss(index: int) -> Tensor:
            precision.begin(self.step, index)
            rows = self.batches[index]
            return model.loss(rows.tokens_BT, rows.labels_BT, rows.seq_idx_BT)[0] / num_valid

        return [lambda i=index: loss(i) for index in range(len(self.batches))]  # type: ignore[misc]


def measure(subject: Subject, recipes: Mapping[str, Recipe], num_draws: int) -> dict[str, Any]:
    """Everything about one checkpoint but the verdicts, as plain JSON types."""
    names = _quantized_linears(subject, recipes.values())
    captured, true_products, true = _bf16_pass(subject, names)
    local: dict[str, Local] = {}
    flushed: dict[str, dict[str, dict[str, float]]] = {}
    gradient: dict[str, dict[str, Distance]] = {}
    for label, recipe in recipes.items():
        local[label], counted = _local(subject, recipe, captured, true_products, label in RHT)
        flushed |= {label: counted} if counted else {}
        gradient[label] = _gradient_distances(subject, recipe, true)
    linears = {
        name: {
            **_describe(subject, name, captured[name]),
            "flushed": {label: counted[name] for label, counted in flushed.items()},
            "gemms": {
                label: {gemm: _plain(each[name][gemm]) for gemm in GEMM_NAMES}
                for label, each in local.items()
            },
        }
        for name in names
    }
    summary = {
        label: {
            **{gemm: rms(each[name][gemm].relative_error for name in names) for gemm in GEMM_NAMES},
            "gradient": _plain(_sum(gradient[label].values())),
        }
        for label, each in local.items()
    }
    return {
        "tokens": sum(len(each.x_TK) for each in captured[names[0]]),
        "num_batches": len(subject.batches),
        "recipes": summary,
        "linears": linears,
        "parameters": {
            name: {label: _plain(each[name]) for label, each in gradient.items()} for name in true
        },
        "rounding": _rounding(subject, captured, num_draws),
        "blocks": _blocks(subject, local["all_layers"], gradient["all_layers"], true)
        if "all_layers" in recipes
        else [],
    }


def _quantized_linears(subject: Subject, recipes: Iterable[Recipe]) -> list[str]:
    """The linears that some recipe would quantize if no block stayed in BF16."""
    free = [_no_bf16_blocks(recipe) for recipe in recipes]
    names = [
        name
        for name in subject.linears
        if any(linear_recipe(recipe, name, subject.num_blocks).quantized for recipe in free)
    ]
    if not names:
        raise ConfigError("fidelity.recipes: none of them quantizes anything; add one, as nvfp4")
    return names


def _no_bf16_blocks(recipe: Recipe) -> Recipe:
    return dataclasses.replace(recipe, first=0, last=0)


def _bf16_pass(
    subject: Subject, names: Sequence[str]
) -> tuple[dict[str, list[Captured]], dict[str, list[Products]], dict[str, Tensor]]:
    """For each linear and micro-batch its tensors and their products; and the true gradient."""
    model, precision = subject.under(named_recipe("bf16"))
    captured: dict[str, list[Captured]] = {name: [] for name in names}
    for loss in subject.losses(model, precision):
        with capturing(precision, names) as seen:
            loss().backward()
        for name in names:
            captured[name].append(seen[name])
    products = {
        name: [true_gemms(precision.layers[name], each) for each in captured[name]]
        for name in names
    }
    return captured, products, gradients(model)


def _describe(subject: Subject, name: str, captured: Sequence[Captured]) -> dict[str, Any]:
    """What is particular to a linear: its outliers, and how far apart its weight's copies are."""
    w_NK = subject.model.get_submodule(name).weight
    assert isinstance(w_NK, Tensor)
    return {
        "kurtosis": {
            "input": kurtosis(torch.cat([each.x_TK for each in captured])),
            "gradient": kurtosis(torch.cat([each.dy_TN for each in captured])),
        },
        "weight_mismatch": {
            label: weight_mismatch(w_NK, named_recipe(label).default) for label in SCALES
        },
    }


def _local(
    subject: Subject,
    recipe: Recipe,
    captured: Mapping[str, Sequence[Captured]],
    true: Mapping[str, Sequence[Products]],
    count_flushed: bool,
) -> tuple[Local, dict[str, dict[str, float]]]:
    """Each linear's distances by GEMM, over all micro-batches, no block kept in BF16.

    On request also the share of Wgrad's operands that is flushed to zero.
    """
    _, precision = subject.under(_no_bf16_blocks(recipe))
    if count_flushed:
        precision.statistics.request()
    parts: dict[str, list[dict[str, Distance]]] = {name: [] for name in captured}
    for index in range(len(subject.batches)):
        precision.begin(subject.step, index)
        for name, each in captured.items():
            found = gemms(precision.layers[name], each[index])
            parts[name].append(gemm_distances(found, true[name][index]))
    distances = {
        name: {gemm: _sum(part[gemm] for part in each) for gemm in GEMM_NAMES}
        for name, each in parts.items()
    }
    statistics = precision.statistics.collect()
    if not statistics:
        return distances, {}
    flushed = {
        name: {role: statistics[f"{name}/wgrad_{role}/flushed"] for role in ("input", "gradient")}
        for name in captured
    }
    return distances, flushed


def _gradient_distances(
    subject: Subject, recipe: Recipe, true: Mapping[str, Tensor]
) -> dict[str, Distance]:
    """Each parameter's gradient under a recipe against its gradient in BF16."""
    model, precision = subject.under(recipe)
    for loss in subject.losses(model, precision):
        loss().backward()
    found = gradients(model)
    return {name: Distance.between(found[name], true[name]) for name in true}


def _rounding(
    subject: Subject, captured: Mapping[str, Sequence[Captured]], num_draws: int
) -> dict[str, Any]:
    """Bias of each way to round dy to NVFP4, over many draws; root mean square over linears."""
    indices = {name: index for index, name in enumerate(subject.linears)}
    powers = [4**i for i in range(20) if 4**i < num_draws]
    result = {}
    for label, (stochastic, guard) in ROUNDINGS.items():
        counts = [*powers, num_draws] if stochastic else [1]
        found = []
        for name, each in captured.items():
            key = RoundingKey(subject.seed, subject.step, 0, indices[name], Role.GRADIENT, Copy.ROW)
            dy_TN = each[0].dy_TN
            if dy_TN.any():
                found.append(rounding_bias(dy_TN, counts, key if stochastic else None, guard=guard))
        result[label] = {
            "error": rms(each.error for each in found),
            "spread": rms(each.spread for each in found),
            "floor": rms(each.floor for each in found),
            "slope": sum(each.slope for each in found) / len(found),
            "draws": counts,
            "bias": [rms(each.bias[n] for each in found) for n in counts],
            "predicted": [rms(each.predicted(n) for each in found) for n in counts],
        }
    return result


def _blocks(
    subject: Subject,
    local: Local,
    gradient: Mapping[str, Distance],
    true: Mapping[str, Tensor],
) -> list[dict[str, Any]]:
    """Each block under `all_layers`, and what it does to the whole gradient quantized alone."""
    first, last = subject.bf16_ends
    blocks = []
    for index, char in enumerate(subject.model.config.pattern):
        prefix = f"blocks.{index}."
        linears = [each for name, each in local.items() if name.startswith(prefix)]
        own = [each for name, each in gradient.items() if name.startswith(prefix)]
        alone = _gradient_distances(subject, _only_block(index), true)
        blocks.append(
            {
                "block": index,
                "kind": BLOCK_KINDS[char],
                "bf16": index < first or index >= subject.num_blocks - last,
                **{gemm: rms(each[gemm].relative_error for each in linears) for gemm in GEMM_NAMES},
                "gradient": _sum(own).relative_error,
                "alone": _sum(alone.values()).relative_error,
            }
        )
    return blocks


def _only_block(index: int) -> Recipe:
    """NVFP4 in one block and BF16 elsewhere."""
    rules = (*ALWAYS_BF16, (f"blocks.{index}.*", LINEAR_RECIPES["nvfp4"]))
    return Recipe(f"block_{index}", LINEAR_RECIPES["bf16"], rules, first=0, last=0)


def _sum(distances: Iterable[Distance]) -> Distance:
    return functools.reduce(operator.add, distances)


def _plain(distance: Distance) -> dict[str, float]:
    return {"relative_error": distance.relative_error, "cosine": distance.cosine}
