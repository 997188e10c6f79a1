"""The pool: the trainer's handle on everything that generates."""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from molt.rollout.buffer import START
from molt.rollout.client import EngineLike, EngineServer
from molt.rollout.engine import Engine, Receipt, engine_env
from molt.rollout.producer import Delivery, Producer
from molt.rollout.spec import EngineOptions, InFlight, RolloutSpec
from molt.rollout.waits import Waits
from molt.rollout.weights import Manifest
from molt.rollout.worker import RolloutWorker
from molt.types import Group

# The far end keeps the deadline it was given; this much longer and it is dead.
_GRACE_S = 15.0
_START_S = 1800.0  # a large model takes minutes to start, on a busy machine many
_ASK_S = 0.5
_OBJECT_STORE_BYTES = 512 << 20
_MAX_CONCURRENCY = 10_000


class RolloutPool:
    """Engines, workers and the producer, as the trainer's rank 0 sees them.

    Create it with ``start``, which returns at once: the actors come up while the trainer does.
    """

    def __init__(self, engines: list[Any], workers: list[Any], producer: Any) -> None:
        self._engines = engines
        self._workers = workers
        self._producer = producer
        self.position: dict[str, Any] | None = None  # in the stream of tasks, once it is begun
        self._events: list[dict[str, Any]] = []
        self._starting = [actor.start.remote() for actor in (*engines, *workers, producer)]
        atexit.register(self.stop)

    @classmethod
    def start(
        cls,
        spec: RolloutSpec,
        options: EngineOptions,
        dtype: str,
        engine: Callable[..., EngineLike] = Engine,
    ) -> RolloutPool:
        """Start Ray, or join the cluster of RAY_ADDRESS, and begin to start the actors.

        Args:
            spec: The rollout.
            options: The engines.
            dtype: What the engines compute in, where ``options`` does not say.
            engine: Makes one engine.

        Raises:
            ValueError: If the cluster is too small for the engines.
        """
        gpus = options.tensor_parallel if torch.cuda.is_available() else 0
        _connect(options.count + spec.num_workers + 1, gpus * options.count, options)
        import ray

        serve = ray.remote(EngineServer).options(
            num_cpus=1,
            num_gpus=gpus,
            max_concurrency=_MAX_CONCURRENCY,
            runtime_env={"env_vars": {**_environment(), **engine_env(options)}},
        )
        engines = [
            serve.remote(partial(engine, spec.model, options, options.dtype or dtype, seed))
            for seed in range(spec.seed, spec.seed + options.count)
        ]
        light = {
            "num_cpus": 1,
            "max_concurrency": _MAX_CONCURRENCY,
            "runtime_env": {"env_vars": _environment()},
        }
        work = ray.remote(RolloutWorker).options(**light)
        workers = [work.remote(spec, engines) for _ in range(spec.num_workers)]
        producer = ray.remote(Producer).options(**light).remote(spec, workers)
        return cls(engines, workers, producer)

    def ready(self, timeout_s: float = _START_S) -> list[dict[str, Any]]:
        """Wait until every actor is up and return what each engine says about itself.

        Args:
            timeout_s: Seconds to wait.

        Raises:
            RuntimeError: If one is not up in time; names it.
        """
        import ray

        names = [f"engine {i}" for i in range(len(self._engines))]
        names += [f"rollout worker {i}" for i in range(len(self._workers))] + ["the producer"]
        _, late = ray.wait(self._starting, num_returns=len(names), timeout=timeout_s)
        if late:
            missing = ", ".join(names[self._starting.index(ref)] for ref in late)
            raise RuntimeError(f"{missing} did not start within {timeout_s:.0f} s; {_logs()}")
        return self._get(self._starting, timeout_s)[: len(self._engines)]

    def begin(self, first_step: int, position: dict[str, Any] | None) -> None:
        """Begin with the training tasks; a second call does nothing.

        Args:
            first_step: The step to train first.
            position: What ``position`` was at that step, if the run is resumed.
        """
        if self.position is None:
            self.ready()
            self.position = position or START
            self._get(self._producer.begin.remote(first_step, position), _GRACE_S)

    def next_batch(
        self, step: int, timeout_s: float, should_stop: Callable[[], bool] = lambda: False
    ) -> list[Group] | None:
        """Return the groups that a step trains, waiting for them.

        Args:
            step: The step; ask for each one once, in order.
            timeout_s: Seconds to wait.
            should_stop: Asked now and then; ends the wait, and the result is None.
        """
        import ray

        ref = self._producer.next_batch.remote(step, timeout_s)
        deadline = time.monotonic() + timeout_s
        while not ray.wait([ref], timeout=_ASK_S)[0] and time.monotonic() < deadline:
            if should_stop():
                return None
        delivery: Delivery = self._get(ref, _GRACE_S)
        self.position = delivery.position
        groups = [pickle.loads(packed) for packed in delivery.groups]
        taken = {"batch": step, "ordinals": [group.ordinal for group in groups]}
        self._events += [*delivery.events, {"event": "take", **taken}]
        return groups

    def drain_events(self) -> list[dict[str, Any]]:
        """Return what the ledger has not been told yet: deliveries and confirmed weights."""
        events, self._events = self._events, []
        return events

    def evaluate(
        self, name: str, timeout_s: float, first: int = 0, stop: int | None = None
    ) -> list[Group]:
        """Try the tasks of an evaluation set.

        Args:
            name: Key in ``RolloutSpec.eval_tasks``.
            timeout_s: Seconds to wait.
            first: The first task.
            stop: The task to stop before; None tries all that follow.

        Returns:
            A group of ``eval_group_size`` trajectories for each task, faults among them.
        """
        packed = self._get(self._producer.evaluate.remote(name, first, stop), timeout_s)
        return [pickle.loads(group) for group in packed]

    def load_weights(
        self, manifest: Manifest, version: int, timeout_s: float, in_flight: InFlight = "recompute"
    ) -> list[Receipt]:
        """Make every engine serve published weights, then let the producer know.

        Args:
            manifest: What was published.
            version: The policy version it is.
            timeout_s: Seconds the engines have.
            in_flight: What becomes of the requests in flight.

        Raises:
            RuntimeError: If an engine loaded something else than was published.
        """
        self.ready()  # an engine that failed to start says why here, and has a deadline of its own
        wanted = (manifest, version, timeout_s, in_flight)
        calls = [engine.load_weights.remote(*wanted) for engine in self._engines]
        receipts = self._get(calls, timeout_s)
        for index, receipt in enumerate(receipts):
            if (receipt.digest, receipt.version) != (manifest.digest, version):
                raise RuntimeError(
                    f"engine {index} serves version {receipt.version} with digest "
                    f"{receipt.digest}, but version {version} with {manifest.digest} was published"
                )
        sync = {"version": version, "digest": manifest.digest, "engines": len(receipts)}
        self._events.append({"event": "sync", **sync})
        self.set_version(version)
        return receipts

    def set_version(self, version: int) -> None:
        """Let the producer dispatch what the version allows that the engines serve."""
        self._get(self._producer.set_version.remote(version), _GRACE_S)

    def stats(self) -> dict[str, float]:
        """Return the producer's counters."""
        return self._get(self._producer.stats.remote(), _GRACE_S)

    def waits(self) -> Waits:
        """Return what is in flight on the rollout side, and whom it waits for."""
        return self._get(self._producer.waits.remote(), _GRACE_S)

    def stop(self) -> None:
        """End every actor and, where this process started it, Ray; a second call does nothing."""
        import ray

        atexit.unregister(self.stop)
        if not ray.is_initialized():
            return
        for actor in (self._producer, *self._workers, *self._engines):
            ray.kill(actor)
        ray.shutdown()

    def _get(self, refs: Any, patience_s: float) -> Any:
        """Wait for a remote call and raise what it raised, as it was raised there."""
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

        timeout_s = patience_s + _GRACE_S
        try:
            return ray.get(refs, timeout=timeout_s)
        except GetTimeoutError as error:
            raise RuntimeError(f"no answer within {timeout_s:.0f} s; {_logs()}") from error
        except RayActorError as error:
            raise RuntimeError(f"a rollout process died: {error}; {_logs()}") from error
        except RayTaskError as error:
            raise error.cause from error


