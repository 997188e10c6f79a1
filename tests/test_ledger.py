"""The ledger: what it survives, and what the audit of it proves and refuses."""

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molt import cli
from molt.audit import AuditError, Auditor, audit
from molt.ledger import NAME, BrokenLine, Ledger, read
from molt.rollout.fingerprint import Fingerprint, token_hashes
from molt.types import Generation
from tests.loop import Loop, spec, trained_tasks
from tests.models import tiny_moe
from tests.rollout.fake import Rows

Events = list[dict[str, Any]]


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    """Dropped tasks are warned about, and there are many."""
    logging.getLogger("molt.rollout.producer").setLevel(logging.ERROR)
    yield
    logging.getLogger("molt.rollout.producer").setLevel(logging.NOTSET)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_moe(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps, interrupted after the fourth and resumed at the third."""
    folder = tmp_path_factory.mktemp("run")
    Loop(spec(model), folder).go(0, 4)
    resumed = Loop(spec(model), folder)
    resumed.go(3, 6)
    return folder


def test_a_ledger_goes_on_where_it_was_cut(tmp_path: Path):
    path = tmp_path / NAME
    book = Ledger(path)
    book.append([{"event": "begin"}, {"event": "sync"}], durable=True)
    with pytest.raises(RuntimeError, match="is the folder of a run that goes on"):
        Ledger(path)
    book.close()
    with path.open("ab") as file:
        file.write(b'{"n":3,"event":"tra')  # killed here
    assert [number for number, _ in read(path)] == [1, 2]
    book = Ledger(path)
    assert book.num_lines == 2
    book.append([{"event": "end"}])
    book.close()
    assert list(read(path)) == [(1, {"event": "begin"}), (2, {"event": "sync"}), (3, {"event": "end"})]  # fmt: skip  # noqa: E501


def test_a_ledger_that_was_changed_is_not_written_on(tmp_path: Path):
    path = tmp_path / NAME
    book = Ledger(path)
    book.append([{"event": "begin"}, {"event": "sync"}])
    book.close()
    path.write_bytes(path.read_bytes().replace(b"begin", b"began"))
    with pytest.raises(BrokenLine, match="line 1: it was changed"):
        Ledger(path)


def test_a_fingerprint_does_not_depend_on_turns_but_on_all_else():
    def sampled(*turns: tuple[int, list[int], list[int], list[float]]) -> dict[str, Any]:
        found = Fingerprint()
        for start, ids, versions, logprobs in turns:
            found.add(
                start,
                Generation(
                    token_ids=ids, policy_versions=versions, logprobs=logprobs, finish_reason="stop"
                ),
            )
        return found.record()

    whole = sampled((5, [7, 8, 9], [1, 1, 2], [-0.1, -0.2, -0.3]))
    assert (whole["tokens"], whole["versions"]) == (3, [1, 2])
    assert sampled((7, [9], [2], [-0.3]), (5, [7, 8], [1, 1], [-0.1, -0.2])) == whole
    others = [
        sampled((6, [7, 8, 9], [1, 1, 2], [-0.1, -0.2, -0.3])),
        sampled((5, [8, 7, 9], [1, 1, 2], [-0.1, -0.2, -0.3])),
        sampled((5, [7, 8, 9], [1, 2, 2], [-0.1, -0.2, -0.3])),
        sampled((5, [7, 8, 9], [1, 1, 2], [-0.2, -0.1, -0.3])),
    ]
    assert whole["hash"] not in {other["hash"] for other in others}


def test_token_hashes_do_not_collide():
    draw = np.random.default_rng(0)
    columns = [draw.integers(0, 50, 20_000) for _ in range(3)]
    hashes = token_hashes(*columns, np.full(20_000, -0.5))
    distinct = len({*zip(*(column.tolist() for column in columns), strict=True)})
    assert len(np.unique(hashes)) == distinct


def test_the_audit_of_a_run_tells_what_it_proves(run: Path):
    rows = audit(run)
    # per pass of 10 tasks: 4 + 4 + 2; two passes, and row 3 is dropped in each
    assert rows["steps"] == "6, the run completed"
    assert rows["trained"].startswith("20 groups, 40 trajectories, ")
    assert rows["versions"].startswith("7, ")  # 0 to 6
    assert rows["tasks"] == ("none twice in a pass; 2 passes of 10 tasks complete, 2 of the next")
    assert rows["dropped"] == "2; 2 x environment_fault: OSError: row 3 is broken"
    assert rows["resumes"] == "1, which made 1 steps void"


def test_the_command_prints_the_table(run: Path, tmp_path: Path, capsys):
    cli.main(["audit", str(run)])
    assert "staleness" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="there is no ledger"):
        cli.main(["audit", str(tmp_path)])


def test_the_audit_needs_only_the_standard_library(run: Path):
    code = (
        f"import sys; from molt.cli import main; main(['audit', {str(run)!r}]);"
        "assert not {'torch', 'numpy', 'lightning', 'ray', 'vllm'} & set(sys.modules), 'heavy'"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)


def first(events: Events, kind: str, **fields: Any) -> dict[str, Any]:
    wanted = {"event": kind, **fields}
    return next(e for e in events if wanted.items() <= e.items())


def another_token(events: Events) -> None:
    first(events, "train", step=1)["groups"][0]["trajectories"][0]["hash"] = "0" * 16


def sampled_by_nobody(events: Events) -> None:
    ordinal = first(events, "train", step=1)["groups"][0]["ordinal"]
    events.remove(first(events, "finish", ordinal=ordinal))


def version_never_confirmed(events: Events) -> None:
    events.remove(first(events, "sync", version=1))


def another_digest(events: Events) -> None:
    events.insert(2, first(events, "sync", version=0) | {"digest": "other"})


def older_than_the_bound(events: Events) -> None:
    for event in events:
        if event["event"] in ("begin", "resume"):
            event["max_staleness"] = 0


def trained_twice(events: Events) -> None:
    again = first(events, "train", step=0)["groups"][0]
    first(events, "train", step=1)["groups"][0] = again


def dropped_without_a_reason(events: Events) -> None:
    first(events, "drop")["reason"] = ""


def left_out_of_a_step(events: Events) -> None:
    first(events, "train", step=1)["groups"].pop()


def never_dispatched(events: Events) -> None:
    ordinal = first(events, "drop")["ordinal"]
    events[:] = [e for e in events if e.get("ordinal") != ordinal]


def step_left_out(events: Events) -> None:
    events.remove(first(events, "train", step=2))


def resumed_from_nowhere(events: Events) -> None:
    first(events, "resume")["step"] = 9


def other_tasks_after_the_resume(events: Events) -> None:
    first(events, "resume")["tasks"] = "another digest"


def voided_work_kept(events: Events) -> None:
    events.remove(first(events, "resume"))


def task_under_another_name(events: Events) -> None:
    first(events, "dispatch", ordinal=1)["task"] = first(events, "dispatch", ordinal=0)["task"]


REASONS: list[tuple[Callable[[Events], None], str]] = [
    (another_token, "trained .* but engines sampled"),
    (sampled_by_nobody, "was taken before it finished"),
    (version_never_confirmed, "under version 1, never confirmed"),
    (another_digest, "version 0 had digest .* and now has"),
    (older_than_the_bound, "is overdue|max_staleness is 0"),
    (trained_twice, r"task \d+ was not taken for step 1; steps \[0\] have trained it"),
    (dropped_without_a_reason, r"task \d+ was dropped without a reason"),
    (left_out_of_a_step, r"tasks \[\d+\] were taken and not trained"),
    (never_dispatched, r"task \d+ was dispatched where task \d+ was next"),
    (step_left_out, "version 3 was synced when 2 steps were trained"),
    (resumed_from_nowhere, "resumed at step 9, but there are steps 0 to 4"),
    (other_tasks_after_the_resume, "tasks was row10 and is another digest after the resume"),
    (voided_work_kept, "the stream goes on from task|was synced when 4 steps were trained"),
    (task_under_another_name, r"task 1 is row:\d, which task 0 of pass 0 is"),
]


@pytest.mark.parametrize(("tamper", "reason"), REASONS, ids=lambda x: getattr(x, "__name__", ""))
def test_a_forged_chain_does_not_hide_a_contradiction(run, tmp_path, tamper, reason):
    """The forger knows how the chain is made, and chains the changed lines anew."""
    events = [event for _, event in read(run / NAME)]
    tamper(events)
    book = Ledger(tmp_path / NAME)
    book.append(events)
    book.close()
    with pytest.raises(AuditError, match=rf"{NAME}:\d+: .*({reason})"):
        audit(tmp_path)


def change_a_number(lines: list[str]) -> int:
    lines[9] = lines[9].replace('"version":0', '"version":1')
    return 10


def remove_a_line(lines: list[str]) -> int:
    del lines[9]
    return 10


def swap_two_lines(lines: list[str]) -> int:
    lines[9], lines[10] = lines[10], lines[9]
    return 10


def repeat_a_line(lines: list[str]) -> int:
    lines.insert(9, lines[9])
    return 11


def no_json(lines: list[str]) -> int:
    lines[9] = "\n"
    return 10


@pytest.mark.parametrize(
    "tamper", [change_a_number, remove_a_line, swap_two_lines, repeat_a_line, no_json]
)
def test_the_chain_names_the_line_that_was_changed(run, tmp_path, tamper):
    lines = (run / NAME).read_text().splitlines(keepends=True)
    number = tamper(lines)
    (tmp_path / NAME).write_text("".join(lines))
    with pytest.raises(AuditError, match=f"line {number}: "):
        audit(tmp_path)


def test_a_ledger_cut_short_contradicts_the_checkpoints(run: Path, tmp_path: Path):
    lines = (run / NAME).read_text().splitlines(keepends=True)
    last = next(i for i, line in enumerate(lines) if json.loads(line).get("step") == 5)
    (tmp_path / NAME).write_text("".join(lines[:last]))
    (tmp_path / "checkpoints" / "step_6.ckpt").mkdir(parents=True)
    with pytest.raises(AuditError, match=f":{last}: the ledger ends here after 5 steps, but there"):
        audit(tmp_path)


def test_a_run_from_the_checkpoint_of_another_folder_is_audited(model, run, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for name in ("step_2.ckpt",):
        (tmp_path / "checkpoints" / name).write_text((run / "checkpoints" / name).read_text())
    loop = Loop(spec(model), tmp_path)
    loop.go(2, 6)
    assert audit(tmp_path)["steps"] == "6, the run completed"


PLANS = st.builds(
    dict,
    tasks=st.integers(1, 11).map(Rows),
    groups_per_step=st.integers(1, 4),
    lookahead=st.sampled_from([0, 0.5, 1]),
    max_staleness=st.integers(1, 3),
    seed=st.integers(0, 9),
)


@settings(max_examples=25, deadline=None)
@given(PLANS, st.data())
def test_however_often_a_run_is_resumed_every_task_is_accounted_for_once(
    model, tmp_path_factory, plan, data
):
    plan = spec(model, **plan)
    steps_per_pass = -(-len(plan.tasks) // plan.groups_per_step)
    plan = replace(plan, max_steps=2 * steps_per_pass)
    folder = tmp_path_factory.mktemp("run")
    at = 0
    for _ in range(data.draw(st.integers(0, 3))):
        stop = data.draw(st.integers(at, plan.max_steps))
        Loop(plan, folder).go(at, stop)
        at = data.draw(st.integers(0, stop))
    last = Loop(plan, folder)
    last.go(at, plan.max_steps)
    rows = audit(folder)
    events = [event for _, event in read(folder / NAME)]
    trained = trained_tasks(events)
    # Two passes' worth of groups, none of them twice, and what is missing was dropped.
    assert set(trained.values()) == {1}
    assert trained.total() == 2 * len(plan.tasks)
    missing = set(range(max(trained))) - set(trained)
    dropped = {e["ordinal"]: e["task"] for e in events if e["event"] == "dispatch"}
    assert {dropped[ordinal] for ordinal in missing} <= {"row:3"}
    assert int(rows["dropped"].partition(";")[0]) >= len(missing)


def test_every_minibatch_trains_once_in_every_epoch_also_after_a_resume_between():
    tokens = {"hash": "0" * 16, "tokens": 1, "versions": [0]}
    plan = {"tasks": "t", "num_tasks": 2, "seed": 0, "group_size": 1, "groups_per_step": 2}
    plan |= {"minibatches": 2, "epochs": 2, "max_staleness": 3}

    def train(step: int) -> dict[str, Any]:
        groups = [{"ordinal": step % 2, "trajectories": [tokens]}]
        return {"event": "train", "step": step, "groups": groups}

    def task(event: str, ordinal: int, **details: Any) -> dict[str, Any]:
        return {"event": event, "ordinal": ordinal, **details}

    start = [
        {"event": "begin", "step": 0, **plan},
        {"event": "stream", "step": 0, "cursor": 0, "ahead": []},
        {"event": "sync", "version": 0, "digest": "d"},
        *(task("dispatch", o, task=f"t{o}", group=f"g{o}", version=0) for o in (0, 1)),
        *(task("finish", o, trajectories=[tokens]) for o in (0, 1)),
        {"event": "take", "batch": 0, "ordinals": [0, 1]},
    ]
    resume = {"event": "resume", "step": 1, **plan}
    end = {"event": "end", "reason": "completed"}

    auditor = Auditor()
    for event in [*start, train(0), train(1), resume, train(1), train(2), train(3), end]:
        auditor.follow(event)
    assert auditor.proven()["resumes"] == "1, which made 1 steps void"

    auditor = Auditor()
    for event in [*start, train(0), train(1), train(2), train(3)]:
        auditor.follow(event)
    with pytest.raises(AuditError, match=r"not taken for step 4; steps \[0, 2\] have trained it"):
        auditor.follow(train(4))
