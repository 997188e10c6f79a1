"""Runs that are killed at any moment, resumed, and audited."""

import multiprocessing
import random
from pathlib import Path

from molt.audit import audit
from molt.ledger import NAME, read
from tests.loop import go_on, spec, trained_tasks
from tests.models import tiny_moe

NUM_KILLS = 24
STEPS = 45  # passes of three steps


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def test_a_trainer_killed_at_any_moment_trains_what_an_undisturbed_one_does(tmp_path: Path):
    model, killed, undisturbed = tiny_moe(tmp_path / "model"), tmp_path / "a", tmp_path / "b"
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["tests.loop"])
    plan, draw = spec(model, max_steps=STEPS), random.Random(7)
    for _ in range(NUM_KILLS):
        # A step writes about 3 kB: some are killed before they trained anything.
        until = size(killed / NAME) + draw.randrange(1, 6000)
        trainer = processes.Process(target=go_on, args=(plan, killed))
        trainer.start()
        while size(killed / NAME) < until:
            trainer.join(0.001)
            assert trainer.is_alive(), "the run ended before it was killed"
        trainer.kill()
        trainer.join()
    go_on(plan, killed)
    go_on(plan, undisturbed)
    rows = audit(killed)
    assert rows["steps"] == f"{STEPS}, the run completed"
    assert int(rows["resumes"].partition(",")[0]) > NUM_KILLS / 2
    found, wanted = (
        trained_tasks([event for _, event in read(run / NAME)]) for run in (killed, undisturbed)
    )
    assert found == wanted
    assert found.total() == STEPS // 3 * 10
