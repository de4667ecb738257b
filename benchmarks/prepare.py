"""What preparing a corpus costs beside tokenizing it, and that its memory does not grow.

Method: the text of `make corpus` (or of `--corpus`), as JSON lines, and a tokenizer trained on it
before. Each size is a prefix of every file. Rounds alternate between the candidates; medians count.

    encode_batch  `tokenizers.encode_batch` over the same documents, already in memory as strings,
                  with as many threads as Ray runs tasks: the ids and nothing else
    prepare       `pipeline.data.prepare` from the files to the finished corpus, with Ray running:
                  read, hash, deduplicate, hold out, tokenize, write shards, check-sum

    memory        the highest private memory (USS), sampled every 50 ms: of this process above what
                  it was before (driver), of the largest of Ray's processes (worker), and the sum of
                  all above what it was before

    cpu           seconds of processor time of this process and Ray's: what remains of a candidate's
                  time on a machine that is shared with others, and with nothing to wait for

    ratios   prepare_vs_encode_batch = text per second of prepare / of encode_batch (goal: 0.8)
             prepare_vs_encode_batch_cpu = the same, by processor time
             driver_memory_large_vs_small, worker_memory_..., memory_... = the highest at the large
             size / at the small one

    python benchmarks/prepare.py [--json] [--rounds 1] [--megabytes 5 20] [--corpus corpus]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil

from pipeline.config import DataConfig, SourceConfig, TokenizerConfig
from pipeline.data.prepare import prepare
from pipeline.data.shards import Dataset
from pipeline.data.tokenizer import load_tokenizer, train_tokenizer
from pipeline.ray_session import ray_session

THREADS = os.cpu_count() or 1  # what a local Ray runs at once: see `pipeline.ray_session`
os.environ.setdefault("RAY_worker_niceness", "0")  # both candidates at the same priority
SIZES = (5.0, 20.0)  # megabytes of text
MEMORY = ("driver", "worker", "total")
FILE_BYTES = 4_000_000  # of each input file, about: enough files for all threads


def cut(corpus: Path, folder: Path, megabytes: float) -> list[str]:
    """The first part of each domain's files, together so many megabytes; returns its texts."""
    files = sorted(corpus.glob("*/*.jsonl"))
    share, texts = megabytes * 1e6 / len(files), []
    for file in files:
        lines, size = [], 0
        with file.open(encoding="utf-8") as source:
            for line in source:
                if size >= share:
                    break
                lines.append(line)
                size += len(line.encode())
        step = max(1, int(len(lines) * FILE_BYTES / max(size, 1)))
        for start in range(0, len(lines), step):
            target = folder / file.parent.name / f"{file.stem}-{start}.jsonl"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text("".join(lines[start : start + step]), encoding="utf-8")
        texts += [json.loads(line)["text"] for line in lines]
    return texts


def configuration(folder: Path, tokenizer: Path) -> DataConfig:
    sources = {
        domain.name: SourceConfig(uris=(str(domain),), format="jsonl")
        for domain in sorted(folder.iterdir())
    }
    return DataConfig("benchmark", sources, TokenizerConfig(path=str(tokenizer)))


def processes() -> list[psutil.Process]:
    """This one and Ray's."""
    return [psutil.Process(), *psutil.Process().children(recursive=True)]


def cpu_seconds() -> float:
    """Processor time so far of all that still run: Ray keeps its workers."""
    total = 0.0
    for process in processes():
        with suppress(psutil.Error):  # it ended meanwhile
            times = process.cpu_times()
            total += times.user + times.system
    return total


class Stopwatch:
    """Seconds, and processor seconds, of each of the blocks it measures."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.cpu: list[float] = []

    @contextmanager
    def measure(self) -> Iterator[None]:
        start, cpu = time.perf_counter(), cpu_seconds()
        yield
        self.seconds.append(time.perf_counter() - start)
        self.cpu.append(cpu_seconds() - cpu)


class Peak:
    """The most private memory that was held, in bytes: see the top."""

    def __init__(self) -> None:
        self.driver = self.worker = self.total = 0

    @contextmanager
    def watch(self) -> Iterator[None]:
        ended = threading.Event()
        own, others = private_memory()
        total = own + sum(others)

        def sample() -> None:
            while not ended.wait(0.05):
                driver, workers = private_memory()
                self.driver = max(self.driver, driver - own)
                self.worker = max(self.worker, *workers)
                self.total = max(self.total, driver + sum(workers) - total)

        thread = threading.Thread(target=sample)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def private_memory() -> tuple[int, list[int]]:
    """Of this process, and of each of Ray's."""
    own, *others = processes()
    sizes = [0]
    for process in others:
        with suppress(psutil.Error):  # it ended meanwhile
            sizes.append(process.memory_full_info().uss)
    return own.memory_full_info().uss, sizes


