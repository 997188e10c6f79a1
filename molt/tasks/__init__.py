"""Task sets: where tasks come from, how they are mixed, and in which order they come."""

from molt.tasks.gym import ReasoningGymTasks, reasoning_gym_score
from molt.tasks.mixing import MixedTasks, Source
from molt.tasks.rows import DatasetTasks, JsonlTasks, ParquetTasks, file_tasks
from molt.tasks.stream import TaskSet, TaskStream, check_same_stream

__all__ = [
    "DatasetTasks",
    "JsonlTasks",
    "MixedTasks",
    "ParquetTasks",
    "ReasoningGymTasks",
    "Source",
    "TaskSet",
    "TaskStream",
    "check_same_stream",
    "file_tasks",
    "reasoning_gym_score",
]
