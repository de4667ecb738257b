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
from pipeline.config.errors import ConfigError, PermanentError, nearest
from pipeline.config.sections import (
    AROUND_A_RUN,
    STAGES,
    ClusterConfig,
    Config,
    DataConfig,
    EvalsConfig,
    ExportConfig,
    FidelityConfig,
    GenerateConfig,
    ModelSection,
    PhaseConfig,
    PrecisionConfig,
    SourceConfig,
    TokenizerConfig,
    TrackingConfig,
    TrainConfig,
)
from pipeline.config.values import differences, digest, flatten

__all__ = [
    "AROUND_A_RUN",
    "STAGES",
    "ClusterConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "EvalsConfig",
    "ExportConfig",
    "FidelityConfig",
    "GenerateConfig",
    "ModelSection",
    "PermanentError",
    "PhaseConfig",
    "PrecisionConfig",
    "SourceConfig",
    "TokenizerConfig",
    "TrackingConfig",
    "TrainConfig",
    "differences",
    "digest",
    "flatten",
    "from_dict",
    "nearest",
    "validate",
]


def from_dict(raw: Mapping[str, Any]) -> Config:
    """Build and validate a `Config`. Raises `ConfigError`."""
    config = build(Config, raw, "")
    validate(config)
    return config
