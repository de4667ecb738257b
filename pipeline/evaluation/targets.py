"""What `eval run=...` can name: a run, its MLflow id, a checkpoint, a Hugging Face folder.

A run is named by its id (or its beginning, or `latest`), its folder, or the id that MLflow gave it;
a checkpoint by its folder or a URI that pyarrow reads (`s3://`, `gs://`, `file://`), which is
copied here first. A checkpoint that lies in a run's folder is that run's; one that stands alone
brings its configuration with it.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from evals.harness import Subject
from evals.lm import Hybrid, LanguageModel
from evals.tokenizers import OfTransformers, Plain
from pipeline.config import Config, ConfigError, from_dict
from pipeline.data.prepare import prepared_folder
from pipeline.data.shards import Dataset, open_corpus
from pipeline.data.tokenizer import load_tokenizer
from pipeline.evaluation.measure import Measured
from pipeline.hf_folder import CONFIG, read_json
from pipeline.runs import RunFolder, find_run, list_runs, root_folder
from pipeline.tracking import tracking_uri
from pipeline.train import checkpoint
from pipeline.train.build import build_model, build_recipe
from pipeline.train.checkpoint import MANIFEST, STATE, Checkpoint
from pipeline.trained import inference_device
from quant import Precision, apply_recipe

FETCHED = "fetched"  # below <root>/evals: checkpoints copied from elsewhere


@dataclass(frozen=True)
class Named:
    """What a name stands for: a run, perhaps one step of it, or a folder that belongs to none."""

    run: RunFolder | None = None
    step: int | None = None
    folder: Path | None = None


def names_folder(wanted: str) -> bool:
    """Whether `run=` names a folder or a URI, not a run."""
    return "://" in wanted or Path(wanted).expanduser().is_dir()


def find(config: Config) -> Named:
    """Resolve `run=`. Raises `ConfigError` that says what was looked for."""
    wanted = str(config.run)
    root = root_folder(config)
    if re.match(r"[a-z0-9]+://", wanted):
        return _folder(_fetched(wanted, root / "evals" / FETCHED))
    path = Path(wanted).expanduser()
    if path.is_dir() or len(path.parts) > 1:
        return _folder(path.resolve())
    if re.fullmatch(r"[0-9a-f]{32}", wanted):
        return _by_mlflow_id(config, wanted, root)
    return Named(find_run(root, wanted))


def _folder(path: Path) -> Named:
    if RunFolder(path).config.is_file():
        return Named(RunFolder(path))
    if (path / CONFIG).is_file():
        return Named(folder=path)
    if not (path / STATE).is_file():
        holds = f"holds no run (config.yaml), no checkpoint ({STATE}) and no model ({CONFIG})"
        raise ConfigError(f"run={path}: {holds if path.is_dir() else 'there is no such folder'}")
    run = RunFolder(path.parents[1])
    if run.config.is_file():
        return Named(run, checkpoint.at_step(path.parent, _step(path)).step)
    return Named(folder=path)


def _step(path: Path) -> int:
    return int(json.loads((path / STATE).read_text())["step"])


def _fetched(uri: str, place: Path) -> Path:
    """A folder behind a URI, copied here unless it is local or here already."""
    from pyarrow import fs

    try:
        system, path = fs.FileSystem.from_uri(uri)
        if isinstance(system, fs.LocalFileSystem):
            return Path(path)
        target = place / f"{hashlib.sha256(uri.encode()).hexdigest()[:16]}" / Path(path).name
        if not target.is_dir():
            partial = target.with_name(f".partial-{target.name}")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            fs.copy_files(path, str(partial), source_filesystem=system)
            partial.rename(target)
        return target
    except (OSError, ValueError) as error:
        raise ConfigError(f"run={uri}: cannot be read ({error})") from error


def _by_mlflow_id(config: Config, wanted: str, root: Path) -> Named:
    """The run that MLflow knows by this id: here by its name, else the checkpoint it points to."""
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    try:
        client = MlflowClient(tracking_uri(config.tracking, root))
        known = client.get_run(wanted).info
        models = client.search_logged_models(
            [known.experiment_id], filter_string=f"source_run_id = '{wanted}'"
        )
    except MlflowException as error:
        raise ConfigError(
            f"run={wanted}: no such run in {tracking_uri(config.tracking, root)}"
        ) from error
    if any(run.id == known.run_name for run in list_runs(root)):
        return Named(find_run(root, str(known.run_name)))
    places = [model.tags["uri"] for model in models if "uri" in model.tags]
    if not places:
        raise ConfigError(
            f"run={wanted}: {known.run_name} is not in {root} and names no checkpoint in MLflow"
        )
    place = max(places)
    return _folder(_fetched(place, root / "evals" / FETCHED) if "://" in place else Path(place))


def standalone_config(path: Path, config: Config) -> Config:
    """The configuration that a checkpoint without a run brings, with our evals and root."""
    theirs = from_dict(json.loads((path / STATE).read_text())["config"])
    return replace(theirs, evals=config.evals, root=config.root, tracking=config.tracking)


def of_checkpoint(config: Config, found: Checkpoint, dataset: Dataset | None) -> Measured:
    """A checkpoint's model in the precision of `evals.precision`.

    Raises `ConfigError` where the recipe's activation scales cannot be measured.
    """
    if dataset is None:
        raise ConfigError(
            f"{found.path}: its corpus, with the tokenizer, is not prepared here; prepare it, or "
            "evaluate the model's export"
        )
    if found.state["identity"]["tokenizer"] != dataset.manifest["tokenizer"]["sha256"]:
        raise ConfigError(
            f"{found.path}: the corpus prepared in {dataset.folder} has another tokenizer than "
            "the checkpoint was trained with, so its token ids mean other texts"
        )
    manifest = (found.path / MANIFEST).read_bytes()
    device = inference_device()
    model, precision = load(config, found, device)
    if config.evals.precision == "recipe":
        fix_input_scales(config, model, precision, dataset)
    else:
        precision.mode = "bf16"
    untrained = build_model(config, device)
    handle = apply_recipe(
        untrained, build_recipe(config), num_blocks=len(config.model.pattern), seed=config.seed
    )
    handle.mode = "bf16"
    return Measured(
        Subject(
            Hybrid(model),
            Plain(load_tokenizer(dataset.tokenizer_path), dataset.bos_id),
            dataset.eos_id,
            config.evals.max_length or config.train.sequence_length,
            config.evals.batch_size,
            dataset.bos_id,
        ),
        hashlib.sha256(manifest + _scales(config).encode()).hexdigest(),
        dataset,
        model,
        untrained.eval(),
        config.data.on_corrupt == "skip",
    )


def _scales(config: Config) -> str:
    """The precision, and what its input scales are measured on."""
    export = config.export
    measured_on = f" {export.calibration} {export.calibration_tokens}"
    return config.evals.precision + (measured_on if config.evals.precision == "recipe" else "")


def load(config: Config, found: Checkpoint, device: torch.device) -> tuple[Any, Precision]:
    """A checkpoint's model and the handle on its precision; see `pipeline.trained`."""
    from pipeline.trained import load_model

    return load_model(config, found, device)


