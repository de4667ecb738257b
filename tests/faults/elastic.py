"""A run on two Ray nodes that loses one, goes on with the other, and grows when it comes back.

    python -m tests.faults.elastic --folder FOLDER

Each node has room for one worker. The second one's raylet is killed with SIGKILL, and with it its
worker; a new one is started once the run has gone on alone. With `train.reproducible` the end must
be, to the bit, that of an undisturbed run of one process: a unit that was left out or taken twice
would show. Prints what it found as JSON; exits with 1 where something differs.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

from ray.cluster_utils import Cluster

from pipeline.ray_session import QUIET
from tests.faults.harness import TOKENS_PER_STEP, Case, differences

STEPS = 1600  # Ray Train learns of a new node within half a minute: by then some are left
SETTINGS = (
    "train.reproducible=true", f"train.tokens={STEPS * TOKENS_PER_STEP}",
    f"train.max_skipped_steps={STEPS}",  # so few rows a step have spikes, which are skipped alike
)  # fmt: skip
ELASTIC = (
    "cluster=cpu2", "cluster.min_workers=1", "cluster.resize_seconds=2", "cluster.max_failures=100"
)  # fmt: skip
PATIENCE = 900.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    folder = parser.parse_args().folder.resolve()
    os.environ.update(QUIET | {"RAY_worker_niceness": "0"})
    undisturbed = Case(folder, "undisturbed", settings=SETTINGS)
    assert undisturbed.run([]) == []
    case = Case(folder, "elastic", settings=(*SETTINGS, *ELASTIC))
    sizes, replayed = disturbed(case)
    found = differences(case, undisturbed, STEPS)
    result = {"workers": sizes, "steps": STEPS, "steps_done_again": replayed, "differences": found}
    print(json.dumps(result))
    raise SystemExit(bool(found) or sizes != [2, 1, 2])


def disturbed(case: Case) -> tuple[list[int], int]:
    """Run it through the loss and the return of a node: the numbers of workers that it had."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        second = cluster.add_node(num_cpus=1)
        case.settings = (*case.settings, f"cluster.address={cluster.address}")
        process = case.start()
        wait(case, starts=1, steps_on=60)
        cluster.remove_node(second, allow_graceful=False)
        wait(case, starts=2, steps_on=20)
        cluster.add_node(num_cpus=1)
        assert process.wait(PATIENCE) == 0, f"see {case.log}"
    finally:
        cluster.shutdown()
    records = case.records()
    starts = [record for record in records if record["kind"] == "start"]
    steps = [record["step"] for record in records if record["kind"] == "train"]
    return [int(start["metrics"]["start/ranks"]) for start in starts], len(steps) - len(set(steps))


def wait(case: Case, starts: int, steps_on: int) -> None:
    """Until the run's start of that number has done so many steps."""
    deadline = time.monotonic() + PATIENCE
    while True:
        assert time.monotonic() < deadline, f"see {case.log}"
        seen = case.records()
        places = [i for i, record in enumerate(seen) if record["kind"] == "start"]
        if len(places) >= starts:
            done = [r for r in seen[places[starts - 1] :] if r["kind"] == "train"]
            if len(done) >= steps_on:
                return
        time.sleep(0.05)


if __name__ == "__main__":
    main()