def _connect(cpus: int, gpus: int, options: EngineOptions) -> None:
    """Join the cluster of RAY_ADDRESS, or start one that only this machine can reach."""
    local = "RAY_ADDRESS" not in os.environ
    if local:
        # Despite its name, the one switch that makes Ray listen on the loopback interface alone.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if local:
        ray.init(
            address="local",
            num_cpus=cpus,  # slots, not cores: agents wait most of the time
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            **quiet,
        )
    else:
        ray.init(**quiet)
    resources = ray.cluster_resources()
    for kind, needed in (("CPU", cpus), ("GPU", gpus)):
        if resources.get(kind, 0) < needed:
            ray.shutdown()
            raise ValueError(
                f"engines.count={options.count} with engines.tensor_parallel="
                f"{options.tensor_parallel} needs {needed} {kind}s in the Ray cluster, "
                f"which has {resources.get(kind, 0):.0f}"
            )


def _environment() -> dict[str, str]:
    """Return the variables that every actor starts with."""
    return {
        # The user's agents live outside the installation.
        "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),
        # Inherited from torchrun, it would make an engine wait for the trainer's rendezvous.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def _logs() -> str:
    import ray

    folder = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray"
    return f"logs are in {folder / ray.get_runtime_context().get_session_name() / 'logs'}"
