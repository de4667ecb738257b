"""The plan's formulas against the bytes of real tensors and a counter of operations."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from model import HybridModel, ModelConfig, count_parameters, flops_per_token
from model import loss as model_loss
from pipeline.config import Config, HardwareConfig, PlanConfig
from pipeline.plan import formulas, linears
from pipeline.plan.formulas import Batch, Layout, Work
from pipeline.train.build import build_recipe
from pipeline.train.optim import build_optimizer, optimizer_tensors
from quant import Precision, apply_recipe
from tests.train.tiny import configuration

WITHIN = 0.05
ROWS, LENGTH = 2, 64
HYBRID = ModelConfig("M-M*-M-*", 256, 64, 192, 4, 2, 16, 4, 32, 16, 2, mamba_chunk_size=32)
DENSE = dataclasses.replace(HYBRID, pattern="*-*-", rope_theta=1e4)
WIDE = dataclasses.replace(HYBRID, hidden_size=128, mamba_num_heads=8, vocab_size=512)
ALONE = Layout(1, 1)
CHECKPOINTING = ("none", "selective", "full")
DTYPES = {4: torch.float32, 2: torch.bfloat16}


def config_of(shape: ModelConfig, recipe: str) -> Config:
    config = configuration(Path("nowhere"), 4)
    fields = {field.name: getattr(shape, field.name) for field in dataclasses.fields(config.model)}
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, **fields),
        precision=dataclasses.replace(config.precision, recipe=recipe),
    )


def built(
    shape: ModelConfig, recipe: str, checkpointing: Any, element: int = 4
) -> tuple[HybridModel, Precision, dict[str, linears.Linear]]:
    config = config_of(shape, recipe)
    model = HybridModel(shape, DTYPES[element], checkpointing)
    precision = apply_recipe(model, build_recipe(config), num_blocks=shape.num_blocks, seed=0)
    precision.begin(0, 0)
    return model, precision, {linear.name: linear for linear in linears.linears_of(config)}


def batch(documents: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 256, (ROWS, LENGTH))
    index = torch.zeros(ROWS, LENGTH, dtype=torch.int32)
    if documents:
        index[:, LENGTH // 2 :] = 1
    return tokens, tokens, index


@contextmanager
def saved_by_autograd(model: HybridModel) -> Iterator[dict[int, int]]:
    """Bytes of each storage that autograd saves, the parameters' own left out."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    sizes: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            alive.append(tensor)
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes


@pytest.mark.parametrize("element", [4, 2])
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("recipe", ["bf16", "nvfp4_paper", "nvfp4"])
@pytest.mark.parametrize("shape", [HYBRID, DENSE], ids=["hybrid", "dense"])
def test_saved_activations_are_what_autograd_saves(
    shape: ModelConfig, recipe: str, checkpointing: str, element: int
) -> None:
    model, _, known = built(shape, recipe, checkpointing, element)
    tokens, _, index = batch()
    with saved_by_autograd(model) as sizes:
        model.hidden(tokens, index)
    on_cpu = Batch(ROWS, LENGTH, element, fused=False, chunk=32)
    formula = formulas.saved_activations(shape, known, on_cpu, checkpointing)
    # What the head keeps of the final norm's output is in the formula, and not yet saved here.
    head = formulas.linear_inputs_bytes([known["head"]], on_cpu)
    assert formula - head == pytest.approx(sum(sizes.values()), rel=WITHIN)


def test_documents_in_a_row_cost_one_mask_that_all_attention_blocks_share() -> None:
    saved = {}
    for documents in (False, True):
        model, _, _ = built(HYBRID, "bf16", "none")
        tokens, _, index = batch(documents)
        with saved_by_autograd(model) as sizes:
            model.hidden(tokens, index)
        saved[documents] = sum(sizes.values())
    mask = formulas.attention_mask_bytes(HYBRID, Batch(ROWS, LENGTH, 4, fused=False))
    assert saved[True] - saved[False] == pytest.approx(mask, rel=WITHIN)


