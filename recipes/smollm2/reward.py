"""The reward of the recipe."""

import re

from molt.types import Task


def last_number(task: Task, answer: str) -> float:
    """Return 1.0 where the last number of the answer is the right one.

    Args:
        task: The task; ``task.answer`` is the number as text.
        answer: What the policy wrote.
    """
    numbers = re.findall(r"\d+", answer)
    return float(bool(numbers) and numbers[-1] == task.answer)
