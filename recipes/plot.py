"""Plot the learning curve of runs: ``python -m recipes.plot OUT.png RUN_FOLDER [RUN_FOLDER ...]``.

Reads the TensorBoard events that the runs left; draws reward and held-out accuracy against the
optimizer step and against wall time.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

CURVES = {"reward/mean": "reward of the batch", "eval/held_out/mean": "held-out accuracy"}


def main(out: str, folders: list[str]) -> None:
    """Draw one line per run and curve."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), sharey=True)
    for folder in folders:
        events = EventAccumulator(folder, size_guidance={"scalars": 0})
        events.Reload()
        start = events.Scalars("reward/mean")[0].wall_time
        for (tag, label), color in zip(CURVES.items(), ("tab:blue", "tab:orange"), strict=True):
            points = events.Scalars(tag)
            values = [point.value for point in points]
            style = {"color": color, "label": label if folder == folders[0] else None}
            marker = {"marker": "o"} if tag.startswith("eval") else {"alpha": 0.7}
            axes[0].plot([point.step for point in points], values, **style, **marker)
            minutes = [(point.wall_time - start) / 60 for point in points]
            axes[1].plot(minutes, values, **style, **marker)
    axes[0].set_xlabel("optimizer step")
    axes[1].set_xlabel("minutes since the first step")
    axes[0].set_ylim(0, 1)
    axes[0].legend()
    figure.tight_layout()
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
