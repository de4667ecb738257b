"""The ways through the pipeline's training step that are held to the oracle.

Each is two consecutive optimizer steps of a tiny hybrid over two micro-batches of packed documents,
so that moments, requantized weights and accumulation are always part of the comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch

from model import HybridModel, ModelConfig, document_index
from model.compiling import keep_outside
from model.hybrid import Checkpointing
from pipeline.config import PhaseConfig, TrainConfig
from pipeline.data.stream import IGNORED, Batch
from pipeline.train.optim import build_optimizer
from quant import Precision, apply_recipe, named_recipe
from quant.backend import Backend
from quant.backend import backend as quantizers
from tests.oracle.linear import recipe_table
from tests.oracle.step import AdamW, Step, linear_names
from tests.oracle.witness import Watch, Witness

SEED = 2**40 + 3
FIRST_STEP = 7
CLIP_NORM = 0.5
EOS = 0
THREE_BLOCKS = ModelConfig(
    pattern="M*-",
    vocab_size=64,
    hidden_size=32,
    ffn_hidden_size=64,
    num_attention_heads=2,
    num_kv_heads=1,
    attention_head_dim=16,
    mamba_num_heads=4,
    mamba_head_dim=16,
    mamba_state_size=16,
    mamba_num_groups=2,
    mamba_chunk_size=8,
)
FIVE_BLOCKS = replace(THREE_BLOCKS, pattern="M-M*-")
TRAIN = TrainConfig(
    tokens=4096,
    sequence_length=24,
    global_batch=4,
    micro_batch=2,
    phases=(PhaseConfig(blend={"text": 1.0}),),
    learning_rate=0.01,
    final_learning_rate=0.001,
    warmup_tokens=0,
    clip_norm=CLIP_NORM,
)


@dataclass(frozen=True)
class Path:
    """``first`` and ``last`` blocks stay in BF16; ``modes`` is the precision of each of the steps.

    ``micro_batches`` are indices in the global batch; each holds 2 rows of ``row_length`` tokens.
    ``compiled``: what goes through torch.compile, with ``compiler`` as its backend. ``between``:
    what happens to the model between the two steps, and is not part of a step.
    """

    recipe: str = "nvfp4_paper"
    config: ModelConfig = THREE_BLOCKS
    first: int = 0
    last: int = 0
    row_length: int = 24
    micro_batches: tuple[int, ...] = (0, 1)
    modes: tuple[str, ...] = ("recipe", "recipe")
    checkpointing: Checkpointing = "none"
    quantizers: Backend = "auto"
    gemm: str | None = None
    compiled: Literal["nothing", "blocks", "loss"] = "nothing"
    compiler: str = "aot_eager"
    between: Callable[[HybridModel, Precision], None] | None = None


PATHS = {
    "the paper's recipe": Path(),
    "the production recipe": Path(recipe="nvfp4"),
    "bf16": Path(recipe="bf16"),
    "five blocks, both ends in BF16": Path(config=FIVE_BLOCKS, first=1, last=1),
    "the production recipe, last block in BF16": Path("nvfp4", FIVE_BLOCKS, last=1),
    "40 tokens, which fill no last tile": Path(row_length=20),
    "40 tokens in MXFP8": Path(recipe="nvfp4", row_length=20),
    "micro-batches of another rank": Path(micro_batches=(5, 2)),
    "one micro-batch": Path(micro_batches=(0,)),
    "late switch to BF16": Path(modes=("recipe", "bf16")),
    "late switch of the forward pass": Path(recipe="nvfp4", modes=("recipe", "bf16_forward")),
    "late switch under recompute": Path(modes=("recipe", "bf16_forward"), checkpointing="full"),
    "quantizers in plain torch": Path(recipe="nvfp4", quantizers="reference"),
    "block by block GEMMs": Path(gemm="reference"),
}


def batches(path: Path, step: int, device: str = "cpu") -> list[tuple[int, Batch]]:
    """Random tokens in documents; a ragged share of the labels counts."""
    made = []
    for index in path.micro_batches:
        generator = torch.Generator().manual_seed(1000 * step + index)
        shape = (2, path.row_length)
        tokens = torch.randint(1, path.config.vocab_size, shape, generator=generator)
        tokens[torch.rand(shape, generator=generator) < 0.08] = EOS
        labels = tokens.roll(-1, 1)
        labels[torch.rand(shape, generator=generator) < 0.1 * (index + 1)] = IGNORED
        sources = torch.zeros(2, dtype=torch.int64)
        documents = document_index(tokens, EOS)
        tensors = (t.to(device) for t in (tokens, labels, documents, sources))
        made.append((index, Batch(*tensors, 2 * index, 2)))
    return made


def walk(path: Path, device: str = "cpu") -> list[tuple[Step, Witness]]:
    """Take the path's steps with the pipeline's own code; each with the oracle's task."""
    model = HybridModel(path.config, activation_checkpointing=path.checkpointing, seed=1).to(device)
    layers = linear_names(model)
    recipe = named_recipe(path.recipe).with_blocks(path.first, path.last)
    num_blocks = path.config.num_blocks
    precision = apply_recipe(model, recipe, num_blocks=num_blocks, seed=SEED, backend=path.gemm)
    optimizer = build_optimizer(model, TRAIN)
    with compiled(model, path):
        watch = Watch(model, precision, optimizer, compiled=path.compiled != "nothing")
        return _walk_watched(path, watch, layers, device)


@contextmanager
def compiled(model: HybridModel, path: Path) -> Iterator[None]:
    """The model compiled as the path says, and all graphs forgotten afterwards."""
    if path.compiled == "nothing":
        yield
        return
    torch.compiler.reset()
    if path.compiled == "blocks":
        model.compile_blocks(path.compiler)
    else:
        keep_outside()
        model.loss = torch.compile(model.loss, backend=path.compiler)  # type: ignore[method-assign]
    yield
    torch.compiler.reset()


def _walk_watched(
    path: Path, watch: Watch, layers: list[str], device: str
) -> list[tuple[Step, Witness]]:
    model, precision, num_blocks = watch.model, watch.precision, path.config.num_blocks
    walked = []
    for position, mode in enumerate(path.modes):
        if position and path.between is not None:
            path.between(model, precision)
        precision.mode = mode
        step = FIRST_STEP + position
        rate = TRAIN.learning_rate / (1 + position)
        with quantizers(path.quantizers):
            witness = watch.step(
                batches(path, step, device), step=step, learning_rate=rate, clip_norm=CLIP_NORM
            )
        task = Step(
            config=path.config,
            weights=witness.weights_before,
            micro_batches=witness.micro_batches,
            seed=SEED,
            step=step,
            formats=recipe_table(path.recipe, layers, num_blocks, path.first, path.last, mode=mode),
            adamw=AdamW(rate, TRAIN.beta1, TRAIN.beta2, TRAIN.epsilon, TRAIN.weight_decay),
            clip_norm=CLIP_NORM,
            moments=witness.moments_before,
        )
        walked.append((task, witness))
    return walked
