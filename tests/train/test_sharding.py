"""FSDP2: whatever the mesh, the step of one process; codes gathered are values quantized."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from model import HybridModel, ModelConfig
from pipeline.config import ClusterConfig
from pipeline.data.stream import empty_batch
from pipeline.train.optim import build_optimizer
from pipeline.train.parallel import Rank
from pipeline.train.sharding import Sharding
from pipeline.train.step import MicroBatches, train_step
from pipeline.train.trainable import Trainable, assemble
from quant import apply_recipe, named_recipe
from quant.linear import _Call
from tests.train.ranks import run_on_ranks
from tests.train.test_step import batch, cut
from tests.train.tiny import configuration, with_train

pytestmark = pytest.mark.slow

# All quantized weights have multiples of 16 rows on each of two ranks, all but the up-projection
# on each of four too; 67 rows of vocabulary and two of dt are no multiples at all.
SHAPE = ModelConfig("M-*-", 67, 64, 160, 4, 2, 16, 2, 32, 32, 1, mamba_chunk_size=16)
STEPS, MICRO_BATCHES = 2, 3  # on two and four ranks, empty ones fill up


@dataclass(frozen=True)
class Case:
    """A way to take the same steps. shards: 0 is all ranks."""

    shards: int = 0
    codes: bool = True
    reproducible: bool = False
    mode: str = "recipe"
    checkpointing: Any = "none"
    scatter_each: bool = True
    dtype: torch.dtype = torch.bfloat16
    compiled: bool = False


CASES = {
    "codes": Case(),
    "values": Case(codes=False),
    "bf16_forward": Case(mode="bf16_forward"),
    "recomputed, scattered once": Case(checkpointing="full", scatter_each=False),
    "reproducible": Case(reproducible=True),
    "reproducible in rows of two": Case(reproducible=True, shards=2),
    "whole, reproducible": Case(reproducible=True, shards=1),
    "whole": Case(shards=1),
    "fp32": Case(dtype=torch.float32),
}


@dataclass
class Seen:
    """What a case left: first step's loss, norm and gradients; weights at the end; bytes gathered;
    every quantized operand of the first step by (linear, micro-batch, role)."""

    loss: float
    norm: float
    nonfinite: int
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    gathered: dict[str, int]
    operands: dict[tuple[str, int, str], Tensor]


def build(case: Case) -> Trainable:
    sharding = Sharding.over(case.shards, torch.device("cpu"))
    meta = contextlib.nullcontext() if sharding.mesh is None else torch.device("meta")
    with meta:
        model = HybridModel(SHAPE, case.dtype, case.checkpointing, seed=5)
    recipe = named_recipe("nvfp4_paper").with_blocks(0, 1)
    precision = apply_recipe(
        model, recipe, num_blocks=len(SHAPE.pattern), seed=0, weight_dtype=case.dtype
    )
    precision.mode = case.mode
    cluster = ClusterConfig(
        shard=case.shards, fp4_gather=case.codes, scatter_each_micro_batch=case.scatter_each
    )
    settings = {
        "reproducible": case.reproducible, "compile": case.compiled,
        "global_batch": 6, "micro_batch": 2,
    }  # fmt: skip
    config = replace(with_train(configuration(Path(), 2), **settings), cluster=cluster)
    return assemble(model, precision, sharding, config, torch.device("cpu"))


def steps_of(case: Case) -> Seen:
    trainable = build(case)
    model, seen = trainable.model, Seen(0, 0, 0, {}, {}, {}, {})
    optimizer = build_optimizer(model, configuration(Path(), 2).train)
    optimizer.register_step_post_hook(trainable.changed)
    finish = trainable.reduction.finish

    def finish_and_note() -> list[Tensor]:
        made = finish()
        if not seen.gradients:
            seen.gradients = {n: whole(p.grad) for n, p in model.named_parameters()}
        return made

    with mock.patch.object(trainable.reduction, "finish", finish_and_note):
        for step in range(STEPS):
            trainable.prepare()
            with noted_operands(seen) if step == 0 else contextlib.nullcontext():
                result = train_step(
                    model, trainable.precision, optimizer, share(step, case), step=step,
                    learning_rate=1e-2, clip_norm=0.5, reduction=trainable.reduction,
                )  # fmt: skip
            if step == 0:
                seen.loss, seen.norm, seen.nonfinite = (
                    result.loss,
                    result.grad_norm,
                    result.nonfinite,
                )
    trainable.prepare()
    seen.weights = {name: whole(p.detach()) for name, p in model.named_parameters()}
    if trainable.weights is not None:
        seen.gathered = {
            layer.name: sum(t.nbytes for t in held.fsdp_pre_all_gather(*[None] * 5)[0])
            for held in trainable.weights._weights
            for layer in [held.layer]
        }
    return seen


def share(step: int, case: Case) -> MicroBatches:
    """This rank's micro-batches of the global batch, filled up where all must gather together."""
    rank, all_of = Rank.current(), cut(batch(2 * MICRO_BATCHES, seed=step), 2)
    own: list[Any] = [all_of[i] for i in rank.micro_batches(MICRO_BATCHES)]
    if case.shards != 1 and rank.size > 1:
        own += [(None, empty_batch(2, 16))] * (-(-MICRO_BATCHES // rank.size) - len(own))
    return own


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


@contextlib.contextmanager
def noted_operands(seen: Seen) -> Iterator[None]:
    """Note the codes that each linear multiplies with, but not of empty micro-batches."""
    weight, quantize = _Call.weight, _Call.quantize

    def noted_weight(call: _Call, w_NK: Tensor, role: str) -> Any:
        made = weight(call, w_NK, role)
        note(call, role, made)
        return made

    def noted_quantize(call: _Call, x_TC: Tensor, role: Any, row: Any, column: Any) -> Any:
        made = quantize(call, x_TC, role, row, column)
        for name, copy in zip((row, column), made, strict=True):
            note(call, name, copy)
        return made

    def note(call: _Call, role: str | None, made: Any) -> None:
        if role and made is not None and call.moment.counts:
            names = ("codes", "scales", "global_scale", "values")
            parts = [part for name in names if (part := getattr(made, name, None)) is not None]
            flat = [part.contiguous().reshape(-1).view(torch.uint8) for part in parts]
            seen.operands[call.layer.name, call.moment.microbatch or 0, role] = torch.cat(flat)

    with (
        mock.patch.object(_Call, "weight", noted_weight),
        mock.patch.object(_Call, "quantize", noted_quantize),
    ):
        yield


def all_cases(folder: Path) -> None:
    """On every rank."""
    torch.save({n: steps_of(c) for n, c in CASES.items()}, folder / f"{dist.get_rank()}.pt")


Results = dict[int, list[dict[str, Seen]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """By number of ranks, of each rank, by case. One process has no group at all."""
    found: Results = {1: [{name: steps_of(case) for name, case in CASES.items()}]}
    for ranks in (2, 4):
        folder = tmp_path_factory.mktemp(f"ranks-{ranks}")
        run_on_ranks(all_cases, ranks, folder)
        files = [folder / f"{rank}.pt" for rank in range(ranks)]
        found[ranks] = [torch.load(file, weights_only=False) for file in files]
    return found


both_sizes = pytest.mark.parametrize("ranks", [2, 4])


@both_sizes
@pytest.mark.parametrize("name", CASES)
def test_the_first_step_is_that_of_one_process(results: Results, ranks: int, name: str) -> None:
    (alone,) = results[1]
    for seen in results[ranks]:
        assert seen[name].loss == pytest.approx(alone[name].loss, rel=1e-6)
        assert seen[name].norm == pytest.approx(alone[name].norm, rel=1e-6)
        assert seen[name].nonfinite == 0
        for parameter, gradient in alone[name].gradients.items():
            error = (seen[name].gradients[parameter] - gradient).norm() / gradient.norm()
            assert error < 1e-6, parameter


@both_sizes
@pytest.mark.parametrize("name", CASES)
def test_every_operand_of_the_first_step_is_that_of_one_process_to_the_byte(
    results: Results, ranks: int, name: str
) -> None:
    (alone,) = results[1]
    together = {place: b for seen in results[ranks] for place, b in seen[name].operands.items()}
    assert together.keys() == alone[name].operands.keys()
    for place, expected in alone[name].operands.items():
        assert torch.equal(together[place], expected), place


@both_sizes
@pytest.mark.parametrize(
    "name", ["reproducible", "reproducible in rows of two", "whole, reproducible"]
)
def test_reproducible_steps_are_those_of_one_process_to_the_bit(
    results: Results, ranks: int, name: str
) -> None:
    alone = results[1][0]["reproducible"]
    for seen in (ranks_seen[name] for ranks_seen in results[ranks]):
        assert (seen.loss, seen.norm) == (alone.loss, alone.norm)
        for kind in ("gradients", "weights"):
            ours, theirs = getattr(seen, kind), getattr(alone, kind)
            assert all(torch.equal(ours[n], theirs[n]) for n in theirs), kind


@both_sizes
def test_codes_gathered_give_the_bits_of_values_gathered(results: Results, ranks: int) -> None:
    for seen in results[ranks]:
        codes, values = seen["codes"], seen["values"]
        assert codes.loss == values.loss
        for name, weight in values.weights.items():
            assert torch.equal(codes.weights[name], weight), name
            assert torch.equal(codes.gradients[name], values.gradients[name]), name


@both_sizes
def test_codes_are_3_9_times_fewer_bytes_where_rows_are_aligned(
    results: Results, ranks: int
) -> None:
    codes, values, forward = (
        results[ranks][0][name].gathered for name in ("codes", "values", "bf16_forward")
    )
    ratios = {name: values[name] / codes[name] for name in codes}
    aligned = {f"blocks.0.mamba.{name}" for name in ("in_zxbc", "out")}
    aligned |= {"blocks.1.ffn.down", "blocks.2.attention.qkv", "blocks.2.attention.o"}
    aligned |= {"blocks.1.ffn.up"} if ranks == 2 else set()
    assert {name for name, ratio in ratios.items() if ratio > 3.9} == aligned
    assert {name for name, ratio in ratios.items() if ratio == 1} == codes.keys() - aligned
    assert forward == values  # the forward pass reads BF16 there


def test_gradients_are_fp32_where_weights_come_in_bf16(results: Results) -> None:
    for seen in results[2]:
        for name, gradient in seen["values"].gradients.items():
            assert gradient.dtype == torch.float32
            if gradient.ndim == 2:
                assert (gradient.bfloat16().float() != gradient).any(), name


def plain_and_compiled(folder: Path) -> None:
    """On every rank. Graphs run as they are: what the compiler makes of them takes minutes."""
    real = HybridModel.compile_blocks
    with (
        mock.patch(f"{__name__}.SHAPE", replace(SHAPE, pattern="*-")),
        mock.patch.object(HybridModel, "compile_blocks", lambda model: real(model, "eager")),
    ):
        found = [steps_of(Case(compiled=compiled)) for compiled in (False, True)]
    torch.save(found, folder / f"{dist.get_rank()}.pt")


def test_compiled_blocks_of_shared_weights_take_the_same_step(tmp_path: Path) -> None:
    run_on_ranks(plain_and_compiled, 2, tmp_path)
    for rank in range(2):
        plain, compiled = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert compiled.loss == plain.loss
        assert compiled.operands.keys() == plain.operands.keys()
        assert all(
            torch.equal(compiled.operands[place], plain.operands[place])
            for place in plain.operands
            if "input" in place[2]
        )
        for name, gradient in plain.gradients.items():
            error = (compiled.gradients[name] - gradient).norm() / gradient.norm()
            assert error < 1e-6, name
