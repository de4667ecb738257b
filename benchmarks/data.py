"""How fast batches reach training: this project's executors beside other readers of the same rows.

Method: two sources of random ids, 24,576 rows of 2,048 tokens in all (uint16, 16 shards), written
to a temporary folder and so in the page cache; batches of 32 rows in a shuffled, blended order.
Each reader runs in a process of its own, `--seconds` to warm up and as long again in which the
tokens count; the best of three rounds (the large systems: of one). Ours make ids, labels and
document numbers; the others hand out ids alone. mosaicml-streaming gets a virtual environment of
its own, made in the temporary folder, and is left out where it cannot be installed.

The ratios: `mmap_vs_random_gather` against copying random rows of one mapped file into int64
tensors; `vs_*` our executor of the same kind against that reader (Ray Data's against Ray Data's);
`resume_end_vs_start` the time to a first batch at the end of the plan over that at its start;
`default_run_wait_share` the share of the default run's step time that waited for data;
`prepare_vs_encode_batch` is `benchmarks/prepare.py`'s.

    python benchmarks/data.py [--json] [--parts readers,ray,...] [--seconds 3]

The parts: readers, ray, parquet, hf, mosaic, resume, run, prepare.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

ROWS, LENGTH, BATCH, VOCAB = 24_576, 2_048, 32, 2_048
SOURCES = {"code": 0.6, "prose": 0.4}
PARTS = ("readers", "ray", "parquet", "hf", "mosaic", "resume", "run", "prepare")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--parts", default=",".join(PARTS), help="what to measure")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--folder", type=Path, help="keep the rows here, and use them again")
    parser.add_argument("--reader", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.reader:
        print(json.dumps(measure_reader(arguments)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        arguments.folder = arguments.folder or Path(temporary)
        result = measure(arguments)
    if arguments.json:
        print(json.dumps(result))
        return
    print(__doc__)
    print(result["machine"])
    for row in result["rows"]:
        name, speed = f"{row['reader']} x{row['consumers']}", row["million_tokens_per_s"]
        print(f"{name:32} {speed:9,.0f} M tokens/s   first batch {row['first_batch_s']:6.2f} s")
    for name, value in result["ratios"].items():
        print(f"{name:32} {value}")


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything that `--parts` names, as {machine, rows, ratios}."""
    parts = set(arguments.parts.split(","))
    write_rows(arguments.folder)
    rows: list[dict[str, Any]] = []

    def reader(name: str, consumers: int = 1, rounds: int = 1, **settings: Any) -> float:
        rounds_ = [run_reader(arguments, name, consumers, **settings) for _ in range(rounds)]
        best = max(rounds_, key=lambda row: row["million_tokens_per_s"])
        rows.append({"reader": name, "consumers": consumers, **best})
        return best["million_tokens_per_s"]

    ratios: dict[str, Any] = {}
    if parts & {"readers", "hf", "mosaic"}:
        reader("mapped file, in order", rounds=3)
        gather = reader("mapped file, random rows", rounds=3)
        mapped = reader("this project, mmap", rounds=3)
        reader("this project, mmap", consumers=2)
        ratios["mmap_vs_random_gather"] = round(mapped / gather, 2)
    if parts & {"ray", "parquet"}:
        with ray_cluster() as address:
            speeds = [
                reader("this project, Ray Data", consumers, address=address) for consumers in (1, 2)
            ]
            ratios["ray_tokens_per_s"] = round(min(speeds) * 1e6)
            if "parquet" in parts:
                write_parquet(arguments.folder)
                peer = reader("Ray Data, Parquet", address=address)
                ratios["vs_ray_data_parquet"] = round(speeds[0] / peer, 2)
    if "hf" in parts:
        write_parquet(arguments.folder)
        ratios["vs_hf_datasets"] = round(mapped / reader("Hugging Face datasets"), 2)
    if "mosaic" in parts:
        python = mosaic_environment(arguments.folder)
        ratios["vs_mosaicml_streaming"] = None
        if python:
            run([python, __file__, "--reader", "write MDS", "--folder", str(arguments.folder)])
            peer = reader("mosaicml-streaming", python=python)
            ratios["vs_mosaicml_streaming"] = round(mapped / peer, 2)
    if "resume" in parts:
        ratios["resume_end_vs_start"] = resume_ratio(arguments.folder)
    if "run" in parts:
        ratios["default_run_wait_share"] = wait_share(arguments.folder)
    if "prepare" in parts:
        from benchmarks.prepare import measure as measure_prepare

        ratios["prepare_vs_encode_batch"] = measure_prepare()["ratios"]["prepare_vs_encode_batch"]
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    return {"machine": machine, "rows": rows, "ratios": ratios}


