"""Write the tasks of the recipe: ``python -m recipes.tiny_moe.make_tasks``.

A task is the sum of two two-digit numbers. The demonstrations come from a careless teacher: every
other answer is off by one or by ten, so that a policy that has learned all it can from them is
right about half of the time, and must find out from the reward which half.
"""

import json
import random
from collections.abc import Iterable
from pathlib import Path

NUMBERS = range(10, 100)
NUM_HELD_OUT = 256
SLIP_RATE = 0.5
SLIPS = (-10, -1, 1, 10)
HERE = Path(__file__).parent


def row(a: int, b: int, slip: int = 0) -> dict[str, str]:
    """Return one row; the answer is off by ``slip``."""
    return {"prompt": f"{a}+{b}", "answer": str(a + b + slip)}


def draw_slip(rng: random.Random) -> int:
    """Return how far the teacher is off."""
    return rng.choice(SLIPS) if rng.random() < SLIP_RATE else 0


def rows() -> dict[str, list[dict[str, str]]]:
    """Return the rows of each file, the same ones every time."""
    rng = random.Random(0)
    pairs = [(a, b) for a in NUMBERS for b in NUMBERS]
    rng.shuffle(pairs)
    held_out, train = pairs[:NUM_HELD_OUT], pairs[NUM_HELD_OUT:]
    return {
        "heldout": [row(a, b) for a, b in held_out],
        "train": [row(a, b) for a, b in train],
        "sft": [row(a, b, draw_slip(rng)) for a, b in train],
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
