"""`python -m pipeline export`: a run's checkpoint as a Hugging Face `nemotron_h` folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model import HybridModel
from model.hf import config_to_nemotron_h, to_nemotron_h
from pipeline.config import Config, ConfigError, nearest
from pipeline.data.shards import Dataset, open_corpus
from pipeline.export import packing as nvfp4
from pipeline.export.calibration import calibration_rows, input_amax
from pipeline.export.folder import (
    RECORD,
    describe_files,
    require_free,
    whole_folder,
    write_json,
    write_tensors,
)
from pipeline.export.readback import check
from pipeline.export.tokenizer import write_tokenizer
from pipeline.hf_folder import CONFIG
from pipeline.lineage import schedule_of
from pipeline.runs import RunFolder
from pipeline.stages import dataset_folder
from pipeline.train.checkpoint import Checkpoint, model_tensors
from pipeline.trained import find_checkpoint, inference_device, load_model
from quant import Precision

HF = "hf"
FORMATS = (HF, nvfp4.COMPRESSED_TENSORS, nvfp4.MODELOPT)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
KEPT_IN_FP32 = (".A_log", ".D", ".dt_bias")  # they decide decay rates over thousands of tokens


@dataclass(frozen=True)
class Contents:
    """What goes into the folder: tensors and JSON files by name, and what to say about them."""

    tensors: dict[str, Tensor]
    files: dict[str, Any]
    packing: nvfp4.Packing | None
    notes: tuple[str, ...]


def export(
    config: Config, run: RunFolder, progress: Callable[[str], None] = print
) -> tuple[Path, dict[str, Any]]:
    """Export the checkpoint of `step`, or the newest. Returns the folder and its record.

    The record, `export.json` in the folder, holds every file's size and checksum, what was packed
    and what was not, and the result of reading the folder again.

    Raises `ConfigError` for an unknown format, a folder that holds something else, a model that
    NemotronH has no place for, or a recipe that leaves nothing to pack.
    """
    settings = config.export
    if settings.format not in FORMATS:
        raise ConfigError(f"format={settings.format}: {nearest(settings.format, FORMATS)}")
    dtype = settings.dtype or ("float32" if settings.format == HF else "bfloat16")
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype}: {nearest(dtype, DTYPES)}")
    found = find_checkpoint(config, run)
    target = _target(config, run, found)
    require_free(target)
    dataset = open_corpus(config.data, dataset_folder(config, run))
    progress(f"run {run.id}, step {found.step}, as {settings.format}, the rest in {dtype}")
    model, precision = load_model(config, found, inference_device())
    contents = _contents(config, run, found, dataset, model, precision, dtype)
    with whole_folder(target) as folder:
        for name, value in contents.files.items():
            write_json(folder / name, value)
        write_tokenizer(folder, dataset, config.train.sequence_length)
        write_tensors(folder, contents.tensors, settings.shard_bytes)
        record = _record(config, run, found, contents, dtype) | {"files": describe_files(folder)}
        record["bytes"] = sum(file["bytes"] for file in record["files"].values())
        record["checksum"] = _checksum(record["files"])
        packed = contents.packing.packed if contents.packing else {}
        state = {name: tensor.cpu() for name, tensor in model_tensors(model).items()}
        record["check"] = check(
            folder, model.config, state, contents.tensors, packed, settings.format
        )
        write_json(folder / RECORD, record)
    for line in describe(target, record):
        progress(line)
    return target, record


def describe(folder: Path, record: Mapping[str, Any]) -> list[str]:
    """A record as lines to print."""
    lines = [
        f"  {name:<28} {file['bytes']:>14,} bytes  sha256 {file['sha256'][:16]}"
        for name, file in record["files"].items()
    ]
    if record["format"] != HF:
        lines.append(
            f"  packed: {record['packed_linears']} linears; in BF16: {len(record['ignored'])}"
        )
        reasons: dict[str, list[str]] = {}
        for name, reason in record["ignored"].items():
            reasons.setdefault(reason, []).append(name)
        lines += [f"    {reason}: {', '.join(names)}" for reason, names in reasons.items()]
        for dt in record["dt_rows"]:
            lines.append(
                f"  {dt['linear']}: rows {dt['rows'][0]}..{dt['rows'][1] - 1} (dt) trained in BF16 "
                f"and are quantized here, relative error {dt['relative_error']:.3%}, "
                f"{dt['clipped']} values clipped"
            )
    lines += [f"  note: {note}" for note in record["notes"]]
    checked = record["check"]
    lines.append(f"  read back: {checked['tensors']} tensors, equal to the bit")
    if "reader" in checked:
        differing = checked.get("values_that_differ")
        lines.append(
            f"  decoded by {checked['reader']}"
            + ("" if differing is None else f": {differing} values differ from ours")
        )
    lines.append(f"  {record['bytes']:,} bytes, checksum {record['checksum'][:16]}")
    lines.append(f"export   {folder}")
    return lines


def _target(config: Config, run: RunFolder, found: Checkpoint) -> Path:
    if config.export.folder is not None:
        return Path(config.export.folder).expanduser().resolve()
    return run.exports / f"step-{found.step:08d}-{config.export.format}"


def _contents(
    config: Config,
    run: RunFolder,
    found: Checkpoint,
    dataset: Dataset,
    model: HybridModel,
    precision: Precision,
    dtype: str,
) -> Contents:
    shape, layout, eos = model.config, config.export.format, dataset.eos_id
    try:
        values = config_to_nemotron_h(
            shape,
            eos_token_id=eos,
            pad_token_id=eos,
            bos_token_id=dataset.bos_id,
            max_position_embeddings=config.train.sequence_length,
            mamba_ssm_cache_dtype="float32",
            torch_dtype=dtype,
        )
    except ValueError as error:
        raise ConfigError(f"export: {error}") from error
    generation = {"eos_token_id": eos, "pad_token_id": eos, "do_sample": False}
    if dataset.bos_id is not None:
        generation["bos_token_id"] = dataset.bos_id
    files = {CONFIG: values, "generation_config.json": generation}
    public = to_nemotron_h(model.state_dict(), shape)
    tensors = {
        name: tensor if name.endswith(KEPT_IN_FP32) else tensor.to(DTYPES[dtype])
        for name, tensor in public.items()
    }
    notes = []
    if shape.tie_embeddings:
        notes.append("the tied head stands as a copy of the embedding: transformers does not tie")
    packing = None
    if layout != HF:
        batches = calibration_rows(config, dataset)
        amax = input_amax(model, precision, batches, config.train.micro_batch)
        packing = nvfp4.pack_linears(shape, precision, amax)
        for name in packing.packed:
            del tensors[f"{name}.weight"]
        tensors |= nvfp4.packed_tensors(packing.packed, layout)
        values["quantization_config"] = nvfp4.quantization_config(packing, layout)
        if layout == nvfp4.MODELOPT:
            files["hf_quant_config.json"] = nvfp4.hf_quant_config(packing)
        last = schedule_of(config, run).phase(max(found.step - 1, 0)).precision
        if last != "recipe":
            notes.append(
                f"training was in the phase precision {last} at this step, so its forward pass "
                "multiplied BF16 weights; format=hf exports those"
            )
    tensors = {name: tensors[name].detach().cpu() for name in sorted(tensors)}
    return Contents(tensors, files, packing, tuple(notes))


def _record(
    config: Config, run: RunFolder, found: Checkpoint, contents: Contents, dtype: str
) -> dict[str, Any]:
    packing = contents.packing
    return {
        "format": config.export.format,
        "dtype": dtype,
        "run": run.id,
        "step": found.step,
        "checkpoint": str(found.path),
        "recipe": config.precision.recipe,
        "packed_linears": len(packing.packed) if packing else 0,
        "ignored": dict(packing.ignored) if packing else {},
        "dt_rows": [asdict(rows) for rows in packing.dt_rows] if packing else [],
        "notes": list(contents.notes),
    }


def _checksum(files: Mapping[str, Mapping[str, Any]]) -> str:
    """One SHA-256 over the names and checksums of all files."""
    listed = json.dumps({name: file["sha256"] for name, file in sorted(files.items())})
    return hashlib.sha256(listed.encode()).hexdigest()