# ---- Readers ------------------------------------------------------------------------------------


def run_reader(
    arguments: argparse.Namespace,
    name: str,
    consumers: int,
    python: str = sys.executable,
    address: str = "",
) -> dict[str, float]:
    """Run so many processes of a reader at once: tokens/s of all, and the slowest first batch."""
    base = [python, __file__, "--reader", name, "--folder", str(arguments.folder)]
    base += ["--seconds", str(arguments.seconds), "--ranks", str(consumers)]
    environment = os.environ | ({"RAY_ADDRESS": address} if address else {})
    processes = [
        subprocess.Popen([*base, "--rank", str(rank)], stdout=subprocess.PIPE, env=environment)
        for rank in range(consumers)
    ]
    found = []
    for process in processes:
        out, _ = process.communicate()
        if process.returncode:
            raise RuntimeError(f"{name}: a reader failed")
        found.append(json.loads(out.splitlines()[-1]))
    return {
        "million_tokens_per_s": sum(each["tokens_per_s"] for each in found) / 1e6,
        "first_batch_s": max(each["first_batch_s"] for each in found),
    }


def measure_reader(arguments: argparse.Namespace) -> dict[str, float]:
    """In the reader's own process: its speed after the first batch."""
    readers: dict[str, Callable[[argparse.Namespace], Iterator[Any]]] = {
        "mapped file, in order": lambda a: mapped_rows(a, shuffled=False),
        "mapped file, random rows": lambda a: mapped_rows(a, shuffled=True),
        "this project, mmap": lambda a: ours(a, "mmap"),
        "this project, Ray Data": lambda a: ours(a, "ray"),
        "Ray Data, Parquet": ray_parquet,
        "Hugging Face datasets": hugging_face,
        "mosaicml-streaming": mosaic,
    }
    if arguments.reader == "write MDS":
        write_mds(arguments.folder)
        return {}
    import torch

    torch.set_num_threads(1)
    batches = readers[arguments.reader](arguments)
    began = time.perf_counter()
    next(batches)
    first = time.perf_counter() - began
    speed = 0.0
    for _ in ("warm up", "measure"):
        tokens, elapsed, started = 0, 0.0, time.perf_counter()
        while elapsed < arguments.seconds:
            tokens += next(batches).numel()
            elapsed = time.perf_counter() - started
        speed = tokens / elapsed
    return {"tokens_per_s": speed, "first_batch_s": first}


def mapped_rows(arguments: argparse.Namespace, *, shuffled: bool) -> Iterator[Any]:
    import numpy as np
    import torch

    mapped = np.memmap(arguments.folder / "rows.u16", np.uint16, mode="r").reshape(ROWS, LENGTH)
    for seed in itertools.count():
        order = np.random.default_rng(seed).permutation(ROWS)
        for first in range(0, ROWS, BATCH):
            rows = order[first : first + BATCH] if shuffled else slice(first, first + BATCH)
            yield torch.from_numpy(mapped[rows].astype(np.int64))


def ours(arguments: argparse.Namespace, executor: str) -> Iterator[Any]:
    if executor == "ray":
        from pipeline.ray_session import start_ray

        start_ray(None)  # the benchmark's, by RAY_ADDRESS
    stream = build_stream(arguments.folder)
    step = BATCH * arguments.ranks
    starts = range(arguments.rank * BATCH, len(stream.mixture) - step, step)
    requests = ((first, BATCH, LENGTH) for first in starts)
    for batch in stream.iterate(requests, executor=executor):
        yield batch.tokens_BT


