"""Writes checkpoints while training goes on.

A save stops the step for as long as copying this rank's rows to host memory takes; a thread writes
them. On rank 0 the thread then waits for the other ranks' parts, completes the checkpoint and
removes old ones. `settle` is where all ranks learn together how the last save went.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.train import checkpoint
from pipeline.train.checkpoint import Checkpoint, CheckpointError, Piece
from pipeline.train.parallel import Rank, gathered

POLL_SECONDS = 0.05
OTHER_RANKS_SECONDS = 1800.0  # how long rank 0 waits for the other parts

Groups = Mapping[str, Mapping[str, Tensor]]


class Saver:
    """One rank's writer.

    attempt: names this start of the run; the same on every rank, another at each start.
    done: called on rank 0, in the thread, with each checkpoint once it is complete.
    """

    def __init__(
        self, folder: Path, rank: Rank, attempt: str, done: Callable[[Checkpoint], None]
    ) -> None:
        self._folder, self._rank, self._attempt, self._done = folder, rank, attempt, done
        self._thread: threading.Thread | None = None
        self._part_ended = threading.Event()  # this rank's part is written, or has failed
        self._abandoned = threading.Event()
        self._buffers: dict[tuple[str, str], Tensor] = {}
        self._error = ""
        if rank.index == 0:
            checkpoint.take_over(folder, attempt)

    def save(self, step: int, groups: Groups, state: Mapping[str, Any]) -> None:
        """Copy this rank's part and write it in the background. Call `settle` before."""
        assert self._thread is None
        pieces = self._copied(groups)
        self._part_ended.clear()
        self._abandoned.clear()
        self._thread = threading.Thread(
            target=self._write, args=(step, pieces, state), name="checkpoint"
        )
        self._thread.start()

    def settle(self) -> str:
        """Wait for the checkpoint under way, on all ranks; why it failed, or "" if it stands.

        A collective: every rank calls it equally often.
        """
        if self._thread is None:
            return ""
        self._part_ended.wait()
        if any(gathered(self._error)):
            self._abandoned.set()
        self._thread.join()
        self._thread = None
        errors = [error for error in gathered(self._error) if error]
        self._error = ""
        return errors[-1] if errors else ""  # rank 0's may only say that another rank failed

    def _copied(self, groups: Groups) -> dict[str, dict[str, Piece]]:
        """This rank's pieces in host memory, in buffers kept from one save to the next."""
        pieces = checkpoint.pieces_of(groups, self._rank.index, self._rank.size)
        cuda = False
        for group, members in pieces.items():
            for name, piece in members.items():
                cuda = piece.rows.is_cuda
                buffer = self._buffers.get((group, name))
                if buffer is None:
                    buffer = torch.empty_like(piece.rows, device="cpu", pin_memory=cuda)
                    self._buffers[group, name] = buffer
                buffer.copy_(piece.rows, non_blocking=True)
                members[name] = Piece(buffer, piece.start, piece.total)
        if cuda:
            torch.cuda.synchronize()
        return pieces

    def _write(
        self, step: int, pieces: Mapping[str, Mapping[str, Piece]], state: Mapping[str, Any]
    ) -> None:
        partial = checkpoint.partial_folder(self._folder, step, self._attempt)
        try:
            try:
                checkpoint.write_part(partial, pieces, self._rank.index, self._rank.size)
            finally:
                self._part_ended.set()
            if self._rank.index == 0:
                self._await_parts(partial)
                checkpoint.require_ownership(self._folder, self._attempt)
                saved = checkpoint.commit(partial, step, self._rank.size, state)
                self._tell(saved)
        except Exception as error:  # whatever it is, `settle` must not say that it stands
            known = isinstance(error, CheckpointError)
            self._error = str(error) if known else f"{partial.name}: {error!r}"
            print(f"checkpoint: {error}", file=sys.stderr, flush=True)
            if self._rank.index == 0:
                shutil.rmtree(partial, ignore_errors=True)

    def _tell(self, saved: Checkpoint) -> None:
        """Call `done`. The checkpoint stands, whatever goes wrong now."""
        try:
            self._done(saved)
        except OSError as error:
            print(f"checkpoint: {error}", file=sys.stderr, flush=True)

    def _await_parts(self, partial: Path) -> None:
        deadline = time.monotonic() + OTHER_RANKS_SECONDS
        for rank in range(1, self._rank.size):
            while not checkpoint.part_record(partial, rank).is_file():
                if self._abandoned.is_set():
                    raise CheckpointError(f"{partial.name}: another rank could not write its part")
                if time.monotonic() > deadline:
                    raise CheckpointError(
                        f"{partial.name}: rank {rank} did not write its part in "
                        f"{OTHER_RANKS_SECONDS:.0f} s; do all workers see {self._folder}?"
                    )
                time.sleep(POLL_SECONDS)
