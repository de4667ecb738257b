"""The hybrid's shape: one frozen dataclass, checked when it is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

BLOCK_KINDS = {"M": "mamba", "-": "ffn", "*": "attention"}


@dataclass(frozen=True)
class ModelConfig:
    """A hybrid Mamba-Transformer's shape and initial scales.

    ``pattern`` names one pre-norm residual block a character: ``M`` a Mamba-2 mixer, ``-`` a
    squared-ReLU feed-forward network, ``*`` grouped-query attention. Sizes count elements.
    ``rope_theta=None`` means no positions (hybrids); a number means rotary embeddings.
    ``dt_floor`` clamps Mamba's time step from below: 0, Megatron's behaviour, never does.

    Raises ValueError, naming the field, its value and the way out, when the shape is impossible.
    """

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
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    init_std: float = 0.02
    dt_init_min: float = 1e-3
    dt_init_max: float = 1e-1
    dt_init_floor: float = 1e-4
    dt_floor: float = 0.0
    a_init_min: float = 1.0
    a_init_max: float = 16.0

    def __post_init__(self) -> None:
        unknown = sorted(set(self.pattern) - set(BLOCK_KINDS))
        if unknown or not self.pattern:
            raise ValueError(
                f"pattern={self.pattern!r} must be a non-empty string of 'M' (Mamba-2), '-' "
                f"(feed-forward) and '*' (attention); remove {unknown or 'nothing, add blocks'}"
            )
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and (
                isinstance(value, bool) or not isinstance(value, int) or value < 1
            ):
                raise ValueError(f"{field.name}={value!r} must be a positive integer")
        self._require_multiple("num_attention_heads", "num_kv_heads")
        self._require_multiple("mamba_num_heads", "mamba_num_groups")
        if self.mamba_conv_kernel < 2:
            raise ValueError(f"mamba_conv_kernel={self.mamba_conv_kernel} must be at least 2")
        if self.rope_theta is not None and (self.rope_theta <= 0 or self.attention_head_dim % 2):
            raise ValueError(
                f"rope_theta={self.rope_theta!r} needs a positive base and an even "
                f"attention_head_dim (it is {self.attention_head_dim}); use null for no positions"
            )
        for name in ("norm_eps", "init_std", "dt_init_min", "dt_init_floor", "a_init_min"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be positive")
        for low, high in (("dt_init_min", "dt_init_max"), ("a_init_min", "a_init_max")):
            if not getattr(self, low) <= getattr(self, high):
                raise ValueError(
                    f"{low}={getattr(self, low)!r} must not exceed {high}={getattr(self, high)!r}"
                )
        if not self.dt_floor >= 0:
            raise ValueError(f"dt_floor={self.dt_floor!r} must be 0 (no clamp) or positive")

    def _require_multiple(self, name: str, divisor_name: str) -> None:
        value, divisor = getattr(self, name), getattr(self, divisor_name)
        if value % divisor:
            raise ValueError(
                f"{name}={value} must be a multiple of {divisor_name}={divisor}; change either"
            )

    @property
    def num_blocks(self) -> int:
        """Residual blocks, each of which writes once to the residual stream."""
        return len(self.pattern)

    @property
    def mamba_inner_size(self) -> int:
        """Width of Mamba's z, x and y: heads times head dim."""
        return self.mamba_num_heads * self.mamba_head_dim

    @property
    def mamba_conv_size(self) -> int:
        """Channels of the causal convolution: x, B and C side by side."""
        return self.mamba_inner_size + 2 * self.mamba_num_groups * self.mamba_state_size

    @property
    def attention_size(self) -> int:
        """Width of all query heads side by side."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def attention_kv_size(self) -> int:
        """Width of all key (or value) heads side by side."""
        return self.num_kv_heads * self.attention_head_dim

    def to_dict(self) -> dict[str, Any]:
        """Plain fields, for YAML, JSON and checkpoints."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """The inverse of ``to_dict``. Raises ValueError on a field it does not know."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"unknown model fields {unknown}; known fields: {sorted(known)}")
        return cls(**values)
