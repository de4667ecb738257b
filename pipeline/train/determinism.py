"""`train.deterministic`: every switch that makes a GPU give the same bits twice.

On a CPU nothing needs it. Between numbers of workers it is `train.reproducible` that counts.
"""

from __future__ import annotations

import os

import torch

ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # one workspace a stream: no race for split sums
    "MAMBA_DETERMINISTIC": "1",  # mamba-ssm: the scan's backward pass sums without atomics
    "CAUSAL_CONV1D_DETERMINISTIC": "1",  # causal-conv1d: the same for its weight's gradient
    "NCCL_ALGO": "Ring",  # one order of sums whatever the size of a message
    "NCCL_PROTO": "Simple",
    "NCCL_NVLS_ENABLE": "0",  # sums in the switch come in no fixed order
}
"""Read where a library is first used, so they must be set before the model is built."""


def make_deterministic() -> dict[str, str]:
    """Set all switches of this process. Returns them by name, for the log.

    From then on torch raises `RuntimeError` at an operation that has no deterministic form.
    """
    os.environ.update(ENVIRONMENT)
    torch.use_deterministic_algorithms(True)  # attention's backward pass among others
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward pass has no deterministic form
    return {
        **ENVIRONMENT,
        "torch.use_deterministic_algorithms": "True",
        "torch.backends.cudnn.benchmark": "False",
        "torch.backends.cuda.enable_cudnn_sdp": "False",
    }
