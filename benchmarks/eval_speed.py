"""Requests a second of evaluation: our harness model against the harness's own `hf` model.

Method: one hybrid of the default run's size with random weights and a byte-level BPE of 2,048 ids
trained on the questions; its Hugging Face export in FP32 behind the harness's `hf` model
(`HFLM`, with its cache of one-token answers), and the weights themselves behind ours. Both get the
same requests of the first `--questions` of each file, batches of 32, in rounds that alternate; the
fastest round of each counts, and a warm-up of a few requests comes first. The scores are compared:
a speed with other scores would be none.

    ratios   requests_vs_hf = our requests a second / theirs, over all tasks (goal: at least 1.5)

    python benchmarks/eval_speed.py [--json] [--questions 32] [--rounds 2] [--files ../shared/evals]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from evals.adapter import HarnessModel, Local
from evals.lm import Hybrid
from evals.scoring import Scorer
from evals.tokenizers import Plain
from model import HybridModel, ModelConfig
from model.hf import config_to_nemotron_h, to_nemotron_h

BATCH, MAX_LENGTH, EOS_TOKEN = 32, 512, "<|endoftext|>"
SHAPE = ModelConfig(
    pattern="M-M*-M-",
    vocab_size=2048,
    hidden_size=128,
    ffn_hidden_size=512,
    num_attention_heads=4,
    num_kv_heads=2,
    attention_head_dim=32,
    mamba_num_heads=8,
    mamba_head_dim=32,
    mamba_state_size=32,
    mamba_num_groups=2,
    mamba_chunk_size=64,
)
Pairs = list[tuple[str, str]]


def requests(files: Path, questions: int) -> dict[str, Pairs]:
    """Context and continuation of each request, by task, as the local tasks ask them."""
    letters = "ABCD"

    def choices(document: dict, prompt: str) -> Pairs:
        return [(prompt, f" {choice}") for choice in document["choices"]]

    forms: dict[str, tuple[str, Callable[[dict], Pairs]]] = {
        "arc_easy": ("arc_easy.jsonl", lambda d: choices(d, f"{d['query']}\nAnswer:")),
        "piqa": ("piqa.jsonl", lambda d: choices(d, f"{d['query']}Answer:")),
        "openbookqa": ("openbook_qa.jsonl", lambda d: choices(d, d["query"])),
        "mmlu_stem": (
            "mmlu_stem.jsonl",
            lambda d: [
                (
                    "\n".join(
                        [
                            d["question"],
                            *(f"{a}. {o}" for a, o in zip(letters, d["options"], strict=True)),
                            "Answer:",
                        ]
                    ),
                    f" {letter}",
                )
                for letter in letters
            ],
        ),
        "lambada": (
            "lambada_openai.jsonl",
            lambda d: [(d["context"], f" {d['continuation']}")],
        ),
    }
    found = {}
    for task, (file, form) in forms.items():
        lines = (files / file).read_text(encoding="utf-8").splitlines()[:questions]
        found[task] = [pair for line in lines for pair in form(json.loads(line))]
    return found


def train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SHAPE.vocab_size,
        special_tokens=[EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def export(model: HybridModel, tokenizer: Tokenizer, folder: Path) -> None:
    """What transformers reads: configuration, weights in FP32, tokenizer."""
    eos = tokenizer.token_to_id(EOS_TOKEN)
    values = config_to_nemotron_h(SHAPE, eos_token_id=eos, pad_token_id=eos)
    (folder / "config.json").write_text(json.dumps(values))
    tensors = {k: v.contiguous() for k, v in to_nemotron_h(model.state_dict(), SHAPE).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS_TOKEN,
        "pad_token": EOS_TOKEN, "bos_token": None, "unk_token": None,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def score(lm: Any, pairs: Pairs) -> tuple[list[tuple[float, bool]], float]:
    """The scores, and the seconds that they took."""
    asked = [SimpleNamespace(args=pair, task_name="t") for pair in pairs]
    start = time.perf_counter()
    scores = lm.loglikelihood(asked, disable_tqdm=True)
    return scores, time.perf_counter() - start


def measure(lms: dict[str, Any], tasks: dict[str, Pairs], rounds: int) -> list[dict[str, Any]]:
    """A row for each task: requests a second of both, and the largest difference of scores."""
    rows = []
    for task, pairs in tasks.items():
        fastest = dict.fromkeys(lms, float("inf"))
        scores: dict[str, list[tuple[float, bool]]] = {}
        for lm in lms.values():
            score(lm, pairs[:4])
        for _ in range(rounds):
            for name, lm in lms.items():
                scores[name], seconds = score(lm, pairs)
                fastest[name] = min(fastest[name], seconds)
        ours, hf = (scores[name] for name in ("ours", "hf"))
        gap = max(abs(a - b) for (a, _), (b, _) in zip(ours, hf, strict=True))
        assert gap < 1e-2, f"{task}: log-likelihoods differ by {gap}"
        rows.append(
            {"task": task, "requests": len(pairs), "difference": gap}
            | {f"{name}_seconds": fastest[name] for name in lms}
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Evaluation's requests a second.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--questions", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--files", type=Path, default=Path(__file__).resolve().parents[2] / "shared" / "evals"
    )
    options = parser.parse_args()
    from lm_eval.models.huggingface import HFLM

    tasks = requests(options.files, options.questions)
    tokenizer = train_tokenizer(
        [text for pairs in tasks.values() for pair in pairs for text in pair]
    )
    eos = tokenizer.token_to_id(EOS_TOKEN)
    model = HybridModel(SHAPE, seed=0).eval()
    plain = Plain(tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        export(model, tokenizer, Path(folder))
        lms = {
            "ours": HarnessModel(
                Local(Scorer(Hybrid(model), plain, eos)), plain, eos, MAX_LENGTH, BATCH
            ),
            "hf": HFLM(
                pretrained=folder, device="cpu", dtype="float32", batch_size=BATCH,
                max_length=MAX_LENGTH,
            ),
        }  # fmt: skip
        rows = measure(lms, tasks, options.rounds)
    total = {name: sum(row[f"{name}_seconds"] for row in rows) for name in ("ours", "hf")}
    ratios = {"requests_vs_hf": total["hf"] / total["ours"]}
    machine = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    if options.json:
        print(json.dumps({"machine": machine, "rows": rows, "ratios": ratios}))
        return
    print(__doc__)
    print(machine)
    print(f"{'task':<12}{'requests':>9}{'ours /s':>10}{'hf /s':>10}{'ratio':>8}{'difference':>12}")
    for row in rows:
        ours, hf = (row["requests"] / row[f"{name}_seconds"] for name in ("ours", "hf"))
        print(
            f"{row['task']:<12}{row['requests']:>9}{ours:>10.1f}{hf:>10.1f}{ours / hf:>8.2f}"
            f"{row['difference']:>12.1e}"
        )
    print(f"requests_vs_hf = {ratios['requests_vs_hf']:.2f}")


if __name__ == "__main__":
    main()
