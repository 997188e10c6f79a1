"""The reward of the recipe."""

from molt.types import Task


def number(task: Task, answer: str) -> float:
    """Return 1.0 where the answer is the number and nothing else, but for a full stop.

    Args:
        task: The task; ``task.answer`` is the number as text.
        answer: What the policy wrote.
    """
    return float(answer.strip().removesuffix(".") == task.answer)
