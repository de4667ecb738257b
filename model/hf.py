"""Maps to and from transformers' ``NemotronHForCausalLM`` (transformers 5), one to one:
configuration, linears and state dict.

Ours keeps apart what a precision policy quantizes apart, theirs does not, so two pairs are cut and
joined along rows: ``in_proj = [in_zxbc; in_dt]``, ``[q_proj; k_proj; v_proj] = qkv``. All else is a
change of name. Transformers does not tie this architecture's embeddings: a tied head is written as
a copy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

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

NO_LIMIT = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])
"""Their ``time_step_limit``, and as transformers writes it into JSON."""

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

NUMBERS = {
    "norm_eps": ("layer_norm_epsilon", 1e-5),
    "init_std": ("initializer_range", 0.02),
    "dt_floor": ("time_step_min", 0.0),
    "dt_init_max": ("time_step_max", 0.1),
    "dt_init_floor": ("time_step_floor", 1e-4),
}
"""Our number -> their name for it, and its value where they leave it out."""


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
        "num_hidden_layers": config.num_blocks,
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
    limit = values.get("time_step_limit", NO_LIMIT[0])
    if (list(limit) if isinstance(limit, tuple) else limit) not in NO_LIMIT:
        raise ValueError(
            f"time_step_limit={limit!r} is not supported: this architecture has [0, infinity]"
        )
    pattern = _pattern(values)
    if values.get("num_hidden_layers", len(pattern)) != len(pattern):
        raise ValueError(
            f"num_hidden_layers={values['num_hidden_layers']!r} contradicts the {len(pattern)} "
            "blocks of the pattern; remove the wrong one"
        )
    sizes = {ours: _first(values, theirs) for ours, theirs in SIZES.items()}
    numbers: dict[str, Any] = {
        ours: _number(values, theirs, default) for ours, (theirs, default) in NUMBERS.items()
    }
    if numbers["dt_floor"] <= NO_DT_FLOOR:
        numbers["dt_floor"] = 0.0
    tied = values.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise ValueError(f"tie_word_embeddings={tied!r} must be true or false")
    return ModelConfig(pattern=pattern, tie_embeddings=tied, **numbers, **sizes)


def _number(values: Mapping[str, Any], name: str, default: float) -> float:
    value = values.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name}={value!r} must be a finite number")
    return float(value)


def _first(values: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    for name in names:
        if values.get(name) is not None:
            return values[name]
    raise ValueError(f"the configuration lacks {names[0]!r}; add it, no size has a default here")


def _pattern(values: Mapping[str, Any]) -> str:
    pattern: str | None = values.get("hybrid_override_pattern")
    types: list[str] | None = values.get("layers_block_type") or values.get("layer_types")
    for name, value, kind in (
        ("hybrid_override_pattern", pattern, str),
        ("layers_block_type", types, list),
    ):
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{name}={value!r} must be a {kind.__name__}")
    if types is not None:
        unknown = sorted({str(layer_type) for layer_type in types} - set(PATTERN_CHARS))
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


class Rows(NamedTuple):
    """Rows ``start`` .. ``end - 1`` of the weight of one of our linears."""

    linear: str
    start: int
    end: int


def linear_rows(config: ModelConfig) -> dict[str, tuple[Rows, ...]]:
    """Each of their linears, by module name, as rows of ours, in the order in which they join."""
    hidden, kv = config.hidden_size, config.attention_kv_size
    zxbc = config.mamba_inner_size + config.mamba_conv_size
    found: dict[str, tuple[Rows, ...]] = {}
    for i, char in enumerate(config.pattern):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}.mixer"
        if char == "M":
            found[f"{theirs}.in_proj"] = (
                Rows(f"{ours}.mamba.in_zxbc", 0, zxbc),
                Rows(f"{ours}.mamba.in_dt", 0, config.mamba_num_heads),
            )
            found[f"{theirs}.out_proj"] = (Rows(f"{ours}.mamba.out", 0, hidden),)
        elif char == "-":
            found[f"{theirs}.up_proj"] = (Rows(f"{ours}.ffn.up", 0, config.ffn_hidden_size),)
            found[f"{theirs}.down_proj"] = (Rows(f"{ours}.ffn.down", 0, hidden),)
        else:
            start = 0
            for name, size in zip("qkv", (config.attention_size, kv, kv), strict=True):
                rows = Rows(f"{ours}.attention.qkv", start, start + size)
                found[f"{theirs}.{name}_proj"] = (rows,)
                start += size
            found[f"{theirs}.o_proj"] = (Rows(f"{ours}.attention.o", 0, hidden),)
    found["lm_head"] = (Rows("head", 0, config.vocab_size),)
    return found


def _renames(config: ModelConfig) -> dict[str, str]:
    """Our name -> theirs, of all parameters but linears' weights and convolutions' (see there)."""
    names = {"embedding.weight": "model.embeddings.weight", "norm.weight": "model.norm_f.weight"}
    mamba = {
        "mamba.conv.bias": "conv1d.bias",
        "mamba.dt_bias": "dt_bias",
        "mamba.A_log": "A_log",
        "mamba.D": "D",
        "mamba.norm.weight": "norm.weight",
    }
    for i, char in enumerate(config.pattern):
        names[f"blocks.{i}.norm.weight"] = f"model.layers.{i}.norm.weight"
        for ours, theirs in mamba.items() if char == "M" else ():
            names[f"blocks.{i}.{ours}"] = f"model.layers.{i}.mixer.{theirs}"
    return names


def _convolutions(config: ModelConfig) -> dict[str, str]:
    """Our name -> theirs, of the convolutions' weights: theirs have a dimension more."""
    return {
        f"blocks.{i}.mamba.conv.weight": f"model.layers.{i}.mixer.conv1d.weight"
        for i, char in enumerate(config.pattern)
        if char == "M"
    }


