"""Every way in which the GEMM is compiled, for `kernels.check` and its tests."""

from __future__ import annotations

from kernels.aot import Variant
from kernels.gemm import Tiling, gemm_kernel, tilings

_MMA = {
    # Triton 3.7 writes the older name of the same size of a block.
    "nvfp4": r"tcgen05\.mma\S*kind::mxf4nvf4\.block_scale\.(block16|scale_vec::4X)",
    "mxfp4": r"tcgen05\.mma\S*kind::mxf4\.block_scale\.(block32|scale_vec::2X)",
    "mxfp8": r"tcgen05\.mma\S*kind::mxf8f6f4\.block_scale",
}
_MMA_SYNC = {
    "nvfp4": r"mma\.sync\S*kind::mxf4nvf4\.block_scale\.scale_vec::4X\S*ue4m3",
    "mxfp4": r"mma\.sync\S*kind::mxf4nvf4\.block_scale\.scale_vec::2X\S*ue8m0",
    "mxfp8": r"mma\.sync\S*kind::mxf8f6f4\.block_scale\.scale_vec::1X\S*ue8m0",
}
_BF16_MMA = {
    90: r"wgmma\.mma_async\S*f32\.bf16\.bf16",
    100: r"tcgen05\.mma\S*kind::f16",
    103: r"tcgen05\.mma\S*kind::f16",
    120: r"mma\.sync\S*f32\.bf16\.bf16\.f32",
}
_COPY = r"cp\.async\.bulk\.tensor"
_DATACENTER = (100, 103)


def _gemm(
    format: str,
    tiling: Tiling,
    targets: tuple[int, ...],
    *,
    decode: bool = False,
    accumulate: bool = True,
    bf16: bool = False,
) -> Variant:
    block = 16 if format == "nvfp4" else 32
    e2m1 = format != "mxfp8"
    step = max(tiling.step_bytes * (2 if e2m1 else 1), 4 * block)
    codes, scales = "u8" if e2m1 else "fp8e4nv", "fp8e4nv" if block == 16 else "u8"
    blocks = step // block

    def descriptors(name: str, rows: int) -> dict[str, str]:
        return {
            f"{name}_codes": f"tensordesc<{codes}[{rows}, {step // 2 if e2m1 else step}]>",
            f"{name}_scales": f"tensordesc<{scales}[{rows // 128}, {blocks // 4}, 2, 256]>",
        }

    part = tiling.columns >> tiling.halvings
    output = "bf16" if bf16 else "fp32"
    notes = ["decoded" if decode else "", "+=" if accumulate else "", "BF16" if bf16 else ""]
    notes.append(f"{tiling.rows}x{tiling.columns}x{step}, {tiling.stages} stages")
    notes.append("specialized" if tiling.specialized else "")
    return Variant(
        name=" ".join(["gemm", format, *filter(None, notes)]),
        kernel=gemm_kernel,
        signature={
            **descriptors("a", tiling.rows),
            **descriptors("b", tiling.columns),
            "c": f"tensordesc<{output}[{tiling.rows}, {part}]>",
            "a_global_ptr": "*fp32",
            "b_global_ptr": "*fp32",
            "num_rows": "i32",
            "num_columns": "i32",
            "num_steps": "i32",
        },
        constants={
            "FORMAT": "e2m1" if e2m1 else "e4m3",
            "BLOCK": block,
            "DECODE": decode,
            "GLOBAL": format == "nvfp4",
            "ACCUMULATE": accumulate,
            "ROWS": tiling.rows,
            "COLUMNS": tiling.columns,
            "STEP": step,
            "HALVINGS": tiling.halvings,
            "STAGES": tiling.stages,
            "SPECIALIZED": tiling.specialized,
        },
        num_warps=tiling.warps,
        elements=tiling.rows * tiling.columns,
        bytes_per_element=2 if bf16 else 4,
        required={t: {_mma(format, t, decode): 1, _COPY: 4} for t in targets},
        trips=None,
        unaligned=("num_rows", "num_steps"),
        targets=targets,
    )


def _mma(format: str, target: int, decode: bool) -> str:
    if decode:
        return _BF16_MMA[target]
    return _MMA_SYNC[format] if target == 120 else _MMA[format]


def gemm_variants() -> list[Variant]:
    """All variants: every tiling in NVFP4, and each target's default in the other formats."""
    made: list[Variant] = []
    for tiling in tilings(100, False):
        made.append(_gemm("nvfp4", tiling, _DATACENTER if not made else (100,)))
    made.append(_gemm("nvfp4", tilings(100, False)[0], (100,), accumulate=False, bf16=True))
    made.append(_gemm("nvfp4", tilings(120, False)[0], (120,)))
    made.append(_gemm("nvfp4", tilings(90, True)[0], (90,), decode=True))
    made.append(_gemm("nvfp4", tilings(100, True)[0], _DATACENTER, decode=True))
    made.append(_gemm("nvfp4", tilings(90, True)[1], (90,), decode=True))
    made.append(_gemm("nvfp4", tilings(120, True)[0], (120,), decode=True))
    for format in ("mxfp4", "mxfp8"):
        made.append(_gemm(format, tilings(100, False)[0], (100,)))
        made.append(_gemm(format, tilings(120, False)[0], (120,)))
        made.append(_gemm(format, tilings(90, True)[0], (90,), decode=True))
    return made
