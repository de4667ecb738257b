"""The sections of a configuration as frozen dataclasses, and what of them decides a run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from evals.registry import TaskSettings
from pipeline.config.errors import ConfigError
from pipeline.config.values import digest

NOT_DECISIVE = (  # keys of train that change no weight
    "activation_checkpointing",
    "checkpoint_every_tokens",
    "compare_replicas_every_steps",
    "deterministic",
    "hang_timeout_seconds",
    "keep_checkpoints",
    "keep_checkpoints_every_tokens",
    "log_every_steps",
    "max_checkpoint_failures",
    "max_skipped_steps",
    "profile_steps",
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
    "manifest",
    "name",
    "plan",
    "resume",
    "root",
    "run",
    "stages",
    "step",
    "study",
    "tracking",
}
STAGES = ("prepare", "train", "eval", "report")


@dataclass(frozen=True)
class SourceConfig:
    """One domain of text. `builtin` sources need no files: `python`, `prose`, `mathematics`."""

    builtin: str | None = None
    uris: tuple[str, ...] = ()  # files, folders or globs; any file system that pyarrow reads
    format: str = "text"  # text | jsonl | parquet | huggingface
    text_column: str = "text"
    max_bytes: int | None = None  # cap on the training text, in whole documents
    min_chars: int | None = None  # shorter documents are left out, and longer than the next
    max_chars: int | None = None
    filters: tuple[str, ...] = ()  # on other columns, such as "score >= 3": all must hold
    repeat: bool = True  # whether the plan may go through it more than once


@dataclass(frozen=True)
class TokenizerConfig:
    """A byte-level BPE trained on the training text (`path` None), or one to load.

    `path` is a tokenizer.json, a folder with one, a name on the Hugging Face hub, a tekken.json,
    or `tekken` for the one of mistral-common.
    """

    vocab_size: int = 4096  # with the end-of-document token
    path: str | None = None
    eos_token: str = "<|endoftext|>"  # behind every document
    bos_token: str | None = None  # before every document
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
    decontaminate: tuple[str, ...] = ()  # evaluation files (JSON) that no document may overlap
    packing: str = "concatenate"  # or best_fit: no document that fits into a row is cut
    row_length: int = 0  # tokens of best_fit's rows: train.sequence_length
    mixture_block: int = 1024  # units over which a blend's fractions hold
    executor: str = "mmap"  # who reads shards in training: mmap, or ray (Ray Data, many nodes)
    shards_uri: str | None = None  # a copy of the shards in an object store, read by range
    prefetch_bytes: int = 268_435_456  # of batches that a rank holds ahead
    across_documents: bool = False  # whether a document's last token predicts the next document
    on_corrupt: str = "stop"  # at a damaged shard: stop, or skip (its rows weigh nothing)
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
    compile: bool = False  # the blocks through torch.compile: fewer passes, other last bits
    max_skipped_steps: int = 10
    spike_window: int = 128  # steps that a step's loss and gradient norm are compared with
    spike_threshold: float = 10.0  # robust sigmas above the median that skip a step; 0: none
    keep_checkpoints_every_tokens: int = 0  # those that stay beside the last ones; 0: none
    max_checkpoint_failures: int = 3  # failed saves in a row that end the run
    compare_replicas_every_steps: int = 100  # beside each checkpoint; 0: only there
    hang_timeout_seconds: float = 1200.0  # without progress, before a rank gives up; 0: never
    fork_from: str | None = None  # <run>@<step>: start from the whole state of another run
    init_from: str | None = None  # start from weights: <run>[@<step>], checkpoint or HF folder
    reproducible: bool = False  # sums whose bits do not depend on the number of workers
    deterministic: bool = False  # the switches of `train/determinism.py`, for GPUs
    profile_steps: tuple[int, ...] = ()  # the first and the last step that are profiled


@dataclass(frozen=True)
class EvalsConfig:
    """What the eval stage measures beside the loss of each domain, and on whom."""

    suite: str = "smoke"
    tasks: tuple[str, ...] = ("continuation",)
    details: Mapping[str, TaskSettings] = field(default_factory=dict)
    num_questions: int = 300  # of the continuation task
    batch_size: int = 32  # sequences, or choices of questions, computed together
    precision: str = "bf16"  # or recipe: weights and activations as trained
    max_length: int | None = None  # tokens that the model sees; none: as many as in training
    limit: int | None = None  # questions of each task, its first ones; none: all
    files: str | None = None  # the folder of the local tasks' files
    allow_code: bool = False  # whether code that the model wrote is run, in a sandbox
    on_missing: str = "skip"  # or fail: where a task's data cannot be had
    again: bool = False  # compute finished results anew
    watch: bool = False  # follow a run that is training
    watch_seconds: float = 30.0  # between two looks
    workers: int = 0  # of Ray; 0: this process
    samples_logged: int = 100  # samples of each task that MLflow shows


@dataclass(frozen=True)
class FidelityConfig:
    """What `compare fidelity` measures, and on which checkpoints of a run."""

    steps: tuple[int, ...] = ()  # of the checkpoints; none: the newest
    recipes: tuple[str, ...] = ("nvfp4",)
    num_batches: int = 2  # held-out micro-batches
    num_draws: int = 64  # of each stochastic rounding


@dataclass(frozen=True)
class ArmConfig:
    """One of a study's arms: what it changes, and where it is run."""

    overrides: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()  # names in `StudyConfig.sizes`; none: the first
    num_seeds: int = 1  # of the study's seeds
    trunk: str | None = None  # the arm from whose run this one is forked, same size and seed
    fork_at: str | None = None  # a phase's start, such as 82%


