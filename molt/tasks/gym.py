"""Tasks and rewards of reasoning-gym."""

from __future__ import annotations

from functools import cache
from typing import Any

from molt.tasks.rows import RowTasks, optional
from molt.types import Task


class ReasoningGymTasks(RowTasks):
    """Tasks that reasoning-gym generates; ``molt.tasks.reasoning_gym_score`` is their reward.

    Args:
        name: Name of the generator, such as ``chain_sum``.
        size: How many tasks to generate.
        seed: Which ones.
        difficulty: The generator's own settings, such as ``{max_terms: 3}``.
        system: System message put before every question.

    Raises:
        ValueError: If there is no such generator, or its settings are not possible.
    """

    def __init__(
        self,
        name: str,
        size: int = 1000,
        seed: int = 0,
        difficulty: dict[str, Any] | None = None,
        system: str | None = None,
    ) -> None:
        gym = optional("reasoning_gym")
        try:
            rows = enumerate(gym.create_dataset(name, size=size, seed=seed, **difficulty or {}))
        # A generator checks its settings with assertions.
        except (AssertionError, TypeError, ValueError) as error:
            raise ValueError(
                f"tasks.name={name} with size={size} and difficulty={difficulty}: {error}"
            ) from error
        super().__init__(rows, name, f"{name}-{seed}", None, "question", "answer", system)


def reasoning_gym_score(task: Task, answer: str) -> float:
    """Return what reasoning-gym gives for an answer, between 0 and 1.

    Args:
        task: A task of ``ReasoningGymTasks``.
        answer: What the policy wrote.
    """
    metadata = task.info["metadata"]
    entry = {"question": "", "answer": task.answer, "metadata": metadata}
    return float(_scorer(metadata["source_dataset"])(answer.strip(), entry))


@cache
def _scorer(name: str) -> Any:
    return optional("reasoning_gym").get_score_answer_fn(name)
