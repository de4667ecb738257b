"""Kill runs many times and say whether each ended as an undisturbed one.

    python -m tests.faults --folder FOLDER [--kills 180] [--ray-kills 20] [--seed 0]

It can be interrupted and started again: finished runs are kept in FOLDER/kills.jsonl. The table is
printed after each run and written to tests/faults/RESULTS.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.faults.harness import INTERVAL, STEPS, Case, Kill, Moment, differences

RESULTS = Path(__file__).with_name("RESULTS.md")
KILLS_A_RUN = {"local": 6, "ray": 3}
RAY_TARGETS = ("worker", "raylet", "driver", "cluster")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=180, help="of local mode's one process")
    parser.add_argument("--ray-kills", type=int, default=20, help="under real Ray")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for mode, wanted in (("local", arguments.kills), ("ray", arguments.ray_kills)):
        campaign(arguments.folder.resolve(), mode, wanted, arguments.seed)


def campaign(folder: Path, mode: str, wanted: int, seed: int) -> None:
    """Runs of one mode until `wanted` kills are done."""
    record = folder / "kills.jsonl"
    reference = Case(folder, f"{mode}-undisturbed", ray=mode == "ray")
    done = [run for run in read(record) if run["mode"] == mode]
    if wanted and not done:
        assert reference.run([]) == []
    number = len(done)
    while sum(len(run["kills"]) for run in done) < wanted:
        generator = random.Random(f"{seed} {mode} {number}")
        name = f"{mode}-{number:03d}"
        case = Case(folder, name, ray=mode == "ray")
        kills = case.run(plan(mode, number, generator))
        run = {
            "mode": mode,
            "run": name,
            "kills": [dataclasses.asdict(kill) for kill in kills],
            "differences": differences(case, reference),
        }
        with record.open("a") as file:
            file.write(json.dumps(run) + "\n")
        done.append(run)
        number += 1
        text = table(read(record))
        print(text, flush=True)
        RESULTS.write_text(text)


def plan(mode: str, number: int, generator: random.Random) -> list[tuple[str, Moment]]:
    """What to kill and when, in order."""
    count = KILLS_A_RUN[mode]
    targets = ["process"] * count
    if mode == "ray":
        targets = [RAY_TARGETS[(number * count + i) % len(RAY_TARGETS)] for i in range(count)]
    return [(target, Moment.draw(generator)) for target in targets]


def read(record: Path) -> list[dict[str, Any]]:
    """The runs that are done."""
    return [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []


def table(runs: Sequence[dict[str, Any]]) -> str:
    """The campaign so far, as Markdown."""
    lines = [
        "# Kills, and whether the runs ended as undisturbed ones",
        "",
        f"`python -m tests.faults`: runs of {STEPS} steps with a checkpoint every {INTERVAL},",
        "killed with SIGKILL. A run is equal where weights, optimizer state and everything logged",
        "but the speed are the same bits as in an undisturbed run of as many workers.",
        "",
        "| mode | killed | kills | while saving | steps replayed (least, median, most) |",
        "|---|---|---|---|---|",
    ]
    for mode in ("local", "ray"):
        kills = [Kill(**kill) for run in runs if run["mode"] == mode for kill in run["kills"]]
        for target in sorted({kill.target for kill in kills}):
            those = [kill for kill in kills if kill.target == target]
            replayed = [kill.replayed for kill in those]
            lines.append(
                f"| {mode} | {target} | {len(those)} | {sum(kill.saving for kill in those)} | "
                f"{min(replayed)}, {statistics.median(replayed):g}, {max(replayed)} |"
            )
    lines += ["", "| mode | runs | kills | equal to the bit | different |", "|---|---|---|---|---|"]
    for mode in ("local", "ray"):
        those_runs = [run for run in runs if run["mode"] == mode]
        equal = [run for run in those_runs if not run["differences"]]
        kills_done = sum(len(run["kills"]) for run in those_runs)
        different = ", ".join(run["run"] for run in those_runs if run["differences"]) or "none"
        lines.append(f"| {mode} | {len(those_runs)} | {kills_done} | {len(equal)} | {different} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
