"""What a study finds, where the truth is known; and a report that is a function of its tables."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from pipeline.config import ConfigError
from pipeline.curves import Curve
from pipeline.study import tables as study_tables
from pipeline.study.fidelity import chosen, rows_of
from pipeline.study.findings import Findings, find
from pipeline.study.report import downstream, health, lines, write_report
from tests.study.synthetic import TOKENS, fidelity, study, tables

CLEAR = {"nvfp4": 0.003, "nvfp4_paper": 0.010, "mxfp4": 0.020, "no_rht": 0.0101}


def verdict(findings: Findings, claim: str) -> bool | None:
    return next(each.holds for each in findings.verdicts if claim in each.claim)


def test_gaps_are_found_with_intervals_that_hold_them() -> None:
    findings = find(tables(CLEAR), study())
    for arm, truth in CLEAR.items():
        gap = findings.gaps[arm, "main"]
        assert gap.low <= truth <= gap.high
        assert gap.high - gap.low < 0.002
    assert findings.noise.freedom == 6
    assert findings.losses["bf16", "main"] > findings.losses["bf16", "longer"]


def test_verdicts_say_what_the_intervals_say() -> None:
    findings = find(tables(CLEAR, late=0.002), study())
    assert verdict(findings, "within 0.5%") is True
    assert verdict(findings, "within 1.5%") is True
    assert verdict(findings, "MXFP4's gap is larger") is True
    assert verdict(findings, "no_rht is worse") is None
    assert verdict(findings, "late_bf16 at least halves") is True
    other = {"nvfp4": 0.02, "nvfp4_paper": 0.02, "mxfp4": 0.01, "no_rht": 0.03}
    findings = find(tables(other, late=0.018), study())
    assert verdict(findings, "within 0.5%") is False
    assert verdict(findings, "within 1.5%") is False
    assert verdict(findings, "MXFP4's gap is larger") is False
    assert verdict(findings, "no_rht is worse") is True
    assert verdict(findings, "late_bf16 at least halves") is False


def test_what_noise_hides_cannot_be_told() -> None:
    findings = find(tables(CLEAR, noise=0.05), study())
    assert verdict(findings, "MXFP4's gap is larger") is None
    assert verdict(findings, "within 0.5%") is None


def test_a_switch_knows_its_share_and_the_gap_before_it() -> None:
    findings = find(tables(CLEAR, late=0.002), study())
    (switch,) = findings.switches
    assert switch.share == pytest.approx(0.18)
    assert switch.before == pytest.approx(0.010, abs=0.001)
    assert switch.after.mean == pytest.approx(0.002, abs=0.001)
    assert switch.unswitched.mean == pytest.approx(0.010, abs=0.001)


def test_a_fork_whose_trunk_is_not_there_is_not_judged() -> None:
    made = tables(CLEAR, late=0.002)
    only_one = [row for row in made.rows if row.arm != "nvfp4_paper" or row.seed == 1]
    (switch,) = find(dataclasses.replace(made, rows=tuple(only_one)), study()).switches
    assert switch.over_half.num_seeds == 1
    none = [row for row in made.rows if row.arm != "nvfp4_paper"]
    assert find(dataclasses.replace(made, rows=tuple(none)), study()).switches == ()


def test_tokens_to_match_come_from_whole_runs_of_the_same_model() -> None:
    matching = find(tables(CLEAR, noise=0.0), study()).matching
    assert matching["tokens"] == TOKENS
    assert matching["longest"] == 2 * TOKENS
    assert 1.0 < matching["needed"] / TOKENS < 1.4
    same = {**CLEAR, "mxfp4": 0.009}
    assert find(tables(same, noise=0.0), study()).matching["needed"] is None


def test_tokens_to_match_compare_the_same_seeds() -> None:
    made = tables(CLEAR, noise=0.0)
    odd = {row.run: 1.0 + row.seed for row in made.rows}  # a seed's loss is another world
    curves = {
        run: {name: Curve(curve.tokens, curve.values * odd[run]) for name, curve in named.items()}
        for run, named in made.curves.items()
    }
    few = [row for row in made.rows if row.seed == 0 or (row.arm, row.size) != ("mxfp4", "longer")]
    unfinished = dataclasses.replace(made, rows=tuple(few), curves=curves)
    matching = find(unfinished, study()).matching
    assert matching["num_seeds"] == 1
    assert 1.0 < matching["needed"] / TOKENS < 1.4


def test_an_arm_without_runs_at_the_main_size_is_reported_where_it_has_some(tmp_path: Path) -> None:
    made = tables(CLEAR)
    rows = [row for row in made.rows if (row.arm, row.size) != ("mxfp4", "main")]
    findings = write_report(dataclasses.replace(made, rows=tuple(rows)), study(), tmp_path)
    assert ("mxfp4", "wide") in findings.gaps
    assert verdict(findings, "MXFP4's gap is larger") is None


def test_tables_of_another_study_are_refused() -> None:
    made = tables(CLEAR)
    rows = tuple(dataclasses.replace(row, size="unheard of") for row in made.rows)
    with pytest.raises(ConfigError, match="study known: its tables hold no run"):
        find(dataclasses.replace(made, rows=rows), study())


def test_tables_survive_their_files_and_give_the_same_report(tmp_path: Path) -> None:
    made = tables(CLEAR, late=0.002)
    study_tables.write(made, tmp_path / "a")
    read = study_tables.read(tmp_path / "a")
    assert read.rows == made.rows
    assert read.health == made.health
    assert read.fidelity == made.fidelity
    study_tables.write(read, tmp_path / "b")
    for name in study_tables.FILES:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    for folder in ("a", "b"):
        write_report(study_tables.read(tmp_path / folder), study(), tmp_path / folder)
    page = (tmp_path / "a" / "report.html").read_text()
    assert page == (tmp_path / "b" / "report.html").read_text()
    for part in (
        "What was found",
        "cannot be told",
        "+1.00%",
        "Late switch",
        "Tokens to match",
        "20.00%",
    ):
        assert part in page
    assert {path.stem for path in (tmp_path / "a" / "figures").iterdir()} == {
        "loss", "gaps", "sizes", "fidelity",
    }  # fmt: skip


def test_figures_of_a_run_s_end_are_means_with_their_errors() -> None:
    made = tables({"nvfp4": 0.003})
    rows = tuple(
        dataclasses.replace(row, figures={"accuracy/a": row.seed / 10}) for row in made.rows
    )
    assert downstream(dataclasses.replace(made, rows=rows), "main") == {
        "bf16": {"accuracy/a": "0.100 ± 0.058"}, "nvfp4": {"accuracy/a": "0.100 ± 0.058"},
    }  # fmt: skip
    alone = tuple(row for row in rows if row.seed == 2)
    assert downstream(dataclasses.replace(made, rows=alone), "main")["bf16"] == {
        "accuracy/a": "0.200"
    }


def test_one_seed_claims_nothing() -> None:
    few = tables({"nvfp4": 0.003})
    alone = study_tables.Tables(
        tuple(row for row in few.rows if row.seed == 0), few.curves, few.health
    )
    findings = find(alone, study())
    assert findings.gaps["nvfp4", "main"].differs is None
    assert all(each.holds is None for each in findings.verdicts if "BF16's" not in each.claim)
    assert any("noise unknown" in line for line in lines(findings, study()))


def test_health_names_the_worst_layer() -> None:
    (row,) = health(tables(CLEAR), "main")
    assert (row["median"], row["worst"], row["layer"]) == (0.2, 0.3, "b")


def test_fidelity_needs_no_seeds() -> None:
    claim = "nvfp4's gradients are closer"
    assert verdict(find(tables(CLEAR), study()), claim) is True
    worse = dataclasses.replace(tables(CLEAR), fidelity=tuple(fidelity(nvfp4=0.3)))
    assert verdict(find(worse, study()), claim) is False


def test_fidelity_is_gathered_by_kind_of_linear() -> None:
    def linear(error: float) -> dict:
        gemm = {"relative_error": error}
        return {"gemms": {"nvfp4": {"fprop": gemm, "dgrad": gemm, "wgrad": gemm}}}

    linears = {"blocks.0.ffn.up": linear(3.0), "blocks.2.ffn.up": linear(4.0)}
    whole = {"nvfp4": {"gradient": {"relative_error": 0.5}}}
    rows = list(rows_of({"linears": linears, "recipes": whole}))
    assert {(row["kind"], row["gemm"]) for row in rows} == {
        ("ffn.up", "fprop"), ("ffn.up", "dgrad"), ("ffn.up", "wgrad"), ("all", "gradient"),
    }  # fmt: skip
    assert {row["relative_error"] for row in rows} == {3.5355, 0.5}  # the root of 12.5


def test_checkpoints_for_fidelity_are_spread_and_end_with_the_last() -> None:
    assert chosen([5, 9]) == [5, 9]
    assert chosen([1, 2, 3, 4, 5, 6, 7, 8, 9]) == [2, 4, 7, 9]
    assert chosen([244, 342, 391, 400, 489]) == [244, 342, 391, 489]
    assert chosen([]) == []