def fix_input_scales(config: Config, model: Any, precision: Precision, dataset: Dataset) -> None:
    """Give each linear one scale for all its inputs, as an export does, so that no sequence's score
    depends on those that are computed with it."""
    from pipeline.export.calibration import calibration_rows, input_amax

    rows = calibration_rows(config, dataset)
    for name, amax in input_amax(model, precision, rows, config.train.micro_batch).items():
        precision.layers[name].input_amax = amax
    precision.mode = "recipe"


def of_folder(config: Config, folder: Path) -> Measured:
    """A Hugging Face folder's model, ours where it is a `nemotron_h`, else transformers'."""
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"run={folder}: to read a Hugging Face folder, transformers has to be there: "
            "pip install 'transformers>=5.24,<6', or with this package's extra: .[hf]"
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: no tokenizer that transformers reads ({error})") from error
    lm = language_model(folder)
    prepared = prepared_folder(config.data, root_folder(config))
    longest = read_json(folder / CONFIG).get("max_position_embeddings", 2048)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if eos is None:
        raise ConfigError(
            f"{folder}: its tokenizer names no token that ends a text; give it one, as "
            '"eos_token" in tokenizer_config.json'
        )
    return Measured(
        Subject(
            lm,
            OfTransformers(tokenizer),
            eos,
            config.evals.max_length or min(longest, 8192),
            config.evals.batch_size,
            eos if bos is None else bos,
        ),
        folder_identity(folder),
        open_corpus(config.data, prepared) if prepared.is_dir() else None,
        skip_damaged=config.data.on_corrupt == "skip",
    )


def language_model(folder: Path) -> LanguageModel:
    """The model of a Hugging Face folder."""
    if read_json(folder / CONFIG).get("model_type") == "nemotron_h":
        return _nemotron(folder)
    from evals.transformers_lm import Transformers

    try:
        return Transformers.from_folder(folder, inference_device())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: {error}") from error


def _nemotron(folder: Path) -> Hybrid:
    from model import HybridModel
    from model.hf import from_nemotron_h
    from pipeline.hf_folder import read_model_config, read_tensors
    from pipeline.train.checkpoint import load_model_tensors

    if read_json(folder / CONFIG).get("quantization_config"):
        raise ConfigError(
            f"{folder}: its weights are packed; evaluate the run with evals.precision=recipe"
        )
    shape, device = read_model_config(folder), inference_device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = HybridModel(shape, dtype).to(device)
    tensors = from_nemotron_h(read_tensors(folder), shape)
    if shape.tie_embeddings:
        tensors.pop("head.weight")
    load_model_tensors(model, {name: tensor.float() for name, tensor in tensors.items()})
    return Hybrid(model)


def folder_identity(folder: Path) -> str:
    """Hash of names, sizes and times of a model folder's files: reading weights takes long."""
    stats = [(path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file()]
    record = json.dumps([[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats])
    return hashlib.sha256(record.encode()).hexdigest()
