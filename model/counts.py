"""Parameters and floating-point operations, as formulas of the configuration.

All sizes are those of the configuration; 1 multiply-add is 2 operations.
"""

from __future__ import annotations

from model.config import ModelConfig


def count_parameters(config: ModelConfig) -> dict[str, int]:
    """Parameters by kind: embedding, mamba, ffn, attention, norms, head, and their total.

    ``norms`` are the blocks' and the final RMSNorm; Mamba's gated norm counts as mamba. A tied head
    counts 0.
    """
    hidden, inner, conv = config.hidden_size, config.mamba_inner_size, config.mamba_conv_size
    heads = config.mamba_num_heads
    projections = hidden * (inner + conv + heads) + inner * hidden
    mamba = projections + conv * (config.mamba_conv_kernel + 1) + 3 * heads + inner
    ffn = 2 * hidden * config.ffn_hidden_size
    attention = hidden * (2 * config.attention_size + 2 * config.attention_kv_size)
    counts = {
        "embedding": config.vocab_size * hidden,
        "mamba": config.pattern.count("M") * mamba,
        "ffn": config.pattern.count("-") * ffn,
        "attention": config.pattern.count("*") * attention,
        "norms": (config.num_blocks + 1) * hidden,
        "head": 0 if config.tie_embeddings else config.vocab_size * hidden,
    }
    return counts | {"total": sum(counts.values())}


def flops_per_token(config: ModelConfig, seq_len: int) -> dict[str, int]:
    """Forward FLOPs of a token by kind, matrix products only, 2 a multiply-add; and their total.

    Training costs three times as much (two products backward for each one forward), recomputation
    not counted. ``*_linear`` are the products with weights, those that a precision recipe may
    quantize. Attention's scores and values count all ``seq_len`` positions, the usual convention,
    though half are masked. The scan counts its chunked form: scores, their product with x, and
    the states' two products.
    """
    hidden, inner, conv = config.hidden_size, config.mamba_inner_size, config.mamba_conv_size
    state, chunk = config.mamba_state_size, min(config.mamba_chunk_size, seq_len)
    mamba_weights = hidden * (inner + conv + config.mamba_num_heads) + inner * hidden
    scan = chunk * (config.mamba_num_groups * state + inner) + 2 * state * inner
    attention_weights = hidden * (2 * config.attention_size + 2 * config.attention_kv_size)
    mamba, ffn, attention = (config.pattern.count(kind) for kind in "M-*")
    flops = {
        "mamba_linear": 2 * mamba * mamba_weights,
        "mamba_scan": 2 * mamba * scan,
        "ffn_linear": 2 * ffn * 2 * hidden * config.ffn_hidden_size,
        "attention_linear": 2 * attention * attention_weights,
        "attention_scores": 2 * attention * 2 * seq_len * config.attention_size,
        "head_linear": 2 * hidden * config.vocab_size,
    }
    return flops | {"total": sum(flops.values())}