def one_size(corpus: Path, megabytes: float, rounds: int) -> dict[str, Any]:
    """One row: speeds in megabytes of text a second, and the peak of memory. Ray must run."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    os.environ["RAYON_NUM_THREADS"] = str(THREADS)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        texts = cut(corpus, folder / "text", megabytes)
        path = folder / "tokenizer.json"
        sample = [text for text in texts[:: max(1, len(texts) // 2000)]]
        train_tokenizer(sample, TokenizerConfig(vocab_size=8192)).save(str(path))
        size = sum(len(text.encode()) for text in texts)
        data, tokenizer = configuration(folder / "text", path), load_tokenizer(path)
        encode, whole, peak = Stopwatch(), Stopwatch(), Peak()
        # The first preparation warms Ray up; memory is watched in the last, which is not timed.
        for number in range(rounds + 2):
            timed = 0 < number <= rounds
            if timed:
                with encode.measure():
                    for first in range(0, len(texts), 1000):
                        batch = texts[first : first + 1000]
                        tokenizer.encode_batch(batch, add_special_tokens=False)
            watching = whole.measure() if timed else peak.watch() if number else nullcontext()
            root = folder / f"root{number}"
            with watching:
                prepared = prepare(data, root, progress=lambda _: None)
            if timed:
                steps = Dataset.open(prepared).manifest["made_by"]["seconds"]
            shutil.rmtree(root)
    median, mb = statistics.median, size / 1e6
    return {
        "megabytes": round(mb, 1),
        "documents": len(texts),
        "encode_batch_mb_per_s": round(mb / median(encode.seconds), 2),
        "prepare_mb_per_s": round(mb / median(whole.seconds), 2),
        "encode_batch_cpu_s": round(median(encode.cpu), 2),
        "prepare_cpu_s": round(median(whole.cpu), 2),
        **{f"{name}_mb": round(getattr(peak, name) / 1e6, 1) for name in MEMORY},
        "steps": steps,
        "prepare_vs_encode_batch": median(encode.seconds) / median(whole.seconds),
        "prepare_vs_encode_batch_cpu": median(encode.cpu) / median(whole.cpu),
    }


def measure(
    corpus: Path = Path("corpus"), sizes: Sequence[float] = SIZES, rounds: int = 1
) -> dict[str, Any]:
    """The rows of all sizes and the ratios, for this script and for `benchmarks/data.py`."""
    if not list(corpus.glob("*/*.jsonl")):
        sys.exit(f"error: no corpus at {corpus}; run `make corpus` first")
    with ray_session():
        rows = [one_size(corpus, size, rounds) for size in sizes]
    ratios = {
        name: round(rows[-1][name], 3)
        for name in ("prepare_vs_encode_batch", "prepare_vs_encode_batch_cpu")
    } | {
        f"{name}_large_vs_small": round(rows[-1][key] / rows[0][key], 3)
        for name, key in (
            ("driver_memory", "driver_mb"),
            ("worker_memory", "worker_mb"),
            ("memory", "total_mb"),
        )
    }
    machine = {"cpu": platform.processor() or platform.machine(), "threads": THREADS}
    return {"machine": machine, "rows": rows, "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--megabytes", type=float, nargs="+", default=SIZES)
    parser.add_argument("--corpus", type=Path, default=Path("corpus"))
    arguments = parser.parse_args()
    result = measure(arguments.corpus, arguments.megabytes, arguments.rounds)
    if arguments.json:
        print(json.dumps(result))
        return
    assert __doc__ is not None
    print(__doc__.split("    python ")[0])
    heads = "encode_batch MB/s, cpu s", "prepare", "MB held: driver, worker, all"
    print(f"{'MB':>8} {'documents':>10} {heads[0]:>25} {heads[1]:>16} {heads[2]:>30}")
    for row in result["rows"]:
        print(
            f"{row['megabytes']:8} {row['documents']:10,} {row['encode_batch_mb_per_s']:16} "
            f"{row['encode_batch_cpu_s']:8} {row['prepare_mb_per_s']:8} {row['prepare_cpu_s']:7} "
            f"{row['driver_mb']:12} {row['worker_mb']:8} {row['total_mb']:8}  {row['steps']}"
        )
    print(result["ratios"])


if __name__ == "__main__":
    main()
