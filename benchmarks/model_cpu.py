"""Training speed and memory of the hybrid on this CPU, beside transformers' NemotronH.

Method: one 5M-parameter hybrid, the same weights, batch and FP32 tensors for both; one step is
forward, summed cross-entropy and backward (no optimizer). Speed: rounds that alternate between the
two in one process, the best round each (other load on the machine only slows). Memory: a process
each, the peak resident size of three steps less the size after the model is built. `--compile`
adds ours under `train.compile=true`, whose first step takes minutes. `--floor` adds what no code
around them can take away: the step's products with weights, alone, each at its best of rounds.
`--profile` adds the shares of our step's time, by torch's profiler: of products with weights, of
attention's kernels, and of our functions with hand-written gradients, forward and backward.

    python benchmarks/model_cpu.py [--json] [--shape wide|deep] [--threads N] [--rounds 5]
                                   [--compile] [--floor] [--profile]
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model import HybridModel, ModelConfig, count_parameters
from model.hf import config_to_nemotron_h, to_nemotron_h

NAMES = ("ours", "transformers")
COMPILED = "compiled"

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
    if name != "transformers":
        ours = HybridModel(config)
        if name == COMPILED:
            ours.compile_blocks()
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
    names = (*NAMES, COMPILED) if arguments.compile else NAMES
    steps = {n: build_step(n, config, arguments.batch, arguments.tokens) for n in names}
    losses = {name: step() for name, step in steps.items()}
    assert max(losses.values()) - min(losses.values()) < 1e-4, losses
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(arguments.rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    return {name: min(values) for name, values in seconds.items()}


def products_seconds(config: ModelConfig, tokens: int, rounds: int) -> tuple[float, float]:
    """Seconds and operations of a step's products with weights: three a linear."""
    with torch.device("meta"):
        linears = [m for m in HybridModel(config).modules() if isinstance(m, torch.nn.Linear)]
    seconds, operations = 0.0, 0.0
    for (n, k), count in Counter(tuple(linear.weight.shape) for linear in linears).items():
        x, w, grad = torch.randn(tokens, k), torch.randn(n, k), torch.randn(tokens, n)
        for left, right in ((x, w.t()), (grad, w), (grad.t(), x)):
            taken = []
            for _ in range(rounds):
                start = time.perf_counter()
                left @ right
                taken.append(time.perf_counter() - start)
            seconds += count * min(taken)
            operations += count * 2.0 * tokens * n * k
    return seconds, operations


def profile(config: ModelConfig, batch: int, tokens: int) -> dict[str, float]:
    """Shares of one step's time, the largest first: those of a function are with what it calls."""
    step = build_step("ours", config, batch, tokens)
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step()
    events = profiler.key_averages()
    total = sum(event.self_cpu_time_total for event in events)
    shares: Counter[str] = Counter()
    for event in events:
        if own := re.fullmatch(r"_([A-Z]\w+?)(Backward)?", event.key):
            shares[own[1]] += event.cpu_time_total / total
        elif event.key == "aten::mm":
            shares["products with weights"] += event.self_cpu_time_total / total
        elif "scaled_dot_product" in event.key and "_for_cpu" in event.key:
            shares["attention"] += event.self_cpu_time_total / total
    return {name: round(share, 3) for name, share in shares.most_common()}


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
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--floor", action="store_true")
    parser.add_argument("--profile", action="store_true")
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
            "peak_memory_mib": round(memory[name]) if name in memory else None,
        }
        for name in seconds
    ]
    ratios = {
        "train_tokens_vs_transformers": round(seconds["transformers"] / seconds["ours"], 2),
        "peak_memory_vs_transformers": round(memory["ours"] / memory["transformers"], 3),
    }
    if arguments.compile:
        compiled = seconds["transformers"] / seconds[COMPILED]
        ratios["compiled_train_tokens_vs_transformers"] = round(compiled, 2)
    result = {
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}",
        "rows": rows,
        "ratios": ratios,
    }
    if arguments.floor:
        alone, operations = products_seconds(config, count, 2 * arguments.rounds)
        result["products"] = {
            "share_of_our_step": round(alone / seconds["ours"], 2),
            "gflop_per_second": round(operations / alone / 1e9),
            "ratio_if_nothing_else_took_time": round(seconds["transformers"] / alone, 2),
        }
    if arguments.profile:
        result["shares"] = profile(config, arguments.batch, arguments.tokens)
    if arguments.json:
        print(json.dumps(result))
        return
    print(__doc__)
    print(f"{result['machine']}; {count_parameters(config)['total']:,} parameters, {count} tokens")
    for row in rows:
        print("{model:14} {tokens_per_second:8} tokens/s {peak_memory_mib} MiB".format(**row))
    print(ratios)
    if arguments.floor:
        print(result["products"])
    if arguments.profile:
        print(result["shares"])


if __name__ == "__main__":
    main()
