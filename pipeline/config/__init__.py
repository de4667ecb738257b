"""The configuration as frozen dataclasses: what Hydra composes is checked once and becomes these.

Workers receive these objects, never a Hydra configuration (nothing is left to interpolate). Every
mistake raises `ConfigError` with the key's full path and what would be right; `pipeline` prints it
without a traceback and exits with 2. Amounts of training are counted in tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.config.build import build
from pipeline.config.checks import validate
from pipeline.config.errors import (
    ConfigError,
    IncompleteError,
    PermanentError,
    UnreachableError,
    nearest,
)
from pipeline.config.sections import (
    AROUND_A_RUN,
    STAGES,
    ArmConfig,
    ClusterConfig,
    Config,
    DataConfig,
    EvalsConfig,
    ExportConfig,
    FidelityConfig,
    GenerateConfig,
    HardwareConfig,
    KubernetesConfig,
    ManifestConfig,
    ModelSection,
    PhaseConfig,
    PlanConfig,
    PrecisionConfig,
    SourceConfig,
    StudyConfig,
    TokenizerConfig,
    TrackingConfig,
    TrainConfig,
)
from pipeline.config.values import differences, digest, flatten

__all__ = [
    "AROUND_A_RUN",
    "STAGES",
    "ArmConfig",
    "ClusterConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "EvalsConfig",
    "ExportConfig",
    "FidelityConfig",
    "GenerateConfig",
    "HardwareConfig",
    "IncompleteError",
    "KubernetesConfig",
    "ManifestConfig",
    "ModelSection",
    "PermanentError",
    "PhaseConfig",
    "PlanConfig",
    "PrecisionConfig",
    "SourceConfig",
    "StudyConfig",
    "TokenizerConfig",
    "TrackingConfig",
    "TrainConfig",
    "UnreachableError",
    "differences",
    "digest",
    "flatten",
    "from_dict",
    "nearest",
    "validate",
]


def from_dict(raw: Mapping[str, Any]) -> Config:
    """Build and validate a `Config`. Raises `ConfigError`."""
    config = build(Config, _with_workers(raw), "")
    validate(config)
    return config


def _with_workers(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """`cluster.workers: null` is one worker for each `gpus_per_worker` GPUs of the nodes."""
    cluster = raw.get("cluster")
    if not isinstance(cluster, Mapping) or cluster.get("workers", 0) is not None:
        return raw
    sizes = [cluster.get(name) for name in ("nodes", "gpus_per_node", "gpus_per_worker")]
    nodes, per_node, per_worker = (size if type(size) is int else 0 for size in sizes)
    if min(nodes, per_node, per_worker) < 1:
        raise ConfigError(
            f"cluster: nodes={sizes[0]}, gpus_per_node={sizes[1]}, gpus_per_worker={sizes[2]}: "
            "whole numbers above 0 (auto is for plan alone), or give cluster.workers"
        )
    return {**raw, "cluster": {**cluster, "workers": nodes * (per_node // per_worker)}}
