"""`compare fidelity`: what it concludes, what it writes, and what it answers to mistakes."""

from __future__ import annotations

import copy
import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from pipeline import cli, compare, verbs
from pipeline.config import Config, ConfigError, FidelityConfig, from_dict
from pipeline.fidelity_report import OUTLIERS, lines, verdicts
from pipeline.help import CONF, verb_help
from pipeline.runs import RunFolder
from pipeline.train import checkpoint
from pipeline.train.build import build_model

LENGTH = 32
RECIPES = ("bf16", "fp8_block", "nvfp4_paper", "mxfp4", "no_rht", "all_layers")
STEP = 7


class FakeDataset:
    """Held-out rows of three sources, of which the last is short."""

    eos_id = 0
    dtype = np.dtype("<u2")
    sources = ("code", "prose", "mathematics")

    def holdout(self, source: str) -> np.ndarray:
        index = self.sources.index(source)
        rows = 2 if source == "mathematics" else 20
        tokens = np.random.default_rng(index).integers(1, 64, LENGTH * rows)
        tokens[::19] = self.eos_id
        return tokens.astype(self.dtype)


def configuration(**changes: Any) -> Config:
    """A run of four blocks, the first and the last of them in BF16, and what it is asked for."""
    model = {
        "pattern": "M-*-", "vocab_size": 64, "hidden_size": 64, "ffn_hidden_size": 128,
        "num_attention_heads": 2, "num_kv_heads": 1, "attention_head_dim": 32,
        "mamba_num_heads": 2, "mamba_head_dim": 32, "mamba_state_size": 16,
        "mamba_num_groups": 1, "mamba_chunk_size": 16,
    }  # fmt: skip
    train = {
        "tokens": 10_000, "sequence_length": LENGTH, "global_batch": 4, "micro_batch": 4,
        "phases": [{"start": 0}], "learning_rate": 1e-3, "final_learning_rate": 1e-5,
        "warmup_tokens": 0,
    }  # fmt: skip
    sources = {name: {"builtin": "prose"} for name in FakeDataset.sources}
    raw = {
        "root": "runs", "stages": [], "seed": 0, "model": model, "train": train,
        "precision": {"recipe": "nvfp4", "first": 1, "last": 1},
        "data": {"name": "d", "sources": sources, "tokenizer": {}},
        "evals": {}, "tracking": {"offline": True}, "cluster": {},
        "fidelity": {"recipes": list(RECIPES), "num_batches": 2, "num_draws": 16} | changes,
    }  # fmt: skip
    return from_dict(raw)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run with one checkpoint, of a model with the weights of its beginning."""
    found = RunFolder(tmp_path / "20260101-000000-000000-nvfp4-abcd")
    found.path.mkdir()
    config = configuration()
    found.config.write_text(yaml.safe_dump(config.to_dict()))
    model = build_model(config, torch.device("cpu"))
    tensors = {"model": checkpoint.model_tensors(model)}
    checkpoint.save(found.checkpoints, STEP, tensors, {})
    monkeypatch.setattr(compare, "dataset_folder", lambda config, run: tmp_path)
    monkeypatch.setattr(compare, "open_corpus", lambda data, folder: FakeDataset())
    return found


@pytest.fixture
def result(run: RunFolder) -> dict[str, Any]:
    compare.fidelity(configuration(), run)
    return json.loads((run.fidelity / f"step-{STEP:08d}.json").read_text())


def verdict(result: dict[str, Any], words: str) -> tuple[bool | None, str]:
    """Whether the one claim with these words holds, and the evidence."""
    ((holds, evidence),) = [
        (each.holds, each.evidence) for each in verdicts(result) if words in each.claim
    ]
    return holds, evidence


# ---- The measurement ----------------------------------------------------------------------------


@pytest.mark.slow
def test_the_paper_s_claims_about_formats_rounding_and_scales_hold(result: dict[str, Any]) -> None:
    stated = {each["claim"]: each["holds"] for each in result["verdicts"]}
    for words in ("FP8 < NVFP4 < MXFP4", "SR: bias falls", "2D scales"):
        (holds,) = [holds for claim, holds in stated.items() if words in claim]
        assert holds is True, words


@pytest.mark.slow
def test_bf16_gives_the_true_gradient_and_quantized_blocks_add_error(
    result: dict[str, Any],
) -> None:
    recipes = result["recipes"]
    assert recipes["bf16"]["gradient"] == {"relative_error": 0.0, "cosine": 1.0}
    fp8, paper, everything = (
        recipes[name]["gradient"]["relative_error"]
        for name in ("fp8_block", "nvfp4_paper", "all_layers")
    )
    assert 0 < fp8 < paper < everything
    assert all(0 < block["alone"] < everything for block in result["blocks"])
    assert [block["bf16"] for block in result["blocks"]] == [True, False, False, True]


@pytest.mark.slow
def test_everything_is_written_and_printed_within_80_columns(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    compare.fidelity(configuration(), run)
    stem = run.fidelity / f"step-{STEP:08d}"
    assert stem.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    result = json.loads(stem.with_suffix(".json").read_text())
    with stem.with_suffix(".csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    linears, parameters = len(result["linears"]), len(result["parameters"])
    assert len(rows) == len(RECIPES) * (3 * linears + parameters)
    first = result["linears"][rows[0]["tensor"]]["gemms"][rows[0]["recipe"]][rows[0]["gemm"]]
    assert float(rows[0]["relative_error"]) == first["relative_error"]
    printed = capsys.readouterr().out
    assert all(name in printed for name in RECIPES)
    tables = printed.partition("\nwritten to ")[0]
    assert max(len(line) for line in tables.splitlines()) <= 80


@pytest.mark.slow
def test_measuring_twice_gives_the_same_numbers(run: RunFolder, result: dict[str, Any]) -> None:
    compare.fidelity(configuration(), run)
    again = json.loads((run.fidelity / f"step-{STEP:08d}.json").read_text())
    assert {**again, "seconds": 0} == {**result, "seconds": 0}


@pytest.mark.slow
def test_a_short_list_of_recipes_leaves_claims_open_and_says_what_they_need(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    compare.fidelity(configuration(recipes=["nvfp4"], num_batches=1), run)
    result = json.loads((run.fidelity / f"step-{STEP:08d}.json").read_text())
    assert verdict(result, "FP8 < NVFP4")[0] is None
    assert verdict(result, "BF16 blocks")[0] is None
    assert capsys.readouterr().out.count("not measured") == 4


def test_held_out_rows_come_from_all_sources_in_turn_until_one_ends() -> None:
    config = configuration(num_batches=2)
    batches = compare.held_out(FakeDataset(), config, torch.device("cpu"))  # type: ignore[arg-type]
    rows = torch.cat([batch.tokens_BT for batch in batches])
    streams = {name: FakeDataset().holdout(name) for name in FakeDataset.sources}
    order = ["code", "prose", "mathematics"] * 2 + ["code", "prose"]
    assert [len(batch.tokens_BT) for batch in batches] == [4, 4]
    for index, name in enumerate(order):
        row = streams[name].reshape(-1, LENGTH)[index // 3]
        assert rows[index].tolist() == row.tolist()


# ---- The verdicts -------------------------------------------------------------------------------


def gemms(error: float) -> dict[str, dict[str, float]]:
    return {name: {"relative_error": error, "cosine": 1.0} for name in ("fprop", "dgrad", "wgrad")}


def made_up() -> dict[str, Any]:
    """A result in which every claim holds."""
    errors = {"fp8_block": 0.02, "nvfp4_paper": 0.08, "no_rht": 0.09, "mxfp4": 0.11}
    linear = {
        "kurtosis": {"input": 2 * OUTLIERS, "gradient": 3.0},
        "weight_mismatch": {"no_2d": 0.13, "nvfp4_paper": 0.0},
        "flushed": {
            "no_rht": {"input": 0.2, "gradient": 0.05},
            "nvfp4_paper": {"input": 0.06, "gradient": 0.07},
        },
        "gemms": {recipe: gemms(error) for recipe, error in errors.items()},
    }
    bias, draws = [0.14, 0.07, 0.035], [1, 4, 16]
    drawn = {"error": 0.14, "floor": 0.0, "slope": 0.0, "draws": draws, "bias": bias}
    drawn["predicted"] = list(bias)
    nearest = {"error": 0.09, "floor": 0.09, "slope": 0.0, "draws": [1], "bias": [0.09]}
    blocks = [
        {"block": i, "kind": "ffn", "bf16": i in (0, 3), **dict.fromkeys(
            ("fprop", "dgrad", "wgrad", "gradient", "alone"), 0.2 if i in (0, 3) else 0.1)}
        for i in range(4)
    ]  # fmt: skip
    gradient = {"relative_error": 0.1, "cosine": 0.99}
    return {
        "run": "r", "step": 1, "tokens": 1, "num_batches": 1, "parameters": {},
        "recipes": {
            name: {"fprop": error, "dgrad": error, "wgrad": error, "gradient": gradient}
            for name, error in errors.items()
        },
        "linears": {f"blocks.{i}.ffn.up": copy.deepcopy(linear) for i in range(3)},
        "rounding": {"nearest": nearest, "stochastic": drawn},
        "blocks": blocks,
    }  # fmt: skip


def test_every_claim_holds_where_the_numbers_bear_it_out() -> None:
    assert [each.holds for each in verdicts(made_up())] == [True] * 6


LINEAR = ("linears", "blocks.1.ffn.up")


@pytest.mark.parametrize(
    ("words", "path", "value"),
    [
        ("FP8 < NVFP4", (*LINEAR, "gemms", "mxfp4", "dgrad", "relative_error"), 0.07),
        ("FP8 < NVFP4", (*LINEAR, "gemms", "fp8_block", "wgrad", "relative_error"), 0.09),
        ("RHT lowers", (*LINEAR, "gemms", "no_rht", "wgrad", "relative_error"), 0.07),
        ("RHT flushes", (*LINEAR, "flushed", "no_rht", "input"), 0.05),
        ("SR: bias", ("rounding", "stochastic", "bias", 2), 0.05),
        ("SR: bias", ("rounding", "stochastic", "error"), 0.08),
        ("SR: bias", ("rounding", "nearest", "bias", 0), 0.03),
        ("2D scales", (*LINEAR, "weight_mismatch", "nvfp4_paper"), 1e-9),
        ("2D scales", (*LINEAR, "weight_mismatch", "no_2d"), 0.0),
        ("BF16 blocks", ("blocks", 1, "alone"), 0.3),
    ],
)
def test_a_claim_falls_with_a_single_number_against_it(
    words: str, path: tuple[str | int, ...], value: float
) -> None:
    result = made_up()
    *parents, last = path
    place: Any = result
    for key in parents:
        place = place[key]
    place[last] = value
    assert verdict(result, words)[0] is False
    assert sum(each.holds is False for each in verdicts(result)) == 1
    result["verdicts"] = [dataclasses.asdict(each) for each in verdicts(result)]
    assert sum("DOES NOT HOLD" in line for line in lines(result)) == 1


def test_operands_without_outliers_say_nothing_about_the_rht() -> None:
    result = made_up()
    for linear in result["linears"].values():
        linear["kurtosis"] = {"input": 3.0, "gradient": 3.0}
    assert verdict(result, "RHT lowers")[0] is None
    assert verdict(result, "RHT flushes")[0] is None


# ---- The command --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "compare: say what, as compare fidelity run=latest"),
        (("run=latest",), "compare: say what, as compare fidelity run=latest"),
        (("fidelty", "run=latest"), "did you mean fidelity"),
    ],
)
def test_compare_asks_for_the_word_that_says_what(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["compare", *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_the_word_is_no_override_and_leads_to_its_own_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called = []
    monkeypatch.setattr(verbs, "compare_fidelity", lambda raw, given: called.append(given))
    with pytest.raises(SystemExit) as stopped:
        cli.main(["compare", "fidelity", "run=latest", "fidelity.num_draws=4"])
    assert stopped.value.code == 0
    assert called == [["run=latest", "fidelity.num_draws=4"]]


def test_settings_are_those_of_the_command_and_not_of_the_run(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor need a run's configuration know of them: it may be older."""
    own = yaml.safe_load(run.config.read_text())
    del own["fidelity"]
    run.config.write_text(yaml.safe_dump(own))
    raw = configuration(steps=[3]).to_dict() | {"run": "latest", "root": str(run.path.parent)}
    config, found = verbs._existing(raw, ["run=latest", "fidelity.steps=[3]"])
    assert found == run
    assert config.fidelity == FidelityConfig((3,), RECIPES, 2, 16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipes": ["nvfp5"]}, "fidelity.recipes: unknown recipe 'nvfp5'"),
        ({"recipes": ["bf16"]}, "none of them quantizes"),
        ({"steps": [5]}, "fidelity.steps: .*5"),
        ({"num_batches": 20}, "needs 80 rows of 32 tokens, and 42 are held out"),
    ],
)
def test_mistakes_are_named_with_the_way_out(
    run: RunFolder, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        compare.fidelity(configuration(**changes), run)


def test_a_recipe_that_does_not_fit_the_model_can_be_left_out(run: RunFolder) -> None:
    config = configuration(recipes=["mxfp4"])
    odd = dataclasses.replace(config.model, ffn_hidden_size=48)
    config = dataclasses.replace(config, model=odd)
    model = build_model(config, torch.device("cpu"))
    checkpoint.save(run.checkpoints, STEP, {"model": checkpoint.model_tensors(model)}, {})
    with pytest.raises(ConfigError, match=r"multiple of 32.*leave it out of fidelity.recipes"):
        compare.fidelity(config, run)


def test_every_key_stands_in_the_configuration_and_in_the_help() -> None:
    keys = {field.name for field in dataclasses.fields(FidelityConfig)}
    assert set(yaml.safe_load((CONF / "config.yaml").read_text())["fidelity"]) == keys
    assert all(f"fidelity.{key}" in verb_help("compare") for key in keys)