@dataclass(frozen=True)
class StudyConfig:
    """What `compare +study=...` runs: every arm at its sizes and seeds, and what it reports.

    `overrides` are common to all runs, and those of a size and of an arm follow.
    """

    name: str
    arms: Mapping[str, ArmConfig]
    sizes: Mapping[str, tuple[str, ...]]
    overrides: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2)
    baseline: str = "bf16"  # the arm that gaps are measured from
    window: float = 0.1  # last share of training steps whose mean loss is a run's loss
    effect: float = 0.01  # the relative difference that the study is to see
    parallel: int = 1  # runs at a time
    reuse: tuple[str, ...] = ()  # folders of tables: what finished elsewhere is not run again
    tables: str | None = None  # report from this folder of tables alone, and run nothing

    @property
    def num_runs(self) -> int:
        """Runs of the whole study: arms at their sizes and seeds."""
        return sum(
            max(len(arm.sizes), 1) * len(self.seeds[: arm.num_seeds]) for arm in self.arms.values()
        )


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
    parent: str | None = None  # the MLflow run below which this one is shown


@dataclass(frozen=True)
class HardwareConfig:
    """One GPU and its links as the datasheet has them, for `plan`. Peaks are dense; 0: none."""

    name: str
    capability: tuple[int, ...]  # of its architecture: [10, 0]
    bf16_tflops: float
    fp8_tflops: float
    fp4_tflops: float
    memory_gb: float  # 10^9 bytes
    memory_tb_per_second: float
    nvlink_gb_per_second: float  # a GPU and direction, within one NVLink domain
    nvlink_gpus: int  # in one domain
    network_gb_per_second: float  # a GPU and direction, between domains


@dataclass(frozen=True)
class KubernetesConfig:
    """The pods of a run, for `manifest` and `submit`: one Ray pod a node, and a head beside them.

    What a node's pod asks for it gets whole: requests are limits.
    """

    image: str
    namespace: str = "nvfp4-pretrain"
    arch: str = "amd64"  # of the GPU nodes; Grace is arm64
    node_cpus: int = 16
    node_memory: str = "128Gi"
    head_arch: str = "amd64"
    head_cpus: int = 8
    head_memory: str = "32Gi"
    queue: str | None = "training"  # Kueue's LocalQueue; none: no queue
    priority_class: str | None = "training"
    compute_domain: bool = False  # NVLink across nodes: a ComputeDomain's IMEX channel by DRA
    storage_claim: str = "runs"  # a volume that all pods write; the run's root lies on it
    storage_path: str = "/data"
    tracking_secret: str | None = "mlflow-client"  # MLFLOW_TRACKING_USERNAME, _PASSWORD
    env_secret: str | None = None  # a Secret of environment variables: AWS_ACCESS_KEY_ID, HF_TOKEN
    hub: bool = False  # whether pods may ask the Hugging Face hub
    retries: int = 20  # of the whole job, each on a new Ray cluster
    deadline_hours: int = 24 * 90
    grace_seconds: int = 900  # between SIGTERM and SIGKILL: a step and a checkpoint fit in
    wait_seconds: int = 900  # for the nodes of a fresh cluster to join