def build_stream(folder: Path) -> Any:
    """A blend of the two sources that lasts for 10^8 units."""
    from pipeline.data.mixture import Mixture
    from pipeline.data.shards import Dataset
    from pipeline.data.stream import MixtureStream

    dataset = Dataset.open(folder / "corpus")
    sizes = {name: dataset.num_units(name, LENGTH) for name in dataset.sources}
    return MixtureStream(dataset, Mixture(sizes, [(10**8, SOURCES)]), LENGTH)


def hugging_face(arguments: argparse.Namespace) -> Iterator[Any]:
    import datasets

    parts = [
        datasets.Dataset.from_parquet(str(arguments.folder / f"{name}.parquet"))
        .shuffle(seed=0)
        .with_format("torch")
        for name in SOURCES
    ]
    blended = datasets.interleave_datasets(
        parts, probabilities=list(SOURCES.values()), seed=0, stopping_strategy="all_exhausted"
    )
    while True:
        for batch in blended.iter(BATCH):
            yield batch["tokens"]


def ray_parquet(arguments: argparse.Namespace) -> Iterator[Any]:
    import ray
    import torch

    from pipeline.ray_session import start_ray

    start_ray(None)
    ray.data.DataContext.get_current().enable_progress_bars = False
    paths = [str(arguments.folder / f"{name}.parquet") for name in SOURCES]
    while True:
        rows = ray.data.read_parquet(paths)
        for table in rows.iter_batches(batch_size=BATCH, batch_format="pyarrow"):
            flat = table["tokens"].combine_chunks().flatten().to_numpy().astype("int64")
            yield torch.from_numpy(flat.reshape(-1, LENGTH))


def mosaic(arguments: argparse.Namespace) -> Iterator[Any]:
    import torch
    from streaming import Stream, StreamingDataset

    streams = [
        Stream(local=str(arguments.folder / "mds" / name), proportion=share)
        for name, share in SOURCES.items()
    ]
    rows = StreamingDataset(
        streams=streams, batch_size=BATCH, shuffle=True, shuffle_seed=0, epoch_size=ROWS
    )
    while True:
        for batch in torch.utils.data.DataLoader(rows, BATCH, num_workers=1):
            yield batch["tokens"].long()


# ---- The rows, in each reader's format ----------------------------------------------------------


def write_rows(folder: Path) -> None:
    """One mapped file, and a prepared corpus in 16 shards."""
    import numpy as np

    from pipeline.data import shards
    from pipeline.data.tokenizer import TOKENIZER_FILE

    if (folder / "corpus" / shards.MANIFEST).is_file():
        return
    random = np.random.default_rng(0)
    rows = random.integers(1, VOCAB, (ROWS, LENGTH), dtype=np.uint16)
    rows[:, -1] = 0  # documents of a row each
    rows.tofile(folder / "rows.u16")
    corpus = folder / "corpus"
    (corpus / "holdout").mkdir(parents=True)
    (corpus / TOKENIZER_FILE).write_text("{}")  # nothing is decoded here
    entries = {}
    for name, part in parts_of(rows):
        written = [
            shards.write_documents(corpus, f"{name}-{i:05}", piece, VOCAB)
            for i, piece in enumerate(np.array_split(part, 8))
        ]
        (corpus / f"holdout/{name}.jsonl").write_text("")
        entries[name] = {
            "documents": len(part),
            "bytes": part.size,
            "tokens": part.size,
            "shards": written,
            "holdout": {
                **shards.write_documents(corpus, f"holdout/{name}", [], VOCAB),
                "texts": shards.describe_file(corpus, f"holdout/{name}.jsonl"),
            },
        }
    manifest: dict[str, Any] = {
        "format": shards.FORMAT,
        "version": shards.FORMAT_VERSION,
        "tokenizer": {
            **shards.describe_file(corpus, TOKENIZER_FILE),
            "vocab_size": VOCAB,
            "eos_id": 0,
        },
        "sources": entries,
    }
    manifest["content_hash"] = shards.content_hash(manifest)
    (corpus / shards.MANIFEST).write_text(json.dumps(manifest))


