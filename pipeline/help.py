"""Help texts made from the `conf/` folder, and hints on misspelt overrides. Light to import."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from pipeline.config import flatten, nearest

CONF = Path(__file__).resolve().parents[1] / "conf"

VERBS = {
    "run": "all stages: prepare a corpus, train, evaluate, report",
    "prepare": "tokenize and pack the corpus; reused while its inputs are unchanged",
    "train": "prepare where needed, then train",
    "eval": "evaluate a run, a checkpoint or a model folder: eval run=<id|latest|folder>",
    "report": "write a run's report again: report run=<id|latest>",
    "compare": "recipes against BF16: compare fidelity run=<id|latest>, compare +study=<name>",
    "export": "write a run's checkpoint as a Hugging Face folder: export run=<id|latest>",
    "generate": 'continue a text: generate run=<id|latest> prompt="..."',
    "plan": "what a run would take: memory, time, bytes, money; needs neither GPUs nor data",
    "manifest": "a job's Kubernetes objects: manifest +experiment=... cluster=gb200",
    "submit": "hand a job over to Kubernetes, or to cluster.address=http://<head>:8265",
    "logs": "what a submitted job prints, given the same overrides",
    "stop": "ask a submitted job to write a checkpoint and end, given the same overrides",
    "status": "a run at a glance: status run=<id|latest>; without run=, a submitted job",
    "data": "a corpus and its plan (show), a row (inspect), what a step saw (at)",
    "track": "send a run's metrics to MLflow that could not be sent before: track run=<id|latest>",
}

# Verbs that take another word, which says what they do.
KINDS = {"compare": ("fidelity", "study"), "data": ("show", "inspect", "at")}

EXAMPLES = {
    "run": (
        ("run", "the default: a tiny hybrid on this machine, in minutes"),
        ("run precision=bf16", "another precision"),
        ("run train.tokens=500_000", "shorter"),
        ("run 'stages=[prepare,train]'", "some stages"),
        ("run resume=true", "go on with the interrupted run of the same configuration"),
        ("run +experiment=12b_nvfp4", "the paper's 12B"),
        ("run --cfg job", "print the resolved configuration and stop"),
        ("run -m precision=bf16,nvfp4", "one run after the other"),
    ),
    "prepare": (("prepare data=builtin", "prepare the default corpus"),),
    "train": (("train precision=fp8", "without evaluation and report"),),
    "eval": (
        ("eval run=latest", "evaluate the newest run again"),
        ("eval run=latest evals=paper step=all", "the paper's tasks, on every checkpoint"),
        ("eval run=latest evals=offline files=<folder>", "public test sets from local files"),
        ("eval run=latest evals=offline 'evals.tasks=[local_piqa]' limit=200", "one, in part"),
        ("eval run=latest precision=recipe", "with weights and activations as trained"),
        ("eval run=latest watch=true", "each new checkpoint of a run that is training"),
        ("eval run=<Hugging Face folder> evals=paper", "another model, for the same table"),
    ),
    "report": (("report run=latest", "write the report again"),),
    "compare": (
        ("compare fidelity run=latest", "each recipe's error on a run's newest checkpoint"),
        ("compare fidelity run=latest 'fidelity.steps=[120,240]'", "on those checkpoints"),
        ("compare fidelity run=latest 'fidelity.recipes=[fp8_block,nvfp4]'", "these recipes"),
        ("compare +study=precision", "train a run for each recipe and seed, and compare them"),
    ),
    "export": (
        ("export run=latest", "the newest checkpoint, as transformers reads it"),
        ("export run=latest step=240 dtype=bfloat16 folder=out", "that one, there, in BF16"),
        ("export run=latest format=nvfp4-compressed-tensors", "packed as it was trained"),
        ("export run=latest format=nvfp4-modelopt", "the same in ModelOpt's layout"),
    ),
    "generate": (
        ('generate run=latest prompt="Once upon a time"', "greedily"),
        ('generate run=latest prompt="def " temperature=0.8 top_p=0.9 seed=1', "by drawing"),
        ("generate run=latest prompts=file.txt max_new_tokens=40", "each line of a file"),
    ),
    "plan": (
        ("plan +experiment=12b_nvfp4", "the paper's 12B on its cluster"),
        ("plan +experiment=12b_nvfp4 cluster=gb200_nvl72 nodes=8", "on 8 trays"),
        ("plan +experiment=8b_nvfp4 cluster=h200 nodes=auto", "the fewest nodes that fit"),
        ("plan +experiment=8b_nvfp4 price=3.5", "with what it costs at a price an hour"),
        ("plan +experiment=8b_nvfp4 gemm_efficiency.fp4=0.5", "with other assumptions"),
    ),
    "manifest": (
        ("manifest +experiment=12b_nvfp4 cluster=gb200 nodes=16", "a RayJob that trains"),
        ("manifest kind=eval +experiment=12b_nvfp4 cluster=gb200", "one that evaluates its run"),
        ("manifest kind=cluster cluster=kind", "a RayCluster to work on by hand"),
    ),
    "submit": (
        ("submit +experiment=12b_nvfp4 cluster=gb200 nodes=16", "apply what manifest prints"),
        ("submit name=mine cluster=cpu2 cluster.address=http://head:8265", "to a Ray cluster"),
    ),
    "logs": (("logs +experiment=12b_nvfp4 cluster=gb200", "follow it"),),
    "stop": (("stop +experiment=12b_nvfp4 cluster=gb200", "its pods write a checkpoint first"),),
    "status": (
        ("status run=latest", "where the newest run stands"),
        ("status +experiment=12b_nvfp4 cluster=gb200", "where a submitted job stands"),
    ),
    "data": (
        ("data show", "sources, tokens, phases, and how often each source is seen"),
        ("data show run=latest", "the same of a run"),
        ("data inspect source=code row=7", "a row of the corpus, document by document"),
        ("data at run=latest step=130", "what step 130, as messages number it, was trained on"),
    ),
    "track": (("track run=latest", "catch up with the tracking store"),),
}


def groups() -> dict[str, list[str]]:
    """Each config group with its choices; a file that begins with `_` is a part of others."""
    return {
        folder.name: sorted(path.stem for path in folder.glob("[!_]*.yaml"))
        for folder in sorted(CONF.iterdir())
        if folder.is_dir() and not folder.name.startswith("_")
    }


def experiments() -> dict[str, str]:
    """Each experiment with its first comment line."""
    described = {}
    for path in sorted((CONF / "experiment").glob("*.yaml")):
        comments = [line[2:] for line in path.read_text().splitlines() if line.startswith("# ")]
        described[path.stem] = next(line for line in comments if not line.startswith("@package"))
    return described


def main_help() -> str:
    """What `python -m pipeline --help` prints."""
    return "\n".join(
        [
            "usage: python -m pipeline <verb> [key=value ...]",
            "",
            "Pre-train hybrid Mamba-Transformer language models in 4 bits (NVFP4).",
            "",
            *_table("verbs", VERBS.items()),
            *_group_lines(),
            *_table("examples", ((f"python -m pipeline {a}", b) for a, b in EXAMPLES["run"])),
            "python -m pipeline <verb> --help tells more of one verb.",
        ]
    )


def verb_help(verb: str) -> str:
    """What `python -m pipeline <verb> --help` prints."""
    return "\n".join(
        [
            f"usage: python -m pipeline {verb} [key=value ...]",
            "",
            f"{verb}: {VERBS[verb]}",
            "",
            *_table("examples", ((f"python -m pipeline {a}", b) for a, b in EXAMPLES[verb])),
            *_group_lines(),
            *_table("keys (defaults)", sorted(flatten(_defaults()).items())),
        ]
    )


def explain_override(override: str) -> str | None:
    """A hint where an override names no key, group or choice that exists, else None."""
    name, separator, value = override.lstrip("+~").partition("=")
    if override.startswith("-") or not separator:
        return None
    choices = groups()
    if name in choices:
        if "," in value or value in choices[name] or value == "null":
            return None
        return f"{name}={value}: no such choice of {name}; {nearest(value, choices[name])}"
    known = flatten(_defaults())
    if name in known or name.startswith("hydra.") or override.startswith("+"):
        return None
    if any(key.startswith(f"{name}.") for key in known):
        return None
    if any(name.startswith(f"{key}.") for key in known):
        return None
    return f"{name}: no such key; {nearest(name, [*known, *choices])}"


@cache
def _defaults() -> dict[str, Any]:
    """The default configuration, unresolved, read from the files with no Hydra."""
    import yaml

    main = yaml.safe_load((CONF / "config.yaml").read_text())
    composed = {k: v for k, v in main.items() if k not in {"defaults", "hydra"}}
    for entry in main["defaults"]:
        if isinstance(entry, dict):
            for group, choice in entry.items():
                if not group.startswith("override"):
                    composed[group] = _section(CONF / group, choice)
    return composed


def _section(folder: Path, choice: str) -> dict[str, Any]:
    """A choice of a group, on top of the files of the group that it is made of."""
    import yaml

    own = yaml.safe_load((folder / f"{choice}.yaml").read_text())
    parts = [part for part in own.pop("defaults", []) if part != "_self_"]
    return {k: v for part in parts for k, v in _section(folder, part).items()} | own


def _group_lines() -> list[str]:
    described = ((name, ", ".join(choices)) for name, choices in groups().items())
    return [
        *_table(
            "groups (choose with group=choice)", (g for g in described if g[0] != "experiment")
        ),
        *_table("experiments (choose with +experiment=name)", experiments().items()),
    ]


def _table(title: str, rows: Any) -> list[str]:
    rows = [(str(left), str(right)) for left, right in rows]
    width = min(max(len(left) for left, _ in rows), 48)
    return [f"{title}:", *(f"  {left:<{width}}  {right}" for left, right in rows), ""]