@dataclass(frozen=True)
class ClusterConfig:
    """Who computes. `workers` 0: in this process (Ray Train's local mode).

    A cluster of GPUs is given as nodes; `workers: null` in its file makes one for each GPU.
    """

    workers: int = 0
    min_workers: int | None = None  # fewer than `workers` will do; none: exactly as many
    resize_seconds: float = 60  # with fewer: how often it is looked for more of them
    cpus_per_worker: float = 1
    gpus_per_worker: int = 0
    accelerator: str | None = None  # for example B200; named in the plan and checked at start
    address: str | None = None  # an existing Ray cluster
    max_failures: int = 3
    shard: int = 1  # workers that share one copy of weights and optimizer state; 0: all of them
    fp4_gather: bool = True  # of a copy that is shared: gather 16 x 16 blocks in four bits
    scatter_each_micro_batch: bool = True  # false: once a step, for 4 bytes a parameter more
    nodes: int = 1
    gpus_per_node: int = 0
    hardware: HardwareConfig | None = None
    kubernetes: KubernetesConfig | None = None


@dataclass(frozen=True)
class ManifestConfig:
    """What `manifest` renders."""

    kind: str = "train"  # train | eval (RayJobs) | cluster (a RayCluster to work on by hand)


@dataclass(frozen=True)
class PlanConfig:
    """What `plan` assumes. Efficiencies are shares of a datasheet's peak: none is measured here."""

    price: float | None = None  # of a GPU-hour
    currency: str = "USD"
    gemm_efficiency: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: {"bf16": 0.75, "fp8": 0.70, "fp4": 0.60}
    )
    attention_efficiency: float = 0.50  # of the BF16 peak
    scan_efficiency: float = 0.25  # of the BF16 peak
    quantization_efficiency: float = 0.50  # of the memory's bandwidth
    memory_efficiency: float = 0.70  # the same, of all other passes
    network_efficiency: float = 0.75
    overlap: float = 0.80  # share of the communication that can hide behind the computation
    reserved_gb: float = 8.0  # a GPU's context, NCCL's buffers, fragmentation
    corpus_tokens: Mapping[str, float] | None = None  # that each source has


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
    plan: PlanConfig = PlanConfig()
    study: StudyConfig | None = None  # of `compare +study=...`
    manifest: ManifestConfig = ManifestConfig()
    run: str | None = None  # the id or `latest`: what eval, report and status work on
    source: str | None = None  # of which source `data inspect` shows a row
    row: int = 0  # which row
    step: int | str | None = None  # which step `data at` shows; whose checkpoint others take
    resume: str | bool = False  # true, or the id of the run to go on with
    name: str | None = None  # a stable id: the same command again goes on with the same run
    experiment: str | None = None

    @property
    def one_step(self) -> int | None:
        """The step, where only one can be meant. Raises `ConfigError`."""
        if isinstance(self.step, str):
            raise ConfigError(f"step={self.step}: give one step's number")
        return self.step

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, the inverse of `from_dict`."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def decisive(self) -> dict[str, Any]:
        """What decides the trained weights and their data, as `to_dict` has it."""
        decisive = {
            name: section
            for name, section in self.to_dict().items()
            if name in {"seed", "model", "precision", "data", "train"}
        }
        for name in NOT_DECISIVE:
            decisive["train"].pop(name)
        # The checkpoint keeps account of `on_corrupt` and the last two.
        for name in ("executor", "shards_uri", "prefetch_bytes", "on_corrupt", "max_epochs"):
            decisive["data"].pop(name)
        for name in ("skip", "block"):
            decisive["data"].pop(name)
        return decisive

    def fingerprint(self) -> str:
        """Hash of what is decisive: two runs alike share it."""
        return digest(self.decisive())
