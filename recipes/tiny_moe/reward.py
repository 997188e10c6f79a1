"""The reward of the recipe."""

from molt.types import Task


def exact(task: Task, answer: str) -> float:
    """Return 1.0 where the answer is the number and nothing else.

    Args:
        task: The task; ``task.answer`` is the number as text.
        answer: What the policy wrote.
    """
    return float(answer == task.answer)
