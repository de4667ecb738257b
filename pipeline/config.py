"""The configuration as frozen dataclasses: what Hydra composes is checked once and becomes these.

Workers receive these objects, never a Hydra configuration (nothing is left to interpolate). Every
mistake raises `ConfigError` with the key's full path and what would be right; `pipeline` prints it
without a traceback and exits with 2. Amounts of training are counted in tokens.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NOT_DECISIVE = (  # keys of train that change no weight
    "activation_checkpointing",
    "checkpoint_every_tokens",
    "compare_replicas_every_steps",
    "hang_timeout_seconds",
    "keep_checkpoints",
    "keep_checkpoints_every_tokens",
    "log_every_steps",
    "max_checkpoint_failures",
    "max_skipped_steps",
    "statistics_every_steps",
    "validate_every_tokens",
    "validation_tokens",
)
AROUND_A_RUN = {  # top-level keys of which no weight of a run depends
    "cluster",
    "evals",
    "experiment",
    "export",
    "fidelity",
    "generate",
    "name",
    "resume",
    "root",
    "run",
    "stages",
    "step",
    "tracking",
}
STAGES = ("prepare", "train", "eval", "report")


class ConfigError(ValueError):
    """A mistake of the user's: the message names the key, the cause and the way out."""


class PermanentError(RuntimeError):
    """A failure that trying again would repeat: a job runner must not retry it."""


def nearest(word: str, known: typing.Iterable[str]) -> str:
    """' Did you mean a, b?', or the list of all that is known when nothing is near."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known)}"


@dataclass(frozen=True)
class SourceConfig:
    """One domain of text. `builtin` sources need no files: `python`, `prose`, `mathematics`."""

    builtin: str | None = None
    uris: tuple[str, ...] = ()  # files, folders or globs; any file system that pyarrow reads
    format: str = "text"  # text | jsonl | parquet
    text_column: str = "text"
    max_bytes: int | None = None  # cap on the training text, in whole documents
    repeat: bool = True  # whether the plan may go through it more than once


@dataclass(frozen=True)
class TokenizerConfig:
    """A byte-level BPE trained on the training text (`path` None), or a tokenizer.json to load."""

    vocab_size: int = 4096  # with the end-of-document token
    path: str | None = None
    eos_token: str = "<|endoftext|>"
    training_bytes: int = 8_000_000  # text sampled evenly from the sources to train it on


@dataclass(frozen=True)
class DataConfig:
    """Sources, tokenizer, hold-out and shards of a prepared corpus."""

    name: str
    sources: Mapping[str, SourceConfig]
    tokenizer: TokenizerConfig
    holdout_fraction: float = 0.01  # share of documents, by content hash
    holdout_max_bytes: int = 150_000  # per source, so that evaluation stays quick
    shard_tokens: int = 16_777_216  # tokens a shard, about
    mixture_block: int = 1024  # units over which a blend's fractions hold
    executor: str = "mmap"  # who reads shards in training: mmap, or ray (Ray Data, slow storage)
    seed: int = 0
    max_epochs: float = 4.0  # times that a source may be seen before `data show` warns
    skip: tuple[int, ...] = ()  # steps that pass without an update; may change on resume
    block: tuple[str, ...] = ()  # shards whose units weigh nothing; may change on resume


@dataclass(frozen=True)
class ModelSection:
    """The architecture, by the names of `model.ModelConfig` (which validates the combination)."""

    pattern: str
    vocab_size: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_kv_heads: int
    attention_head_dim: int
    mamba_num_heads: int
    mamba_head_dim: int
    mamba_state_size: int
    mamba_num_groups: int
    mamba_conv_kernel: int = 4
    mamba_chunk_size: int = 128
    rope_theta: float | None = None
    tie_embeddings: bool = False
    init_std: float = 0.02


@dataclass(frozen=True)
class PrecisionConfig:
    """The recipe of `quant.recipe` and the blocks that stay in BF16 at both ends.

    `first` and `last` count blocks, or give a share of them when below 1.
    """

    recipe: str
    first: float = 1
    last: float = 1


@dataclass(frozen=True)
class PhaseConfig:
    """One entry of the run's single list of phases; what it leaves out goes on as before.

    `start` is in tokens or a share of the run such as "70%". `learning_rate: decay` starts the
    decay to `train.final_learning_rate`, which ends with the run. `precision` is `recipe`, `bf16`
    or `bf16_forward`. A boundary forces a checkpoint.
    """

    start: str | int = 0
    blend: Mapping[str, float] | None = None
    sequence_length: int | None = None
    learning_rate: str | None = None
    precision: str | None = None


@dataclass(frozen=True)
class TrainConfig:
    """Batches, schedule and optimizer. A unit is one row of the longest phase's length."""

    tokens: int
    sequence_length: int
    global_batch: int  # units per optimizer step
    micro_batch: int  # units per forward and backward: part of the numerics
    phases: tuple[PhaseConfig, ...]
    learning_rate: float
    final_learning_rate: float
    warmup_tokens: int
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    clip_norm: float = 1.0
    checkpoint_every_tokens: int = 0  # 0: at phase boundaries and at the end only
    keep_checkpoints: int = 3
    validate_every_tokens: int = 0
    validation_tokens: int = 65_536
    log_every_steps: int = 1
    statistics_every_steps: int = 0
    activation_checkpointing: str = "none"
    max_skipped_steps: int = 10
    spike_window: int = 128  # steps that a step's loss and gradient norm are compared with
    spike_threshold: float = 10.0  # robust sigmas above the median that skip a step; 0: none
    keep_checkpoints_every_tokens: int = 0  # those that stay beside the last ones; 0: none
    max_checkpoint_failures: int = 3  # failed saves in a row that end the run
    compare_replicas_every_steps: int = 100  # beside each checkpoint; 0: only there
    hang_timeout_seconds: float = 1200.0  # without progress, before a rank gives up; 0: never
    fork_from: str | None = None  # <run>@<step>: start from the whole state of another run
    init_from: str | None = None  # start from weights: <run>[@<step>], checkpoint or HF folder


