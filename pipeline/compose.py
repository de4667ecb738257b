"""A configuration of Hydra's overrides, for whoever needs more than the command line's own."""

from __future__ import annotations

from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.config import ConfigError
from pipeline.help import explain_override


def compose(overrides: list[str]) -> dict[str, Any]:
    """Plain values, nothing left to interpolate. Raises `ConfigError` for what Hydra refuses."""
    try:
        if GlobalHydra.instance().is_initialized():
            composed = hydra.compose("config", overrides)
        else:
            with hydra.initialize_config_module("conf", version_base="1.3"):
                composed = hydra.compose("config", overrides)
        raw: Any = OmegaConf.to_container(composed, resolve=True)
    except (hydra.errors.HydraException, OmegaConfBaseException) as error:
        hints = [hint for item in overrides if (hint := explain_override(item))]
        raise ConfigError("\n".join(hints) or str(error)) from error
    return raw
