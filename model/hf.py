"""Maps to and from transformers' ``NemotronHForCausalLM`` (transformers 5), one to one:
configuration and state dict.

Ours keeps apart what a precision policy quantizes apart, theirs does not, so two pairs are cut and
joined along rows: ``in_proj = [in_zxbc; in_dt]``, ``[q_proj; k_proj; v_proj] = qkv``. All else is a
change of name. Transformers does not tie this architecture's embeddings: a tied head is written as
a copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from model.config import ModelConfig

LAYER_TYPES = {"M": "linear_attention", "-": "mlp", "*": "full_attention"}
PATTERN_CHARS = {
    **{layer_type: char for char, layer_type in LAYER_TYPES.items()},
    "mamba": "M",
    "attention": "*",
}
NO_DT_FLOOR = 1e-10
"""Transformers clamps dt at ``time_step_min``, whose logarithm it also takes: below any dt that
matters, yet not 0."""

REQUIRED = {
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "use_conv_bias": True,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "mamba_proj_bias": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "sliding_window": None,
    "num_nextn_predict_layers": 0,
}
"""Their switches that this architecture fixes."""

SIZES = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size",),
    "ffn_hidden_size": ("intermediate_size",),
    "num_attention_heads": ("num_attention_heads",),
    "num_kv_heads": ("num_key_value_heads",),
    "attention_head_dim": ("head_dim", "attention_head_dim"),
    "mamba_num_heads": ("mamba_num_heads",),
    "mamba_head_dim": ("mamba_head_dim",),
    "mamba_state_size": ("ssm_state_size",),
    "mamba_num_groups": ("n_groups", "mamba_n_groups"),
    "mamba_conv_kernel": ("conv_kernel", "mamba_d_conv"),
    "mamba_chunk_size": ("chunk_size", "mamba_chunk_size"),
}
"""Our size -> their names for it, the one to write first."""


def config_to_nemotron_h(config: ModelConfig, **extra: Any) -> dict[str, Any]:
    """The keyword arguments of ``NemotronHConfig``, also the content of ``config.json``.

    ``extra`` adds or overrides keys, e.g. ``eos_token_id``. Raises ValueError on what NemotronH has
    no place for (rotary positions).
    """
    if config.rope_theta is not None:
        raise ValueError(
            f"rope_theta={config.rope_theta} has no place in NemotronH, which has no positions; "
            "only models with rope_theta=null can be exported"
        )
    values: dict[str, Any] = {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "hybrid_override_pattern": config.pattern,
        "layers_block_type": [LAYER_TYPES[char] for char in config.pattern],
        "layer_norm_epsilon": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.init_std,
        "time_step_min": max(config.dt_floor, NO_DT_FLOOR),
        "time_step_max": config.dt_init_max,
        "time_step_floor": config.dt_init_floor,
    }
    values |= {theirs[0]: getattr(config, ours) for ours, theirs in SIZES.items()}
    return values | REQUIRED | extra


def config_from_nemotron_h(values: Mapping[str, Any]) -> ModelConfig:
    """A ``config.json`` (or ``NemotronHConfig.to_dict()``) as ours.

    Raises ValueError, naming the key, on experts, biases, other activations and missing sizes.
    """
    for key, required in REQUIRED.items():
        if key in values and values[key] != required:
            raise ValueError(
                f"{key}={values[key]!r} is not supported: this architecture has {required!r}"
            )
    sizes = {ours: _first(values, theirs) for ours, theirs in SIZES.items()}
    floor = values.get("time_step_min", 0.0)
    return ModelConfig(
        pattern=_pattern(values),
        norm_eps=values.get("layer_norm_epsilon", 1e-5),
        tie_embeddings=values.get("tie_word_embeddings", False),
        init_std=values.get("initializer_range", 0.02),
        dt_floor=floor if floor > NO_DT_FLOOR else 0.0,
        dt_init_max=values.get("time_step_max", 0.1),
        dt_init_floor=values.get("time_step_floor", 1e-4),
        **sizes,
    )


def _first(values: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    for name in names:
        if values.get(name) is not None:
            return values[name]
    raise ValueError(f"the configuration lacks {names[0]!r}; add it, no size has a default here")


def _pattern(values: Mapping[str, Any]) -> str:
    pattern: str | None = values.get("hybrid_override_pattern")
    types: list[str] | None = values.get("layers_block_type") or values.get("layer_types")
    if types is not None:
        unknown = sorted(set(types) - set(PATTERN_CHARS))
        if unknown:
            raise ValueError(
                f"layers_block_type has {unknown}; supported: {sorted(PATTERN_CHARS)} "
                "(mixture-of-experts blocks are not)"
            )
        from_types = "".join(PATTERN_CHARS[layer_type] for layer_type in types)
        if pattern is not None and pattern != from_types:
            raise ValueError(
                f"hybrid_override_pattern={pattern!r} contradicts layers_block_type, which reads "
                f"{from_types!r}; remove the wrong one"
            )
        return from_types
    if pattern is None:
        raise ValueError(
            "the configuration lacks 'layers_block_type' and 'hybrid_override_pattern'; add either"
        )
    unknown = sorted(set(pattern) - set(LAYER_TYPES))
    if unknown:
        raise ValueError(
            f"hybrid_override_pattern={pattern!r} has {unknown}; supported: 'M', '-' and '*' "
            "('E', mixture-of-experts, is not)"
        )
    return pattern


def _renames(config: ModelConfig) -> dict[str, str]:
    """Our name -> theirs, of all parameters that are not cut or joined."""
    names = {
        "embedding.weight": "model.embeddings.weight",
        "norm.weight": "model.norm_f.weight",
        "head.weight": "lm_head.weight",
    }
    mixers = {
        "M": {
            "mamba.conv.bias": "conv1d.bias",
            "mamba.dt_bias": "dt_bias",
            "mamba.A_log": "A_log",
            "mamba.D": "D",
            "mamba.norm.weight": "norm.weight",
            "mamba.out.weight": "out_proj.weight",
        },
        "-": {"ffn.up.weight": "up_proj.weight", "ffn.down.weight": "down_proj.weight"},
        "*": {"attention.o.weight": "o_proj.weight"},
    }
    for i, char in enumerate(config.pattern):
        names[f"blocks.{i}.norm.weight"] = f"model.layers.{i}.norm.weight"
        for ours, theirs in mixers[char].items():
            names[f"blocks.{i}.{ours}"] = f"model.layers.{i}.mixer.{theirs}"
    return names


def to_nemotron_h(state_dict: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Our state dict under their names and shapes.

    Raises ValueError on missing or unknown names.
    """
    rest = dict(state_dict)
    if config.tie_embeddings and "embedding.weight" in rest:
        rest.setdefault("head.weight", rest["embedding.weight"])
    result = {theirs: _take(rest, ours) for ours, theirs in _renames(config).items()}
    kv = config.attention_kv_size
    for i, char in enumerate(config.pattern):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}.mixer"
        if char == "M":
            result[f"{theirs}.conv1d.weight"] = _take(rest, f"{ours}.mamba.conv.weight")[:, None]
            in_zxbc = _take(rest, f"{ours}.mamba.in_zxbc.weight")
            in_dt = _take(rest, f"{ours}.mamba.in_dt.weight")
            result[f"{theirs}.in_proj.weight"] = torch.cat([in_zxbc, in_dt])
        elif char == "*":
            qkv = _take(rest, f"{ours}.attention.qkv.weight")
            parts = qkv.split([config.attention_size, kv, kv])
            for name, part in zip("qkv", parts, strict=True):
                result[f"{theirs}.{name}_proj.weight"] = part.contiguous()
    _require_empty(rest)
    return result