def parts_of(rows: Any) -> Iterator[tuple[str, Any]]:
    """The rows of each source."""
    border = int(ROWS * SOURCES["code"])
    return zip(SOURCES, (rows[:border], rows[border:]), strict=True)


def read_rows(folder: Path) -> Any:
    import numpy as np

    return np.fromfile(folder / "rows.u16", np.uint16).reshape(ROWS, LENGTH)


def write_parquet(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for name, part in parts_of(read_rows(folder)):
        if not (folder / f"{name}.parquet").is_file():
            tokens = pa.FixedSizeListArray.from_arrays(pa.array(part.reshape(-1)), LENGTH)
            pq.write_table(
                pa.table({"tokens": tokens}), folder / f"{name}.parquet", row_group_size=1024
            )


def write_mds(folder: Path) -> None:
    from streaming import MDSWriter

    for name, part in parts_of(read_rows(folder)):
        out = folder / "mds" / name
        if not out.is_dir():
            with MDSWriter(out=str(out), columns={"tokens": f"ndarray:uint16:{LENGTH}"}) as writer:
                for row in part:
                    writer.write({"tokens": row})


def mosaic_environment(folder: Path) -> str | None:
    """The Python of an environment with mosaicml-streaming over this one's packages, or None.

    Installed without its dependencies, of which it would replace some; those that it imports
    follow, and in place of torchvision, which it imports for images, an empty one.
    """
    environment = folder / "mosaicml"
    python = environment / "bin" / "python"
    if not python.is_file():
        run([sys.executable, "-m", "venv", str(environment)])
        site = next(environment.glob("lib/python*/site-packages"))
        (site / "base.pth").write_text(next(p for p in sys.path if p.endswith("site-packages")))
        for module, text in (
            ("", ""),
            ("datasets", "VisionDataset = object"),
            ("transforms", ""),
            ("transforms/functional", "to_tensor = None"),
        ):
            (site / "torchvision" / module).mkdir(parents=True, exist_ok=True)
            (site / "torchvision" / module / "__init__.py").write_text(text)
    packages = ["mosaicml-streaming", "Brotli", "python-snappy", "cramjam", "zstd", "catalogue"]
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", *packages]
    subprocess.run(install, check=False, capture_output=True)
    found = subprocess.run([str(python), "-c", "import streaming"], capture_output=True, text=True)
    if found.returncode:
        print(f"mosaicml-streaming is left out: {found.stderr.splitlines()[-1]}", file=sys.stderr)
        return None
    return str(python)


# ---- Resume, and the default run ----------------------------------------------------------------


def resume_ratio(folder: Path) -> float:
    """Median time to a first batch at the end of the plan, over that at its start."""

    def first_batch(unit: int) -> float:
        began = time.perf_counter()
        next(build_stream(folder).iterate([(unit, BATCH, LENGTH)]))
        return time.perf_counter() - began

    first_batch(0)
    times = [(first_batch(10**8 - BATCH), first_batch(0)) for _ in range(15)]
    end, start = (statistics.median(column) for column in zip(*times, strict=True))
    return round(end / start, 2)


def wait_share(folder: Path) -> float:
    """Seconds that 30 steps of the default run waited for batches, over all their seconds."""
    command = [sys.executable, "-m", "pipeline", "run", f"root={folder / 'runs'}"]
    tokens = 30 * 4096
    run([*command, "stages=[prepare,train]", "tracking.offline=true", f"train.tokens={tokens}"])
    [metrics] = (folder / "runs").glob("*/metrics.jsonl")
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [record["metrics"] for record in records if record["kind"] == "train"]
    waited = sum(step["train/seconds_waiting_for_data"] for step in steps)
    worked = sum(4096 / step["train/tokens_per_second"] for step in steps)
    return round(waited / (waited + worked), 5)


def run(command: list[str]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


class ray_cluster:  # noqa: N801
    """A local Ray for several processes."""

    def __enter__(self) -> str:
        import ray

        from pipeline.ray_session import start_ray

        start_ray(None)
        return ray.get_runtime_context().gcs_address

    def __exit__(self, *_: object) -> None:
        import ray

        ray.shutdown()


if __name__ == "__main__":
    main()