def test_the_logits_of_one_slice_are_held_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    for slice_elements in (1 << 25, HYBRID.vocab_size * ROWS * LENGTH // 4):
        monkeypatch.setattr(model_loss, "SLICE_ELEMENTS", slice_elements)
        monkeypatch.setattr(formulas.held, "SLICE_ELEMENTS", slice_elements)
        model, _, _ = built(HYBRID, "bf16", "none")
        largest = 0
        forward = model_loss._exponentiate

        def seen(logits: torch.Tensor, forward: Any = forward) -> Any:
            nonlocal largest
            largest = max(largest, logits.untyped_storage().nbytes())
            return forward(logits)

        monkeypatch.setattr(model_loss, "_exponentiate", seen)
        model.loss(*batch())[0].backward()
        monkeypatch.setattr(model_loss, "_exponentiate", forward)
        assert largest == formulas.logits_bytes(HYBRID, Batch(ROWS, LENGTH, 4))


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block", "mxfp4", "nvfp4", "nvfp4_paper"])
def test_weights_gradients_moments_and_quantized_copies_after_a_step(recipe: str) -> None:
    model, precision, known = built(WIDE, recipe, "none")
    optimizer = build_optimizer(model, config_of(WIDE, recipe).train)
    model.loss(*batch())[0].backward()
    cached = precision.cache_nbytes
    optimizer.step()
    parameters = list(model.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    plan = formulas.memory(WIDE, known, count, Batch(ROWS, LENGTH, 4, False), "none", ALONE)
    assert plan["weights"] == sum(parameter.nbytes for parameter in parameters)
    assert plan["gradients"] == sum(parameter.grad.nbytes for parameter in parameters)  # type: ignore
    moments = sum(tensor.nbytes for tensor in optimizer_tensors(model, optimizer).values())
    assert plan["optimizer"] == pytest.approx(moments, rel=1e-3)
    assert plan["quantized weights"] == cached
    assert formulas.checkpoint_bytes(count) == pytest.approx(
        moments + sum(parameter.nbytes for parameter in parameters), rel=1e-3
    )


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("sliced", [False, True])
def test_training_flops_are_the_counters(
    checkpointing: Any, sliced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sliced:
        elements = HYBRID.vocab_size * ROWS * LENGTH // 2
        monkeypatch.setattr(model_loss, "SLICE_ELEMENTS", elements)
    model, _, _ = built(HYBRID, "bf16", checkpointing)
    sdpa = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    counter = FlopCounterMode(display=False)
    with counter, sdpa:
        model.loss(*batch())[0].backward()
    forward = flops_per_token(HYBRID, LENGTH)
    formula = formulas.training_flops(forward, checkpointing, sliced) * ROWS * LENGTH
    # The counter also sees the scan's sums, which its backward pass computes again.
    assert 0.97 < counter.get_total_flops() / formula < 1.10


def test_shares_of_gemm_flops_are_those_of_the_linears() -> None:
    config = config_of(HYBRID, "nvfp4_paper")
    known = linears.linears_of(config)
    products = [gemm for linear in known for gemm in linears.gemms(linear, 1, "recipe")]
    forward = flops_per_token(HYBRID, LENGTH)
    expected = 3 * sum(value for kind, value in forward.items() if kind.endswith("_linear"))
    assert sum(gemm.flops for gemm in products) == expected
    by_precision = {name: 0 for name in ("fp4", "bf16")}
    for gemm in products:
        by_precision[linears.named_precision(gemm)] += gemm.flops
    quantized = [linear for linear in known if linear.recipe.quantized]
    assert by_precision["fp4"] == 3 * 2 * sum(linear.elements for linear in quantized)
    late = [gemm for linear in known for gemm in linears.gemms(linear, 1, "bf16_forward")]
    in_fp4 = sum(gemm.flops for gemm in late if linears.named_precision(gemm) == "fp4")
    assert in_fp4 == by_precision["fp4"] * 2 / 3


def test_a_gemm_runs_where_the_kernels_table_says() -> None:
    (linear,) = (
        item
        for item in linears.linears_of(config_of(WIDE, "nvfp4_paper"))
        if item.name == "blocks.1.ffn.up"
    )
    fprop = next(iter(linears.gemms(linear, 256, "recipe")))
    assert linears.tensor_cores(fprop, (10, 0)) == "fp4"
    assert linears.tensor_cores(fprop, (9, 0)) == "bf16"  # Hopper emulates


def test_communication_is_what_the_rings_send() -> None:
    parameters, gathered = 1000, 2000.0
    assert formulas.communication(parameters, gathered, ALONE, 3) == {}
    replicated = formulas.communication(parameters, gathered, Layout(4, 1), 3)
    assert replicated == {"all-reduce gradients": 2 * 3 / 4 * 4 * parameters}
    both = formulas.communication(parameters, gathered, Layout(2, 4), 3)
    assert both == {
        "gather weights": 2 * 3 * 3 / 4 * gathered,
        "scatter gradients": 3 * 3 / 4 * 4 * parameters,
        "all-reduce gradients": 2 * 1 / 2 * 4 * parameters / 4,
    }
    once = formulas.communication(parameters, gathered, Layout(2, 4, scatter_each=False), 3)
    assert once["scatter gradients"] == 3 / 4 * 4 * parameters
    integers = formulas.communication(parameters, gathered, Layout(2, 4, reproducible=True), 3)
    assert integers["scatter gradients"] == 2 * both["scatter gradients"]
    assert integers["all-reduce gradients"] == 2 * both["all-reduce gradients"]
    assert integers["gather weights"] == both["gather weights"]


def test_weights_are_gathered_in_the_precision_that_their_linears_read() -> None:
    config = config_of(WIDE, "nvfp4_paper")
    kinds = linears.kinds_of(linears.linears_of(config))
    parameters = count_parameters(WIDE)["total"]

    def gathered(shards: int, mode: str = "recipe", codes: bool = True) -> float:
        layout = Layout(1, shards, fp4_gather=codes)
        return formulas.gathered_bytes(WIDE, kinds, parameters, layout, mode)

    sizes = [(linear.recipe.quantized, count * linear.elements) for linear, count in kinds]
    quantized, plain = (sum(n for is_, n in sizes if is_ == want) for want in (True, False))
    rest = parameters - quantized - plain
    assert quantized
    assert gathered(2) == quantized * (4 + 8 / 256) / 8 + plain * 2 + rest * 4
    in_bf16 = (quantized + plain) * 2 + rest * 4
    assert gathered(2, mode="bf16") == gathered(2, codes=False) == in_bf16
    assert gathered(7) == in_bf16  # no multiple of 16 rows on each of seven


def test_a_sum_over_domains_crosses_the_network_with_its_part_alone() -> None:
    links = dict(nvlink_gb_per_second=100, nvlink_gpus=8, network_gb_per_second=10)
    hardware = HardwareConfig("x", (10, 0), 1, 1, 1, 1, 1, **links)  # type: ignore[arg-type]
    sent = {"all-reduce gradients": 80e9}
    inside = formulas.communication_seconds(sent, Layout(8, 1), hardware, 1.0)
    across = formulas.communication_seconds(sent, Layout(16, 1), hardware, 1.0)
    assert inside == pytest.approx(0.8)
    assert across == pytest.approx(0.8 + 80 / 8 / 10)


def test_a_time_is_the_longer_of_operations_and_bytes() -> None:
    known = linears.linears_of(config_of(WIDE, "bf16"))
    work = Work(WIDE, linears.kinds_of(known), 4096, 4096, 1, "recipe", "none", 0.0)
    slow = HardwareConfig("compute", (10, 0), 1e-3, 1, 1, 1, 1e9, 1, 8, 1)
    thin = HardwareConfig("memory", (10, 0), 1e9, 1, 1, 1, 1e-6, 1, 8, 1)
    perfect = PlanConfig(gemm_efficiency={"bf16": 1.0}, memory_efficiency=1.0)
    products = [gemm for linear in known for gemm in linears.gemms(linear, 4096, "recipe")]
    flops, moved = (sum(map(count, products)) for count in (lambda g: g.flops, formulas.gemm_bytes))
    assert sum(formulas.gemm_seconds(work, slow, perfect).values()) == pytest.approx(flops / 1e9)
    assert sum(formulas.gemm_seconds(work, thin, perfect).values()) == pytest.approx(moved / 1e6)


def test_communication_hides_behind_computation_only() -> None:
    known = linears.linears_of(config_of(WIDE, "bf16"))
    work = Work(WIDE, linears.kinds_of(known), 4096, 4096, 1, "recipe", "none", 0.0)
    card = HardwareConfig("card", (10, 0), 100, 200, 400, 1, 1, 1, 8, 1)
    plan = PlanConfig(overlap=0.75)
    alone = sum(formulas.step_seconds(work, card, plan, 0.0).values())
    for sent, shown in ((alone, 0.25 * alone), (10 * alone, 9 * alone)):
        seconds = formulas.step_seconds(work, card, plan, sent)
        assert seconds["communication"] == pytest.approx(shown)
