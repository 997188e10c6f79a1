"""The rollout side: engines, workers and the producer, which generate while the trainer trains."""
