"""`python -m kernels.burnin`: the first hour on a new card, in under 8 minutes.

Prints one page of verdicts: every kernel to the byte against the reference, the order of the bytes
that `cvt.rs` takes, a linear's step against the oracle, determinism, bandwidth and GEMM peaks, and
200 steps of the tiny run beside the CPU's. Ends with 0 if nothing failed, with 1 otherwise, and at
once with 1 where there is no CUDA device. What could not be checked is named with the reason, and
counts as no failure.

The checks import what lies above `kernels`, which nothing else in this folder does.
"""
