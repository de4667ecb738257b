"""AdamW with its weight decay on matrices alone, and its state by parameter name."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeline.config import TrainConfig
from pipeline.train.checkpoint import sharded_rows
from pipeline.train.parallel import local


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies: to matrices of linears and the embedding, nothing else.

    Norms, biases, Mamba's A_log, D and dt_bias are vectors and never decay. Nor does the depthwise
    convolution's weight, a filter of a few taps a channel (Megatron-LM lets it decay).
    """
    return parameter.ndim == 2 and name.endswith(".weight") and ".conv" not in name


def build_optimizer(model: nn.Module, train: TrainConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) over all parameters, each in one group."""
    groups: dict[bool, list[Tensor]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        groups[decays(name, parameter)].append(parameter)
    return torch.optim.AdamW(
        [
            {"params": groups[True], "weight_decay": train.weight_decay},
            {"params": groups[False], "weight_decay": 0.0},
        ],
        lr=train.learning_rate,
        betas=(train.beta1, train.beta2),
        eps=train.epsilon,
        foreach=True,
    )


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as `<parameter name>/<exp_avg | exp_avg_sq | step>` tensors."""
    return {
        f"{name}/{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]
) -> None:
    """Restore what `optimizer_tensors` gave: whole, or of a sharded parameter this rank's rows.

    Raises `ValueError` on a name that does not fit.
    """
    parameters = dict(model.named_parameters())
    for full_name, value in tensors.items():
        name, key = full_name.rsplit("/", 1)
        if name not in parameters:
            raise ValueError(f"optimizer state of {name}, which is no parameter of this model")
        parameter = parameters[name]
        if key == "step":
            optimizer.state[parameter][key] = value.cpu()
        else:
            state = optimizer.state[parameter][key] = torch.empty_like(parameter)
            local(state).copy_(value)


def sharded_state_rows(model: nn.Module) -> dict[str, slice]:
    """This rank's rows of the moments of each parameter that it does not hold whole."""
    rows = sharded_rows(model)
    return {f"{name}/{key}": rows[name] for name in rows for key in ("exp_avg", "exp_avg_sq")}
