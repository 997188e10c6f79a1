"""What every bench needs: a real run to measure, and a table of figures."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parents[2]
OUT = Path(__file__).parent / "out"


def write(name: str, figures: dict[str, float]) -> None:
    """Print the figures and keep them in ``tests/bench/out/<name>.json``."""
    OUT.mkdir(exist_ok=True)
    (OUT / f"{name}.json").write_text(json.dumps({"name": name, "figures": figures}, indent=1))
    table = Table(title=name)
    table.add_column("figure")
    table.add_column("value", justify="right")
    for key, value in figures.items():
        table.add_row(key, f"{value:.4g}")
    Console().print(table)


def fit(name: str, args: Sequence[str], timeout_s: float = 900) -> dict[str, list[float]]:
    """Run ``molt fit`` and return what it logged, one list per metric."""
    save_dir = OUT / "runs" / name
    command = [
        *(sys.executable, "-m", "molt.cli", "fit", *args),
        "--trainer.logger=lightning.pytorch.loggers.TensorBoardLogger",
        f"--trainer.logger.save_dir={save_dir}",
        "--trainer.logger.name=bench",
        "--evaluation.at_start=false",
        "--evaluation.at_end=false",
        "--rollout_log.every_n_steps=0",
        "--checkpoint.every_n_steps=0",
        "--progress.refresh_rate=0",
    ]
    subprocess.run(command, cwd=ROOT, check=True, timeout=timeout_s, stdout=subprocess.DEVNULL)
    newest = max((save_dir / "bench").iterdir(), key=lambda path: path.stat().st_mtime)
    events = EventAccumulator(str(newest), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
