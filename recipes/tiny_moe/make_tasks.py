"""Write the tasks of the recipe: ``python -m recipes.tiny_moe.make_tasks``.

A task is the sum of two two-digit numbers, and only the bare number is right. The demonstrations
come from two teachers: one writes ``68``, the other ``68.``. A policy that has learned all it can
from them is right about as often as the first one speaks, and must find out from the reward whom
to follow.
"""

import json
import random
from collections.abc import Iterable
from pathlib import Path

NUMBERS = range(10, 100)
NUM_HELD_OUT = 256
FULL_STOP_RATE = 0.55
HERE = Path(__file__).parent


def row(a: int, b: int, mark: str = "") -> dict[str, str]:
    """Return one row; the mark is written behind the answer."""
    return {"prompt": f"{a}+{b}", "answer": f"{a + b}{mark}"}


def rows() -> dict[str, list[dict[str, str]]]:
    """Return the rows of each file, the same ones every time."""
    rng = random.Random(0)
    pairs = [(a, b) for a in NUMBERS for b in NUMBERS]
    rng.shuffle(pairs)
    held_out, train = pairs[:NUM_HELD_OUT], pairs[NUM_HELD_OUT:]
    return {
        "heldout": [row(a, b) for a, b in held_out],
        "train": [row(a, b) for a, b in train],
        "sft": [row(a, b, "." if rng.random() < FULL_STOP_RATE else "") for a, b in train],
    }


def write(path: Path, lines: Iterable[dict[str, str]]) -> None:
    """Write one JSON object per line."""
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def main() -> None:
    """Write every file next to this script."""
    files = rows()
    asked = {name: {line["prompt"] for line in lines} for name, lines in files.items()}
    if asked["heldout"] & (asked["train"] | asked["sft"]):
        raise RuntimeError("a held-out task is also trained")
    for name, lines in files.items():
        write(HERE / f"{name}.jsonl", lines)


if __name__ == "__main__":
    main()
