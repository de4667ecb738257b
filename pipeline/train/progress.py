"""How far a run is, and how it goes on from a checkpoint, from its parent's, or from none."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.config import AROUND_A_RUN, ConfigError, differences
from pipeline.train import checkpoint
from pipeline.train.checkpoint import Checkpoint
from pipeline.train.exclusions import Exclusions
from pipeline.train.optim import load_optimizer_tensors, sharded_state_rows
from pipeline.train.parallel import from_rank_0
from pipeline.train.setup import Setup
from pipeline.train.spikes import SpikeWindow
from pipeline.warm_start import load_weights

OPTIMIZER_CONSTANTS = ("weight_decay", "beta1", "beta2", "epsilon", "clip_norm", "reproducible")


@dataclass
class Progress:
    """All that the next step depends on beside tensors.

    step: optimizer steps done or skipped; the next one's number. skipped: those without an update.
    validation: the last held-out losses, by precision.
    """

    window: SpikeWindow
    step: int = 0
    skipped: int = 0
    validation: dict[str, float] = field(default_factory=dict)
    exclusions: Exclusions = field(default_factory=Exclusions)

    def state(self, setup: Setup) -> dict[str, Any]:
        """All that a checkpoint of now holds beside tensors."""
        tracking = setup.run.path / "tracking.json"
        dtype = setup.trainable.model.compute_dtype
        return {
            "identity": identity(setup, self.step),
            "skipped_steps": self.skipped,
            "validation": self.validation,
            "window": self.window.values,
            "exclusions": self.exclusions.to_dict(),
            "weight_dtype": str(dtype).removeprefix("torch."),
            "lineage": setup.lineage.to_dict() if setup.lineage else None,
            "warm_start": setup.warm_start.to_dict() if setup.warm_start else None,
            "mlflow_run_id": json.loads(tracking.read_text())["run_id"]
            if tracking.is_file()
            else None,
            "config": setup.config.to_dict(),
        }

    def restore(self, setup: Setup, note: Callable[[str], None]) -> bool:
        """Go on from the newest checkpoint, or from the parent's, or begin; weights, too.

        Returns whether the run now stands on another's checkpoint alone. Every rank calls it.
        note: takes a sentence on damaged checkpoints that were passed over.

        Raises `ConfigError` where a checkpoint is of another run, or where there are some and none
        can be used: beginning again would in time remove them.
        """
        # Rank 0 finds it: storage may not show all ranks the same one.
        folder = setup.run.checkpoints
        newest = checkpoint.newest_usable(folder) if not setup.rank.index else (None, [])
        found, refused = from_rank_0(newest)
        if found is not None:
            _check_identity(setup, found)
            self._load(setup, found)
            if refused:
                note(f"on from step {self.step}; newer ones are damaged: {'; '.join(refused)}")
            return False
        if refused:
            raise ConfigError(
                f"no checkpoint in {folder} can be gone on with: {'; '.join(refused)}; "
                "move them away to begin again"
            )
        if setup.lineage:
            self._load(setup, _checkpoint_of_parent(setup))
            return True
        self.exclusions = Exclusions().resumed(setup.config.data, 0)
        if setup.warm_start:
            load_weights(setup.warm_start, setup.trainable.model, setup.dataset)
            setup.trainable.changed()
        return False

    def _load(self, setup: Setup, found: Checkpoint) -> None:
        model, optimizer = setup.trainable.model, setup.optimizer
        own, own_moments = checkpoint.sharded_rows(model), sharded_state_rows(model)
        checkpoint.load_model_tensors(model, found.tensors("model", own))
        load_optimizer_tensors(model, optimizer, found.tensors("optimizer", own_moments))
        setup.trainable.changed()
        state = found.state
        self.step = found.step
        self.skipped = state["skipped_steps"]
        self.validation = state["validation"]
        self.window.values = [(loss, norm) for loss, norm in state["window"]]
        former = Exclusions.from_dict(state["exclusions"])
        fork_step = setup.lineage.step if setup.lineage else 0
        self.exclusions = former.resumed(setup.config.data, self.step, fork_step=fork_step)


def identity(setup: Setup, step: int) -> dict[str, Any]:
    """What must be the same for a checkpoint of `step` to be continued."""
    config, train = setup.config, setup.config.train
    return {
        "data": setup.dataset.content_hash,
        "tokenizer": setup.dataset.manifest["tokenizer"]["sha256"],
        "across_documents": config.data.across_documents,
        "schedule": setup.schedule.fingerprint(step),
        "order": setup.mixture.fingerprint(step * setup.schedule.global_batch),
        "recipe": setup.trainable.precision.recipe.fingerprint(train.micro_batch),
        "model": dataclasses.asdict(config.model),
        "seed": config.seed,
        "optimizer": [getattr(train, name) for name in OPTIMIZER_CONSTANTS],
    }


def _checkpoint_of_parent(setup: Setup) -> Checkpoint:
    assert setup.lineage is not None
    parent = Path(setup.lineage.checkpoint)
    found = checkpoint.at_step(parent.parent, setup.lineage.step)
    if found.state["identity"]["tokenizer"] != setup.dataset.manifest["tokenizer"]["sha256"]:
        raise ConfigError(
            f"train.fork_from={setup.config.train.fork_from}: the corpus has another tokenizer "
            "than the parent's, so its token ids mean other texts; name that one with "
            "data.tokenizer.path"
        )
    return found


def _check_identity(setup: Setup, found: Checkpoint) -> None:
    """Raises `ConfigError` with what differs where the checkpoint is of another run."""
    then, now = found.state["identity"], identity(setup, found.step)
    differing = [key for key, value in now.items() if then[key] != value]
    if not differing:
        return
    keys = differences(found.state["config"], setup.config.to_dict(), AROUND_A_RUN)
    raise ConfigError(
        f"{found.path} cannot be continued: its {', '.join(differing)} differ from this "
        f"configuration's: {'; '.join(keys) or 'the corpus itself has changed'}. Restore the "
        "former settings, start a fresh run, or go on as a child: "
        f"train.fork_from={setup.run.id}@{found.step}"
    )
