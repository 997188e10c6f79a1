"""Run a script on several processes, the way a user would with torchrun."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What Lightning leaves in the environment makes a later trainer believe it was launched already.
LAUNCHED = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


def environment() -> dict[str, str]:
    """This process's environment without the traces of an earlier launch."""
    kept = {key: value for key, value in os.environ.items() if key not in LAUNCHED}
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def torchrun(script: str, *args: object, processes: int, timeout_s: float = 240) -> str:
    """Run ``tests/parallel/<script>`` and return what it printed; a failure shows its output."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(processes), ROOT / "tests" / "parallel" / script),
    ]
    return run([*command, *args], timeout_s)


def run(command: list[object], timeout_s: float = 240) -> str:
    """Run a command in a clean environment."""
    result = subprocess.run(
        [str(word) for word in command],
        env=environment(),
        cwd=ROOT,
        timeout=timeout_s,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:]
    return result.stdout