@dataclass(frozen=True)
class EvalsConfig:
    """What the eval stage measures beside the loss of each domain."""

    tasks: tuple[str, ...] = ("continuation",)
    num_questions: int = 300
    batch_size: int = 32


@dataclass(frozen=True)
class FidelityConfig:
    """What `compare fidelity` measures, and on which checkpoints of a run."""

    steps: tuple[int, ...] = ()  # of the checkpoints; none: the newest
    recipes: tuple[str, ...] = ("nvfp4",)
    num_batches: int = 2  # held-out micro-batches
    num_draws: int = 64  # of each stochastic rounding


@dataclass(frozen=True)
class ExportConfig:
    """What `export` writes: a folder in Hugging Face's layout."""

    format: str = "hf"  # hf | nvfp4-compressed-tensors | nvfp4-modelopt
    folder: str | None = None  # none: <run>/exports/step-<n>-<format>
    dtype: str | None = None  # of what is not packed; none: float32 for hf, else bfloat16
    shard_bytes: int = 5_000_000_000  # a larger model becomes several files
    calibration: str | None = None  # a text file for activation scales; none: held-out text
    calibration_tokens: int = 65_536


@dataclass(frozen=True)
class GenerateConfig:
    """What `generate` continues, and how it chooses tokens."""

    prompt: str | None = None
    prompts: str | None = None  # a text file, one prompt a line
    max_new_tokens: int = 256
    temperature: float = 0.0  # 0: the likeliest token
    top_p: float = 1.0  # draw from the likeliest tokens of this probability together
    seed: int = 0


@dataclass(frozen=True)
class TrackingConfig:
    """Where MLflow keeps runs. `uri` None: a SQLite store under the root folder."""

    experiment: str = "nvfp4-pretrain"
    uri: str | None = None
    offline: bool = False  # train without the store; `pipeline track run=...` sends it later


@dataclass(frozen=True)
class ClusterConfig:
    """Who computes. `workers` 0: in this process (Ray Train's local mode)."""

    workers: int = 0
    cpus_per_worker: float = 1
    gpus_per_worker: int = 0
    accelerator: str | None = None  # for example B200; named in the plan and checked at start
    address: str | None = None  # an existing Ray cluster
    max_failures: int = 3


@dataclass(frozen=True)
class Config:
    """Everything that a run depends on."""

    root: str
    stages: tuple[str, ...]
    seed: int
    model: ModelSection
    precision: PrecisionConfig
    data: DataConfig
    train: TrainConfig
    evals: EvalsConfig
    tracking: TrackingConfig
    cluster: ClusterConfig
    fidelity: FidelityConfig = FidelityConfig()
    export: ExportConfig = ExportConfig()
    generate: GenerateConfig = GenerateConfig()
    run: str | None = None  # the id or `latest`: what eval, report and status work on
    source: str | None = None  # of which source `data inspect` shows a row
    row: int = 0  # which row
    step: int | None = None  # which step `data at` shows; whose checkpoint others take
    resume: str | bool = False  # true, or the id of the run to go on with
    name: str | None = None  # a stable id: the same command again goes on with the same run
    experiment: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, the inverse of `from_dict`."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def fingerprint(self) -> str:
        """Hash of what decides the trained weights and their data: two runs alike share it."""
        decisive = {
            name: section
            for name, section in self.to_dict().items()
            if name in {"seed", "model", "precision", "data", "train"}
        }
        for name in NOT_DECISIVE:
            decisive["train"].pop(name)
        # The checkpoint keeps account of the last two.
        for name in ("executor", "max_epochs", "skip", "block"):
            decisive["data"].pop(name)
        return digest(decisive)