def from_nemotron_h(state_dict: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Their state dict under our names and shapes; public files' ``backbone.`` prefix is read too.

    Raises ValueError on missing or unknown names.
    """
    rest = {
        "model." + name.removeprefix("backbone.") if name.startswith("backbone.") else name: tensor
        for name, tensor in state_dict.items()
    }
    if config.tie_embeddings and "model.embeddings.weight" in rest:
        rest.setdefault("lm_head.weight", rest["model.embeddings.weight"])
    result = {ours: _take(rest, theirs) for ours, theirs in _renames(config).items()}
    inner_and_conv = config.mamba_inner_size + config.mamba_conv_size
    for i, char in enumerate(config.pattern):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}.mixer"
        if char == "M":
            result[f"{ours}.mamba.conv.weight"] = _take(rest, f"{theirs}.conv1d.weight").squeeze(1)
            in_proj = _take(rest, f"{theirs}.in_proj.weight")
            in_zxbc, in_dt = in_proj.split([inner_and_conv, config.mamba_num_heads])
            result[f"{ours}.mamba.in_zxbc.weight"] = in_zxbc.contiguous()
            result[f"{ours}.mamba.in_dt.weight"] = in_dt.contiguous()
        elif char == "*":
            parts = [_take(rest, f"{theirs}.{name}_proj.weight") for name in "qkv"]
            result[f"{ours}.attention.qkv.weight"] = torch.cat(parts)
    _require_empty(rest)
    return result


def _take(tensors: dict[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise ValueError(f"the state dict lacks {name!r}; does it belong to this configuration?")
    return tensors.pop(name)


def _require_empty(rest: Mapping[str, Tensor]) -> None:
    if rest:
        raise ValueError(
            f"the state dict has {sorted(rest)[:5]}, unknown to this configuration"
            + (f" (and {len(rest) - 5} more)" if len(rest) > 5 else "")
        )
