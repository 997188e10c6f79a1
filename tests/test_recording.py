"""Recordings: what is read is what was written, to the last bit, and a torn file has no name."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from molt.recording import batch_path, num_batches, read_batch, write_batch
from molt.types import Group, Outcome, Segment, Trajectory


def make_segment(seed: int, prompt: int, actions: int) -> Segment:
    draw = np.random.default_rng(seed)
    size = (prompt + actions, 3)
    top = {
        "top_ids": draw.integers(0, 2**40, size),
        "top_logprobs": -draw.exponential(size=size).astype(np.float32),
    }
    mask = np.arange(prompt + actions) >= prompt
    return Segment(
        **(top if prompt % 2 else {}),
        token_ids=draw.integers(0, 2**40, prompt + actions),
        action_mask=mask,
        behavior_logprobs=np.where(mask, -draw.exponential(size=len(mask)), 0).astype(np.float32),
        policy_versions=np.where(mask, draw.integers(0, 9, len(mask)), -1),
        temperature=draw.random(),
        finish_reason="stop",
    )


def make_group(seed: int, lengths: list[list[tuple[int, int]]]) -> Group:
    trajectories = tuple(
        Trajectory(
            id=f"g{seed}/{member}",
            task_id="täsk",
            segments=tuple(make_segment(seed + i, *length) for i, length in enumerate(parts)),
            reward=1 / 3,
            score=0.1,
            outcome=Outcome.TRUNCATED,
            messages=[{"role": "user", "content": "1 + 1"}],
            started_at=1e9 + 0.1,
            asked=((1e9 + 0.2, 1e9 + 0.3),),
        )
        for member, parts in enumerate(lengths)
    )
    return Group(id=f"g{seed}", task_id="täsk", ordinal=seed, version=3, trajectories=trajectories)


def same(one: Segment, two: Segment) -> bool:
    arrays = ("token_ids", "action_mask", "behavior_logprobs", "policy_versions")
    arrays = (*arrays, "top_ids", "top_logprobs")
    return (one.temperature, one.finish_reason) == (two.temperature, two.finish_reason) and all(
        getattr(one, a) is getattr(two, a) is None
        or (
            getattr(one, a).dtype == getattr(two, a).dtype
            and getattr(one, a).shape == getattr(two, a).shape
            and getattr(one, a).tobytes() == getattr(two, a).tobytes()
        )
        for a in arrays
    )


member = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), max_size=3)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(member, min_size=1, max_size=3), max_size=4))
def test_groups_come_back_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, shapes: list):
    path = tmp_path_factory.mktemp("recording") / "batch.safetensors"
    groups = [make_group(seed, lengths) for seed, lengths in enumerate(shapes)]
    write_batch(path, groups)
    found = read_batch(path)
    assert len(found) == len(groups)
    for one, two in zip(groups, found, strict=True):
        assert (one.id, one.ordinal, one.version) == (two.id, two.ordinal, two.version)
        for a, b in zip(one.trajectories, two.trajectories, strict=True):
            assert (a.id, a.reward, a.score, a.outcome) == (b.id, b.reward, b.score, b.outcome)
            assert (a.messages, a.asked, a.started_at) == (b.messages, b.asked, b.started_at)
            assert len(a.segments) == len(b.segments)
            assert all(map(same, a.segments, b.segments))


def test_anyone_can_read_it(tmp_path: Path):
    group = make_group(0, [[(2, 3)], [(1, 1), (4, 2)]])
    write_batch(tmp_path / "b.safetensors", [group])
    with safe_open(tmp_path / "b.safetensors", framework="pt") as file:
        assert file.get_tensor("token_ids").shape == (5 + 2 + 6,)
        (row,) = json.loads(file.metadata()["groups"])
    lengths = [[s["length"] for s in t["segments"]] for t in row["trajectories"]]
    assert lengths == [[5], [2, 6]]


def test_what_was_not_written_whole_is_no_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    group = make_group(0, [[(2, 3)]])
    write_batch(batch_path(tmp_path, 0), [group])

    def die(number: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", die)
    with pytest.raises(KeyboardInterrupt):
        write_batch(batch_path(tmp_path, 1), [group])
    with pytest.raises(KeyboardInterrupt):
        write_batch(batch_path(tmp_path, 0), [])
    assert num_batches(tmp_path) == 1
    assert len(read_batch(batch_path(tmp_path, 0))) == 1