def to_nemotron_h(state_dict: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Our state dict under their names and shapes.

    Raises ValueError on missing or unknown names.
    """
    rest = dict(state_dict)
    if config.tie_embeddings and "embedding.weight" in rest:
        rest.setdefault("head.weight", rest["embedding.weight"])
    result = {theirs: _take(rest, ours) for ours, theirs in _renames(config).items()}
    for ours, theirs in _convolutions(config).items():
        result[theirs] = _take(rest, ours)[:, None]
    table = linear_rows(config)
    names = {f"{rows.linear}.weight" for parts in table.values() for rows in parts}
    weights = {name: _take(rest, name) for name in sorted(names)}
    for theirs, parts in table.items():
        joined = [weights[f"{rows.linear}.weight"][rows.start : rows.end] for rows in parts]
        result[f"{theirs}.weight"] = joined[0] if len(joined) == 1 else torch.cat(joined)
    _require_empty(rest)
    return result


def from_nemotron_h(state_dict: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Their state dict under our names and shapes; public files' ``backbone.`` prefix is read too.

    Raises ValueError on missing or unknown names, and on a linear of other sizes.
    """
    rest = {
        "model." + name.removeprefix("backbone.") if name.startswith("backbone.") else name: tensor
        for name, tensor in state_dict.items()
    }
    if config.tie_embeddings and "model.embeddings.weight" in rest:
        rest.setdefault("lm_head.weight", rest["model.embeddings.weight"])
    result = {ours: _take(rest, theirs) for ours, theirs in _renames(config).items()}
    for ours, theirs in _convolutions(config).items():
        result[ours] = _take(rest, theirs).squeeze(1)
    pieces: dict[str, list[Tensor]] = {}
    for theirs, parts in linear_rows(config).items():
        weight = _take(rest, f"{theirs}.weight")
        sizes = [rows.end - rows.start for rows in parts]
        if weight.ndim != 2 or len(weight) != sum(sizes):
            raise ValueError(
                f"{theirs}.weight is {tuple(weight.shape)}, this configuration has {sum(sizes)} "
                "rows there"
            )
        for rows, piece in zip(parts, weight.split(sizes), strict=True):
            pieces.setdefault(rows.linear, []).append(piece)
    for name, joined in pieces.items():
        weight = joined[0].contiguous() if len(joined) == 1 else torch.cat(joined)
        result[f"{name}.weight"] = weight
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
