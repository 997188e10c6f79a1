"""Write the tasks of the recipe: ``python -m recipes.smollm2.make_tasks``.

A task adds or multiplies two one-digit numbers. Each pair of numbers is asked in two wordings; a
pair that is held out is trained in neither.
"""

import json
import random
from pathlib import Path
from typing import Any

SYSTEM = {"role": "system", "content": "Answer with the number only."}
WORDINGS = {
    "+": ("What is {a} plus {b}?", "Compute {a} plus {b}."),
    "*": ("What is {a} times {b}?", "Compute {a} times {b}."),
}
NUM_HELD_OUT = 50
HERE = Path(__file__).parent


def rows(operation: str, a: int, b: int) -> list[dict[str, Any]]:
    """Return the rows of one pair of numbers."""
    answer = str(a + b if operation == "+" else a * b)
    questions = [text.format(a=a, b=b) for text in WORDINGS[operation]]
    prompts = [[SYSTEM, {"role": "user", "content": question}] for question in questions]
    return [{"prompt": prompt, "answer": answer} for prompt in prompts]


def files() -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each file, the same ones every time."""
    pairs = [(operation, a, b) for operation in WORDINGS for a in range(10) for b in range(10)]
    random.Random(0).shuffle(pairs)
    shares = {"heldout": pairs[:NUM_HELD_OUT], "train": pairs[NUM_HELD_OUT:]}
    return {name: [row for pair in share for row in rows(*pair)] for name, share in shares.items()}


def main() -> None:
    """Write every file next to this script."""
    for name, lines in files().items():
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        (HERE / f"{name}.jsonl").write_text(text)


if __name__ == "__main__":
    main()
