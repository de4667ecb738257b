"""The command line of the burn-in; see `kernels.burnin`."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

import torch

import kernels.burnin
from kernels.burnin.verdicts import exit_code, line, run, summary


def main() -> int:
    """Run all checks and print the page, or JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m kernels.burnin", description=kernels.burnin.__doc__
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("names", nargs="*", help="parts of names of checks; all if none")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            "no CUDA device: the burn-in checks a card. `python -m kernels.check` compiles the "
            "kernels without one, and `make test` runs them in Triton's interpreter",
            file=sys.stderr,
        )
        return 1
    from kernels.burnin.checks import checks

    wanted = arguments.names
    chosen = [(n, c) for n, c in checks() if not wanted or any(part in n for part in wanted)]
    show = (lambda v: None) if arguments.json else (lambda v: print(line(v), flush=True))
    verdicts = run(chosen, torch.device("cuda", 0), report=show)
    if arguments.json:
        print(json.dumps({"rows": [asdict(v) for v in verdicts], "fit": not exit_code(verdicts)}))
    else:
        print(summary(verdicts))
    return exit_code(verdicts)


if __name__ == "__main__":
    sys.exit(main())
