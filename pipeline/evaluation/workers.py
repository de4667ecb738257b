"""Batches of an evaluation on Ray's workers, each with a model of its own.

Batches are planned before anyone computes (see `evals.scoring`) and come back in their order, so
that any number of workers of one kind gives the same numbers, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from evals.scoring import Scorer

Make = Callable[[], Scorer]


class RayWorkers:
    """A context manager: `num_workers` actors of a Ray that runs already.

    Args:
        make: builds a worker's scorer there; it is pickled.
        gpus: GPUs of each worker.
    """

    def __init__(self, make: Make, num_workers: int, gpus: int = 0) -> None:
        import ray

        @ray.remote
        class Worker:
            def __init__(self) -> None:
                self.scorer = make()

            def compute(self, method: str, batch: Any) -> Any:
                return getattr(self.scorer, method)(batch)

        actor = Worker.options(num_cpus=1, num_gpus=gpus)  # type: ignore[attr-defined]
        self._actors = [actor.remote() for _ in range(num_workers)]

    def map(self, method: str, batches: Iterable[Any]) -> Iterator[Any]:
        """The method's result of each batch, in the batches' order."""
        from ray.util import ActorPool

        pool = ActorPool(self._actors)
        yield from pool.map(lambda actor, batch: actor.compute.remote(method, batch), list(batches))

    def __enter__(self) -> RayWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        import ray

        for actor in self._actors:
            ray.kill(actor)
