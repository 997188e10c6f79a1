"""What a long run holds on to: 300 steps of the main job, watched from outside.

Memory that grows with every step would end a long run; so would objects left in Ray's store.
"""

import sys
import threading
from pathlib import Path

import numpy as np
import psutil

from tests.bench.report import fit, write

STEPS = 300
WARM_UP = 0.3
"""Share of the looks that are left out: caches fill and libraries load."""
LOOK_S = 2.0


class Watch(threading.Thread):
    """Looks at the memory of all processes below this one, and at Ray's object store."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.ended = threading.Event()
        self.looks: list[tuple[float, float, float]] = []

    def run(self) -> None:
        """Look until it is over."""
        while not self.ended.wait(LOOK_S):
            self.looks.append(look())


def look() -> tuple[float, float, float]:
    """Return private memory of trainer and of rollout processes, and the store, in MiB."""
    trainer = rollouts = store = 0.0
    for process in psutil.Process().children(recursive=True):
        try:
            name, memory = " ".join(process.cmdline()), process.memory_info()
            maps = process.memory_maps() if "raylet" in name else []
        except psutil.Error:
            continue
        private = (memory.rss - memory.shared) / 2**20
        store += sum(m.rss for m in maps if Path(m.path).name.startswith("plasma")) / 2**20
        if "molt.cli" in name:
            trainer += private
        else:
            rollouts += private
    return trainer, rollouts, store


def main() -> None:
    watch = Watch()
    watch.start()
    logged = fit(
        "soak",
        [
            "--config=configs/moe_grpo.yaml",
            f"--trainer.max_steps={STEPS}",
            "--data.groups_per_step=8",
        ],
    )
    watch.ended.set()
    watch.join()
    looks = np.array(watch.looks[int(WARM_UP * len(watch.looks)) :])
    steps = np.linspace(WARM_UP * STEPS, STEPS, len(looks))
    figures = {"steps": float(len(logged["policy/version"]))}
    for name, values in zip(("trainer", "rollouts", "object_store"), looks.T, strict=True):
        slope = np.polyfit(steps, values, 1)[0]
        figures |= {f"{name}_mib": values.mean(), f"{name}_mib_per_100_steps": 100 * slope}
    write("soak", figures)


if __name__ == "__main__":
    sys.exit(main())