def differences(
    former: Any, present: Any, ignored: typing.Container[str] = (), path: str = ""
) -> list[str]:
    """The keys in which two configurations (plain types) differ, each with both values.

    `ignored` are top-level keys, or full paths, that may differ.
    """
    if not (isinstance(former, dict) and isinstance(present, dict)):
        return [] if former == present else [f"{path} ({former!r} then, {present!r} now)"]
    found = []
    for key in sorted(former.keys() | present.keys()):
        inner = f"{path}.{key}" if path else key
        if inner not in ignored:
            found += differences(former.get(key), present.get(key), ignored, inner)
    return found


def digest(value: Any) -> str:
    """SHA-256 of a JSON value in canonical form."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def flatten(tree: Mapping[str, Any], separator: str = ".") -> dict[str, Any]:
    """The leaves of nested mappings under joined names; an empty mapping is a leaf."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            inner = flatten(value, separator)
            flat.update({f"{key}{separator}{name}": leaf for name, leaf in inner.items()})
        else:
            flat[key] = value
    return flat


def from_dict(raw: Mapping[str, Any]) -> Config:
    """Build and validate a `Config`. Raises `ConfigError`."""
    config = _build(Config, raw, "")
    validate(config)
    return config


def _build(kind: Any, value: Any, path: str) -> Any:
    """`value` as an instance of `kind`; keys, types and missing entries are checked by path."""
    if dataclasses.is_dataclass(kind):
        return _build_dataclass(typing.cast(type, kind), value, path)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        options = [option for option in arguments if option is not type(None)]
        for option in options:
            if type(value) is option:
                return value
        return _build(options[-1], value, path)
    if origin is tuple:
        if isinstance(value, str) or not isinstance(value, typing.Sequence):
            raise ConfigError(f"{path}: expected a list, got {value!r}")
        return tuple(_build(arguments[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    if origin is Mapping or (isinstance(origin, type) and issubclass(origin, Mapping)):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path}: expected names with values, got {value!r}")
        return {
            str(key): _build(arguments[1], item, f"{path}.{key}") for key, item in value.items()
        }
    return _scalar(kind, value, path)


def _build_dataclass(kind: type, value: Any, path: str) -> Any:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path or 'configuration'}: expected keys with values, got {value!r}")
    hints = typing.get_type_hints(kind)
    fields = {item.name: item for item in dataclasses.fields(kind)}
    prefix = f"{path}." if path else ""
    for key in value:
        if key not in fields:
            raise ConfigError(f"{prefix}{key}: no such key; {nearest(str(key), fields)}")
    required = (
        name
        for name, item in fields.items()
        if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
    )
    for name in required:
        if value.get(name) is None:
            raise ConfigError(f"{prefix}{name}: missing; set {prefix}{name}=...")
    built = {key: _build(hints[key], item, f"{prefix}{key}") for key, item in value.items()}
    return kind(**built)


def _scalar(kind: type, value: Any, path: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if type(value) is not kind:
        raise ConfigError(f"{path}: expected {kind.__name__}, got {value!r}")
    return value


def validate(config: Config) -> None:
    """Checks between keys that need neither torch nor the corpus. Raises `ConfigError`."""
    train = config.train
    for stage in config.stages:
        if stage not in STAGES:
            raise ConfigError(f"stages: no stage {stage!r}; {nearest(stage, STAGES)}")
    _check_ranges(config)
    if train.global_batch % train.micro_batch:
        raise ConfigError(
            f"train.global_batch={train.global_batch} is not a multiple of "
            f"train.micro_batch={train.micro_batch}; the micro-batch is part of the numerics, so "
            "choose a global batch that it divides"
        )
    for name, end in (("first", config.precision.first), ("last", config.precision.last)):
        if not end >= 0 or (end > 1 and not end.is_integer()):
            raise ConfigError(
                f"precision.{name}: a number of blocks, or a share below 1, not {end}"
            )
    if not config.data.sources:
        raise ConfigError("data.sources: empty; name at least one source of text")
    shortest = len(config.data.sources) * train.sequence_length
    if train.validation_tokens < shortest:
        raise ConfigError(
            f"train.validation_tokens={train.validation_tokens}: one row of each source takes "
            f"{shortest}"
        )
    for name, source in config.data.sources.items():
        if "" in source.uris:
            raise ConfigError(f"data.sources.{name}.uris: an empty name; give a file or a folder")
        if (source.builtin is None) == (not source.uris):
            raise ConfigError(f"data.sources.{name}: set either builtin=... or uris=[...]")


def _check_ranges(config: Config) -> None:
    """Every number lies in its range; not-a-number lies in none. Raises `ConfigError`."""
    train, data, cluster = config.train, config.data, config.cluster
    tiny, huge = 1e-300, 1e300
    ranges: dict[str, tuple[float, float, float]] = {
        "seed": (config.seed, 0, 2**64 - 1),
        "train.tokens": (train.tokens, 1, huge),
        "train.sequence_length": (train.sequence_length, 1, huge),
        "train.global_batch": (train.global_batch, 1, huge),
        "train.micro_batch": (train.micro_batch, 1, huge),
        "train.learning_rate": (train.learning_rate, tiny, huge),
        "train.final_learning_rate": (train.final_learning_rate, 0, huge),
        "train.warmup_tokens": (train.warmup_tokens, 0, huge),
        "train.weight_decay": (train.weight_decay, 0, huge),
        "train.beta1": (train.beta1, 0, 1 - 1e-12),
        "train.beta2": (train.beta2, 0, 1 - 1e-12),
        "train.epsilon": (train.epsilon, 0, huge),
        "train.clip_norm": (train.clip_norm, tiny, huge),
        "train.checkpoint_every_tokens": (train.checkpoint_every_tokens, 0, huge),
        "train.keep_checkpoints": (train.keep_checkpoints, 1, huge),
        "train.validate_every_tokens": (train.validate_every_tokens, 0, huge),
        "train.log_every_steps": (train.log_every_steps, 1, huge),
        "train.statistics_every_steps": (train.statistics_every_steps, 0, huge),
        "train.max_skipped_steps": (train.max_skipped_steps, 0, huge),
        "train.spike_window": (train.spike_window, 4, huge),
        "train.spike_threshold": (train.spike_threshold, 0, huge),
        "train.keep_checkpoints_every_tokens": (train.keep_checkpoints_every_tokens, 0, huge),
        "train.max_checkpoint_failures": (train.max_checkpoint_failures, 1, huge),
        "train.compare_replicas_every_steps": (train.compare_replicas_every_steps, 0, huge),
        "train.hang_timeout_seconds": (train.hang_timeout_seconds, 0, huge),
        "data.holdout_fraction": (data.holdout_fraction, tiny, 1 - 1e-12),
        "data.holdout_max_bytes": (data.holdout_max_bytes, 0, huge),
        "data.shard_tokens": (data.shard_tokens, 1, huge),
        "data.mixture_block": (data.mixture_block, 1, 2**20),
        "data.seed": (data.seed, 0, 2**63 - 1),
        "evals.num_questions": (config.evals.num_questions, 1, huge),
        "evals.batch_size": (config.evals.batch_size, 1, huge),
        "fidelity.num_batches": (config.fidelity.num_batches, 1, huge),
        "fidelity.num_draws": (config.fidelity.num_draws, 2, 2**20),
        "export.shard_bytes": (config.export.shard_bytes, 1, huge),
        "export.calibration_tokens": (config.export.calibration_tokens, 1, huge),
        "generate.max_new_tokens": (config.generate.max_new_tokens, 1, 2**24),
        "generate.temperature": (config.generate.temperature, 0, huge),
        "generate.top_p": (config.generate.top_p, 1e-9, 1),
        "generate.seed": (config.generate.seed, 0, 2**32),
        "cluster.workers": (cluster.workers, 0, huge),
        "cluster.cpus_per_worker": (cluster.cpus_per_worker, 0, huge),
        "cluster.gpus_per_worker": (cluster.gpus_per_worker, 0, huge),
        "cluster.max_failures": (cluster.max_failures, -1, huge),
    }
    for name, source in data.sources.items():
        if source.max_bytes is not None:
            ranges[f"data.sources.{name}.max_bytes"] = (source.max_bytes, 1, huge)
    for name, (number, low, high) in ranges.items():
        if not low <= number <= high:
            bound = f"at least {low:g}" if high == huge else f"between {low:g} and {high:g}"
            raise ConfigError(f"{name}: must be {bound}, got {number}")
    names = {"data.name": data.name} | ({"name": config.name} if config.name else {})
    for key, name in names.items():
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name):
            raise ConfigError(
                f"{key}={name!r}: it names a folder; use letters, digits, '.', '_' and '-'"
            )
    if config.name in {"data", "latest", "mlartifacts"}:
        raise ConfigError(f"name={config.name}: taken for other things; choose another")
