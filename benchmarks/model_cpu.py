"""Training speed and memory of the hybrid on this CPU, beside transformers' NemotronH.

Method: one 5M-parameter hybrid, the same weights, batch and FP32 tensors for both; one step is
forward, summed cross-entropy and backward (no optimizer). Speed: rounds that alternate between the
two in one process, the best round each (other load on the machine only slows). Memory: a process
each, the peak resident size of three steps less the size after the model is built.

    python benchmarks/model_cpu.py [--json] [--shape wide|deep] [--threads N] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model import HybridModel, ModelConfig, count_parameters
from model.hf import config_to_nemotron_h, to_nemotron_h

NAMES = ("ours", "transformers")


COMMON = {
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "mamba_num_heads": 8,
    "mamba_num_groups": 2,
    "mamba_chunk_size": 128,
}
SHAPES = {
    "deep": ModelConfig(
        pattern="M-M*-M-" * 6,
        vocab_size=2048,
        hidden_size=128,
        ffn_hidden_size=384,
        attention_head_dim=32,
        mamba_head_dim=32,
        mamba_state_size=32,
        **COMMON,
    ),
    "wide": ModelConfig(
        pattern="M-M*-M-",
        vocab_size=4096,
        hidden_size=256,
        ffn_hidden_size=768,
        attention_head_dim=64,
        mamba_head_dim=64,
        mamba_state_size=128,
        **COMMON,
    ),
}
"""Both about 5M parameters: the published proportions at hidden size 256 (state and chunk 128, head
dim 64), and the default model, 128 wide, six times as deep."""


def build_step(name: str, config: ModelConfig, batch: int, tokens: int) -> Callable[[], float]:
    """A function that runs one training step and returns the mean loss."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config.vocab_size, (batch, tokens), generator=generator)
    if name == "ours":
        ours = HybridModel(config)
        labels = ids.roll(-1, 1)
        labels[:, -1] = -100
        seq_idx = torch.zeros_like(ids, dtype=torch.int32)

        def step() -> float:
            ours.zero_grad()
            loss, count = ours.loss(ids, labels, seq_idx)
            (loss / count).backward()
            return (loss / count).item()

        return step

    import transformers

    transformers.logging.set_verbosity_error()
    theirs = transformers.NemotronHForCausalLM(
        transformers.NemotronHConfig(**config_to_nemotron_h(config), use_cache=False)
    )
    theirs.load_state_dict(to_nemotron_h(HybridModel(config).state_dict(), config))

    def step_theirs() -> float:
        theirs.zero_grad()
        loss = theirs(ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.item()

    return step_theirs


def measure_speed(config: ModelConfig, arguments: argparse.Namespace) -> dict[str, float]:
    """Seconds a step of each, the best of alternating rounds."""
    steps = {n: build_step(n, config, arguments.batch, arguments.tokens) for n in NAMES}
    losses = {name: step() for name, step in steps.items()}
    assert abs(losses["ours"] - losses["transformers"]) < 1e-4, losses
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    for _ in range(arguments.rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    return {name: min(values) for name, values in seconds.items()}


def peak_memory(name: str, config: ModelConfig, batch: int, tokens: int) -> float:
    """MiB that three steps add to this process's peak resident size."""
    step = build_step(name, config, batch, tokens)
    before = memory_status("VmRSS")
    for _ in range(3):
        step()
    return memory_status("VmHWM") - before


def memory_status(field: str) -> float:
    """A field of this process's memory status in MiB. (getrusage's peak would not do: a process
    inherits it from the one that started it.)"""
    line = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert line is not None
    return int(line[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--shape", choices=SHAPES, default="deep")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--memory-of", choices=NAMES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    config = SHAPES[arguments.shape]
    if arguments.memory_of:
        print(peak_memory(arguments.memory_of, config, arguments.batch, arguments.tokens))
        return

    seconds = measure_speed(config, arguments)
    memory = {
        name: float(subprocess.check_output([sys.executable, *sys.argv, "--memory-of", name]))
        for name in NAMES
    }
    count = arguments.batch * arguments.tokens
    rows = [
        {
            "model": name,
            "tokens_per_second": round(count / seconds[name]),
            "peak_memory_mib": round(memory[name]),
        }
        for name in NAMES
    ]
    result = {
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}",
        "rows": rows,
        "ratios": {
            "train_tokens_vs_transformers": round(seconds["transformers"] / seconds["ours"], 2),
            "peak_memory_vs_transformers": round(memory["ours"] / memory["transformers"], 3),
        },
    }
    if arguments.json:
        print(json.dumps(result))
        return
    print(__doc__)
    print(f"{result['machine']}; {count_parameters(config)['total']:,} parameters, {count} tokens")
    for row in rows:
        print("{model:14} {tokens_per_second:8} tokens/s {peak_memory_mib:8} MiB".format(**row))
    print(result["ratios"])


if __name__ == "__main__":
    main()
