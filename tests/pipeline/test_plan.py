"""The plan of whole configurations: what it finds, refuses, compares and prints."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from pipeline.config import Config, ConfigError, from_dict
from pipeline.help import experiments
from pipeline.plan import estimate
from pipeline.plan.linears import kinds_of, linears_of
from pipeline.plan.text import describe
from tests.pipeline.test_config import composed, composed_raw

PAPER = "+experiment=12b_nvfp4"


def run_days(config: Config) -> float:
    assert config.cluster.hardware
    kinds = kinds_of(linears_of(config))
    return sum(estimate.run_seconds(config, config.cluster.hardware, kinds).values()) / 86_400


@pytest.mark.parametrize("name", sorted(experiments()))
def test_every_experiment_has_a_plan(name: str) -> None:
    text = "\n".join(describe(composed(f"+experiment={name}")))
    for part in (
        "parameters",
        "FLOPs",
        "micro-batches",
        "checkpoints",
        "bound by",
        "days to finish",
    ):
        assert part in text


def test_published_sizes_and_schedule_come_out() -> None:
    made = estimate.estimate(composed(PAPER))
    assert made.parameters["total"] == 12_310_001_152
    assert made.checkpoint_bytes == 12 * 12_310_001_152
    assert sum(made.corpus.values()) == pytest.approx(10e12, rel=1e-6)
    config = composed(PAPER)
    first, last = int(config.precision.first), int(config.precision.last)
    whole = {linear.name: linear for linear in linears_of(config)}
    ends = {*range(first), *range(62 - last, 62)}
    assert all(not whole[name].recipe.quantized for name in whole if _block(name) in ends)
    assert made.precision_shares["fp4"] == pytest.approx(
        sum(linear.elements for linear in whole.values() if linear.recipe.quantized)
        / sum(linear.elements for linear in whole.values())
    )


def _block(name: str) -> int:
    return int(name.split(".")[1]) if name.startswith("blocks.") else 0


def test_replicated_weights_do_not_fit_and_the_plan_says_what_would() -> None:
    config = composed(PAPER, "cluster.shard=1")
    assert not estimate.fits(config, estimate.estimate(config))
    assert any("DOES NOT FIT" in line and "cluster.shard" in line for line in describe(config))
    sharded = composed(PAPER, "cluster.shard=8")
    assert estimate.fits(sharded, estimate.estimate(sharded))


@pytest.mark.parametrize(
    ("shard", "layout"), [(0, (1, 64)), (1, (64, 1)), (8, (8, 8)), (64, (1, 64))]
)
def test_the_plan_shares_weights_as_training_will(shard: int, layout: tuple[int, int]) -> None:
    found = estimate.layout_of(composed(PAPER, f"cluster.shard={shard}"))
    assert (found.replicas, found.shards) == layout


def test_what_is_sent_follows_the_phases_precision_and_the_cluster_s_switches() -> None:
    sent = estimate.estimate(composed(PAPER)).sent  # a copy in each node
    assert set(sent) == {"gather weights", "scatter gradients", "all-reduce gradients"}
    one_copy = estimate.estimate(composed(PAPER, "cluster.shard=0")).sent
    assert set(one_copy) == {"gather weights", "scatter gradients"}
    plain = estimate.estimate(composed(PAPER, "cluster.fp4_gather=false")).sent
    assert plain["gather weights"] > 1.5 * sent["gather weights"]
    kept = estimate.estimate(composed(PAPER, "cluster.scatter_each_micro_batch=false"))
    assert sent["scatter gradients"] == pytest.approx(12 * kept.sent["scatter gradients"])
    scattered = estimate.estimate(composed(PAPER)).memory["full"]["gradients"]
    assert kept.memory["full"]["gradients"] == scattered + 4 * 12_310_001_152


def test_auto_finds_the_fewest_nodes_that_fit() -> None:
    raw = composed_raw(PAPER, "cluster=h100", "cluster.nodes=auto", "cluster.shard=16")
    found = estimate.smallest(raw)
    assert found.cluster.nodes == 2
    assert found.cluster.workers == 16
    roomy = composed_raw("+experiment=1b_dense_nvfp4", "cluster=h200", "cluster.nodes=auto")
    assert estimate.smallest(roomy).cluster.nodes == 1
    never = composed_raw(PAPER, "cluster=h100", "cluster.nodes=auto", "cluster.shard=1")
    with pytest.raises(ConfigError, match="more nodes do not help"):
        estimate.smallest(never)
    with pytest.raises(ConfigError, match="auto is for plan"):
        from_dict(never)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.micro_batch=5"], "not a multiple"),
        (["cluster.nodes=200"], "at most 736 workers"),
        (["cluster.shard=7"], "does not divide"),
        (["model.mamba_num_groups=7"], "mamba_num_heads"),
        (["model.pattern=MX-"], "pattern"),
        (["model.ffn_hidden_size=20481"], "ffn_hidden_size|20481"),
        (["precision.first=40", "precision.last=40"], "quantizes nothing"),
        (["train.phases=[{start: 0}, {start: 200%}]"], "outside the run"),
        (["train.phases=[{start: 0}, {start: 10, precision: fp3}]"], "train.phases"),
        (["cluster.workers=3"], "give cluster.nodes"),
        (["plan.gemm_efficiency.fp4=1.5"], "plan.gemm_efficiency.fp4"),
        (["plan.price=-1"], "plan.price"),
        (["plan.corpus_tokens={nosuch: 1}"], "no such source"),
        (["cluster.hardware.bf16_tflops=0"], "bf16_tflops"),
        (["cluster.hardware.fp4_tflops=0"], "fp4_tflops"),
        (["cluster.hardware.capability=[10]"], "capability"),
        (["cluster.gpus_per_worker=2"], "gpus_per_worker"),
    ],
)
def test_the_impossible_is_refused_by_name(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        describe(composed(PAPER, *overrides))


def test_a_batch_that_the_workers_do_not_divide_is_told_as_idle_time() -> None:
    made = estimate.estimate(composed(PAPER))  # 736 micro-batches, 64 workers
    assert made.micro_batches == 12
    assert made.idle == pytest.approx(1 - 736 / (12 * 64))


def test_better_cards_formats_and_efficiencies_take_less_time() -> None:
    within = "cluster.shard=8"  # an NVLink domain: over the network, that decides
    config = composed(PAPER, within)
    days = {
        (hardware.name, recipe): sum(spent.values())
        for hardware, recipe, spent in estimate.comparison(config)
    }
    assert days["GB200", "nvfp4_paper"] < days["GB200", "mxfp8"] < days["GB200", "bf16"]
    assert days["GB300", "nvfp4_paper"] < days["GB200", "nvfp4_paper"] < days["B200", "nvfp4_paper"]
    assert days["H200", "bf16"] < days["H100", "bf16"]
    assert days["H100", "nvfp4_paper"] > days["H100", "bf16"]  # emulated: no gain, more passes
    assert run_days(estimate.at_peak(config)) < run_days(config)
    slower = composed(PAPER, within, "plan.quantization_efficiency=0.05")
    assert run_days(slower) > run_days(config)


def test_a_copy_shared_beyond_an_nvlink_domain_is_bound_by_the_network() -> None:
    assert run_days(composed(PAPER, "cluster.shard=64")) > 2 * run_days(
        composed(PAPER, "cluster.shard=8")
    )


def test_a_late_switch_to_bf16_costs_time() -> None:
    phases = "train.phases=[{start: 0}, {start: 82%, precision: bf16}]"
    switched = composed(PAPER, phases)
    assert run_days(switched) > run_days(composed(PAPER))
    shares = estimate.estimate(switched).precision_shares
    before = estimate.estimate(composed(PAPER)).precision_shares
    assert shares["fp4"] == pytest.approx(0.82 * before["fp4"], rel=1e-3)


def test_cost_and_epochs_follow_from_what_is_given() -> None:
    config = composed(PAPER, "plan.price=2.5", "plan.corpus_tokens={web: 3.0e+12}")
    made = estimate.estimate(config)
    text = "\n".join(describe(config))
    assert f"({made.corpus['web'] / 3e12:.2f} epochs)" in text
    hours = run_days(config) * 24 * 64
    assert f"{hours * 2.5:,.0f} USD" in text


@pytest.mark.slow
def test_the_command_needs_neither_ray_nor_mlflow_nor_data() -> None:
    script = (
        "import json, sys, time\n"
        "from pipeline.cli import main\n"
        f"try: main(['plan', '{PAPER}', 'cluster=gb200_nvl72', 'nodes=8', 'cluster.shard=8',"
        " 'gemm_efficiency.fp4=0.5'])\n"
        "except SystemExit as end: code = end.code\n"
        "print(json.dumps([code, time.process_time(), sorted(sys.modules)]))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    *printed, last = done.stdout.splitlines()
    code, seconds, modules = json.loads(last)
    assert code == 0, done.stderr
    assert "8 nodes, 32 workers: 4 replicas x 8 shards" in "\n".join(printed)
    heavy = {"ray", "mlflow", "pyarrow", "lm_eval", "transformers", "torch.distributed.tensor"}
    assert not heavy & set(modules)
    assert seconds < 10  # of processor time; about 3 where nothing else runs


def test_each_card_file_is_a_whole_cluster() -> None:
    for name in (*estimate.CARDS, "gb200_nvl72"):
        cluster: Any = composed(PAPER, f"cluster={name}").cluster
        assert cluster.workers == cluster.nodes * cluster.gpus_per_node
        assert cluster.hardware
        assert cluster.kubernetes
