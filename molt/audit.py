"""Audit: what the ledger of a run proves, or the first line that contradicts it.

A task's *ordinal* is its position in the stream of tasks, counted over all passes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from molt.ledger import NAME, Event, read

SETTINGS = (
    *("tasks", "num_tasks", "seed", "group_size", "groups_per_step"),
    *("minibatches", "epochs", "max_staleness"),
)
"""What the first line must say of the run."""


class AuditError(ValueError):
    """What the ledger does not prove, in one sentence that names the line."""


def audit(run: Path) -> dict[str, str]:
    """Check the ledger of a run folder and return what it proves, as rows of a table.

    Args:
        run: The run folder.

    Raises:
        AuditError: At the first line that contradicts what must hold.
    """
    path = run / NAME
    if not path.is_file():
        raise AuditError(f"{path}: there is no ledger")
    auditor, number = Auditor(), 0
    try:
        for number, event in read(path):  # noqa: B007 - the error names the last line read
            auditor.follow(event)
        auditor.check_checkpoints(run / "checkpoints")
    except AuditError as error:
        raise AuditError(f"{path}:{number}: {error}") from error
    except (KeyError, TypeError) as error:
        raise AuditError(f"{path}:{number}: a field is missing or malformed: {error}") from error
    except ValueError as error:
        raise AuditError(f"{path}: {error}") from error
    return {"lines": f"{number:,}, the chain is unbroken", **auditor.proven()}


@dataclass(slots=True)
class _Group:
    """A group that was dispatched."""

    version: int
    """Policy version at dispatch."""
    sampled: list[dict[str, Any]] | None = None
    """What the engines sampled for each trajectory, once all have ended."""
    taken_at: int = -1
    """The step before which the trainer got it."""
    trained_at: list[int] = field(default_factory=list)
    """The steps that trained it, one for each epoch."""


class Auditor:
    """Follows a run event by event, and refuses what cannot have happened."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self.step = self.first_step = 0
        self.begun = False  # the stream of tasks
        self.batch: int | None = None  # the next one; the stream says where it begins
        self.versions: dict[int, str] = {}  # digest that the engines confirmed
        self.settled: dict[int, int] = {}  # step at which each ordinal was taken or dropped
        self.reasons: dict[int, str] = {}  # of each ordinal that was dropped
        self.counts: dict[int, Counter[str]] = {}  # of each step
        self.open: dict[int, _Group] = {}
        self.taken: dict[int, _Group] = {}  # trained, or to be trained now
        self.names: dict[tuple[int, str], int] = {}  # ordinal of each task in each pass
        self.cursor = 0  # all tasks before it are settled
        self.next = 0  # the task to be dispatched next
        self.num_resumes = self.num_voided = 0
        self.ended = ""

    def follow(self, event: Event) -> None:
        """Take one event into account."""
        kind = event["event"]
        if (kind == "begin") == bool(self.settings):
            raise AuditError("a run begins once, in the first line")
        if self.ended and kind != "resume":
            raise AuditError(f"a {kind} follows the end of the run")
        follow = {
            "begin": self.begin,
            "resume": self.resume,
            "stream": self.stream,
            "sync": self.sync,
            "dispatch": self.dispatch,
            "finish": self.finish,
            "drop": self.drop,
            "take": self.take,
            "train": self.train,
            "checkpoint": self.checkpoint,
            "end": self.end,
        }.get(kind)
        if follow is None:
            raise AuditError(f"there is no event {kind!r}")
        follow(event)

    def begin(self, event: Event) -> None:
        """The run begins."""
        self.settings = {key: event[key] for key in SETTINGS}
        self.step = self.first_step = event["step"]

    def resume(self, event: Event) -> None:
        """A checkpoint takes the place of all that was done after it."""
        step = event["step"]
        for key, value in self.settings.items():
            if event[key] != value:
                raise AuditError(f"{key} was {value} and is {event[key]} after the resume")
        if not self.first_step <= step <= self.step:
            raise AuditError(
                f"resumed at step {step}, but there are steps {self.first_step} to {self.step}"
            )
        self.num_resumes += 1
        self.num_voided += self.step - step
        self.step, self.batch, self.ended = step, None, ""
        self.settled = {o: at for o, at in self.settled.items() if at < step}
        self.reasons = {o: reason for o, reason in self.reasons.items() if o in self.settled}
        self.taken = {o: group for o, group in self.taken.items() if group.taken_at < step}
        for group in self.taken.values():
            group.trained_at = [at for at in group.trained_at if at < step]
        self.counts = {at: count for at, count in self.counts.items() if at < step}
        self.versions = {v: digest for v, digest in self.versions.items() if v < step}
        self.cursor = 0
        self.open.clear()

    def stream(self, event: Event) -> None:
        """A producer begins to dispatch; what was in flight is dispatched again."""
        cursor, ahead = event["cursor"], event["ahead"]
        if self.first_step and not self.begun:  # from a checkpoint of another run folder
            self.settled = dict.fromkeys([*range(cursor), *ahead], -1)
        self.begun = True
        self.cursor = self._skip(self.cursor)
        settled_ahead = sorted(o for o in self.settled if o > self.cursor)
        if (cursor, ahead) != (self.cursor, settled_ahead):
            raise AuditError(
                f"the stream goes on from task {cursor} with {ahead} done, but settled are all "
                f"tasks before {self.cursor}, and {settled_ahead}"
            )
        if self.batch not in (None, event["step"]):
            raise AuditError(f"the stream goes on with batch {event['step']}, not {self.batch}")
        self.batch, self.next = event["step"], self._skip(cursor)
        self.open.clear()

    def sync(self, event: Event) -> None:
        """The engines confirm weights."""
        version, digest = event["version"], event["digest"]
        if version != self.step and version != max(self.versions, default=None):
            raise AuditError(f"version {version} was synced when {self.step} steps were trained")
        if self.versions.setdefault(version, digest) != digest:
            raise AuditError(
                f"version {version} had digest {self.versions[version]} and now has {digest}"
            )

    def dispatch(self, event: Event) -> None:
        """A task is given to the workers."""
        ordinal, version = event["ordinal"], event["version"]
        if ordinal != self.next:
            raise AuditError(f"task {ordinal} was dispatched where task {self.next} was next")
        if version not in self.versions:
            raise AuditError(
                f"task {ordinal} was dispatched under version {version}, never confirmed"
            )
        in_pass = ordinal // self.settings["num_tasks"]
        first = self.names.setdefault((in_pass, event["task"]), ordinal)
        if first != ordinal:
            raise AuditError(
                f"task {ordinal} is {event['task']}, which task {first} of pass {in_pass} is"
            )
        self.open[ordinal] = _Group(version)
        self.next = self._skip(ordinal + 1)

    def finish(self, event: Event) -> None:
        """All attempts at a task have ended."""
        group = self._pending(event["ordinal"])
        if group.sampled is not None:
            raise AuditError(f"task {event['ordinal']} finished twice")
        if len(event["trajectories"]) != self.settings["group_size"]:
            raise AuditError(f"task {event['ordinal']} has {len(event['trajectories'])} attempts")
        group.sampled = event["trajectories"]

    def drop(self, event: Event) -> None:
        """A task is given up, with a reason."""
        ordinal = event["ordinal"]
        self._pending(ordinal)
        if not event["reason"]:
            raise AuditError(f"task {ordinal} was dropped without a reason")
        del self.open[ordinal]
        self.settled[ordinal], self.reasons[ordinal] = self.step, event["reason"]

    def take(self, event: Event) -> None:
        """The trainer gets finished groups."""
        self._check_taken()
        if event["batch"] != self.batch:
            raise AuditError(f"batch {event['batch']} was taken where {self.batch} was next")
        if len(event["ordinals"]) != self._batch_size(event["batch"]):
            raise AuditError(f"batch {self.batch} has {len(event['ordinals'])} groups")
        for ordinal in event["ordinals"]:
            if self._pending(ordinal).sampled is None:
                raise AuditError(f"task {ordinal} was taken before it finished")
            group = self.taken[ordinal] = self.open.pop(ordinal)
            group.taken_at = self.settled[ordinal] = self.step
        self.batch = event["batch"] + 1

    def train(self, event: Event) -> None:
        """A step is trained, and the version of the policy is one higher."""
        if event["step"] != self.step:
            raise AuditError(f"step {event['step']} was trained where step {self.step} was next")
        count = self.counts[self.step] = Counter()
        for entry in event["groups"]:
            ordinal, trained = entry["ordinal"], entry["trajectories"]
            group = self.taken.get(ordinal)
            if group is None:
                raise AuditError(f"task {ordinal} was not taken for step {self.step}")
            if len(group.trained_at) == self.settings["epochs"]:
                raise AuditError(
                    f"task {ordinal} was not taken for step {self.step}; steps "
                    f"{group.trained_at} have trained it"
                )
            group.trained_at.append(self.step)
            sampled = group.sampled or []
            if len(trained) != len(sampled):
                raise AuditError(
                    f"task {ordinal} trained {len(trained)} of {len(sampled)} attempts"
                )
            for member, (tokens, source) in enumerate(zip(trained, sampled, strict=True)):
                self._check_tokens(f"g{ordinal}/{member}", tokens, source, count)
            count["groups"] += 1
        self.step += 1
        for ordinal, group in self.open.items():
            if group.version + self.settings["max_staleness"] < self.step:
                raise AuditError(
                    f"task {ordinal}, dispatched under version {group.version}, is overdue"
                )

    def checkpoint(self, event: Event) -> None:
        """The run is saved."""
        if event["step"] != self.step:
            raise AuditError(f"a checkpoint of step {event['step']} was made at step {self.step}")

    def end(self, event: Event) -> None:
        """The run ends."""
        whole = self.step % (self.settings["minibatches"] * self.settings["epochs"]) == 0
        if event["reason"] == "completed" and whole:
            self._check_taken()
        self.ended = event["reason"]

    def check_checkpoints(self, folder: Path) -> None:
        """Check that the ledger goes as far as the newest checkpoint."""
        steps = [int(p.stem.removeprefix("step_")) for p in folder.glob("step_*.ckpt")]
        if max(steps, default=0) > self.step:
            raise AuditError(
                f"the ledger ends here after {self.step} steps, but there is a checkpoint of "
                f"step {max(steps)}"
            )

    def proven(self) -> dict[str, str]:
        """Return the rows of the table."""
        total = sum(self.counts.values(), Counter())
        oldest = max((count["staleness"] for count in self.counts.values()), default=0)
        passes, rest = divmod(self._skip(self.cursor), self.settings["num_tasks"])
        reasons = Counter(self.reasons.values())
        why = "".join(f"; {count} x {reason}" for reason, count in reasons.most_common(3))
        return {
            "steps": f"{self.step}, the run {self.ended or 'was killed or goes on'}",
            "trained": f"{total['groups']:,} groups, {total['trajectories']:,} trajectories, "
            f"{total['tokens']:,} tokens: each token as an engine sampled it",
            "versions": f"{len(self.versions)}, each confirmed by the engines with its digest",
            "staleness": f"at most {oldest} of {self.settings['max_staleness']} steps",
            "tasks": f"none twice in a pass; {passes} passes of {self.settings['num_tasks']} tasks "
            f"complete, {rest} of the next",
            "dropped": f"{len(self.reasons)}{why}",
            "open": f"{len(self.open)} dispatched, not settled, not overdue",
            "resumes": f"{self.num_resumes}, which made {self.num_voided} steps void",
        }

    def _check_tokens(
        self, name: str, trained: dict[str, Any], sampled: dict[str, Any], count: Counter[str]
    ) -> None:
        """Check that the trained tokens of a trajectory are those that were sampled."""
        count["trajectories"] += 1
        if not trained["tokens"]:
            return
        if trained != sampled:
            raise AuditError(f"trajectory {name} trained {trained}, but engines sampled {sampled}")
        for version in trained["versions"]:
            if version not in self.versions:
                raise AuditError(
                    f"trajectory {name} has tokens of version {version}, not confirmed"
                )
        staleness = self.step - min(trained["versions"])
        if staleness > self.settings["max_staleness"] or max(trained["versions"]) > self.step:
            raise AuditError(
                f"trajectory {name} has tokens of versions {trained['versions']} at step "
                f"{self.step}; max_staleness is {self.settings['max_staleness']}"
            )
        count["tokens"] += trained["tokens"]
        count["staleness"] = max(count["staleness"], staleness)

    def _check_taken(self) -> None:
        epochs = self.settings["epochs"]
        left = sorted(o for o, group in self.taken.items() if len(group.trained_at) < epochs)
        if left:
            raise AuditError(f"tasks {left} were taken and not trained")

    def _pending(self, ordinal: int) -> _Group:
        if ordinal not in self.open:
            raise AuditError(f"task {ordinal} is not in flight")
        return self.open[ordinal]

    def _skip(self, ordinal: int) -> int:
        """Return the first ordinal from here on that is not settled."""
        while ordinal in self.settled:
            ordinal += 1
        return ordinal

    def _batch_size(self, batch: int) -> int:
        size, num_tasks = self.settings["groups_per_step"], self.settings["num_tasks"]
        return min(size, num_tasks - batch % -(-num_tasks // size) * size)
