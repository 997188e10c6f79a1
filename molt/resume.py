"""Resume: what a run leaves in its config.yaml, and which run ``--ckpt_path last`` continues."""

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import yaml
from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger

from molt.parallel.checkpoint import META

LAST = "last"
"""The ``ckpt_path`` that stands for the newest run of a configuration."""

CONFIG = "config.yaml"

MAY_CHANGE = ("max_steps", "max_epochs")
"""Options of the trainer that only say how far a run goes."""

SECRET = re.compile(
    r"(^|_)(api_?key|access_key|secret_key|private_key|passw(or)?d|secret|credentials?|token)s?$",
    re.IGNORECASE,
)
NO_SECRET = re.compile(r"tokens$|^(bos|eos|pad|unk|sep|cls|mask|image|video|audio)_token$")


class SaveConfig(SaveConfigCallback):
    """Write the configuration to the run folder, without what looks like a secret."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Write it once, before anything is started."""
        folder = trainer.log_dir  # a collective
        if trainer.is_global_zero and folder is not None and not self.already_saved:
            path = Path(folder) / CONFIG
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(yaml.safe_dump(to_save(self.parser, self.config), sort_keys=False))
        self.already_saved = True


def to_save(parser: LightningArgumentParser, config: Namespace) -> dict[str, Any]:
    """Return a configuration as it is written to the run folder."""
    return without_secrets(yaml.safe_load(parser.dump(config, skip_none=False)))


def without_secrets(config: Any) -> Any:
    """Return a configuration without the keys that are named like a secret, at any depth."""
    if isinstance(config, dict):
        return {k: without_secrets(v) for k, v in config.items() if not is_secret(k)}
    return [without_secrets(item) for item in config] if isinstance(config, list) else config


def is_secret(key: Any) -> bool:
    """Return whether a key is named like a secret: ``api_key``, but not ``max_tokens``."""
    return SECRET.search(str(key)) is not None and NO_SECRET.search(str(key)) is None


def continue_newest(trainer: pl.Trainer, config: dict[str, Any]) -> str | None:
    """Let a trainer go on in the run folder of the newest run of its configuration.

    Args:
        trainer: Its logger writes to that run folder from now on, if there is one.
        config: The configuration as it is written to a run folder.

    Returns:
        The checkpoint to go on from, if there is one.

    Raises:
        ValueError: If the trainer's logger has no run folders to look through.
    """
    logger = trainer.logger
    if not isinstance(logger, TensorBoardLogger):
        raise ValueError(
            f"ckpt_path=last looks through the run folders of a TensorBoardLogger, but "
            f"trainer.logger={type(logger).__name__}"
        )
    run = newest_run(Path(logger.root_dir), config)
    if run is None:
        return None
    checkpoint = newest_checkpoint(run)
    # The logger was built before its run folder could be known, and has opened nothing yet.
    logger._version = number_of(run)
    # TensorBoard shows what was logged after the checkpoint no more.
    logger._kwargs["purge_step"] = step_of(checkpoint) if checkpoint else 0
    return str(checkpoint) if checkpoint else None


def newest_run(root: Path, config: dict[str, Any]) -> Path | None:
    """Return the run folder with the highest number whose run had the same configuration.

    A run that began from a checkpoint of another one, and made none, has nothing to go on from.
    """
    runs = [path.parent for path in root.glob(f"version_*/{CONFIG}")]
    for run in sorted(runs, key=number_of, reverse=True):
        saved = yaml.safe_load((run / CONFIG).read_text())
        can_go_on = saved["ckpt_path"] in (None, LAST) or newest_checkpoint(run) is not None
        if can_go_on and comparable(saved) == comparable(config):
            return run
    return None


def number_of(run: Path) -> int:
    """Return the number of a run folder."""
    return int(run.name.removeprefix("version_"))


def comparable(config: dict[str, Any]) -> dict[str, Any]:
    """Return what makes two runs the same run, but for how far they go."""
    trainer = {k: v for k, v in config["trainer"].items() if k not in MAY_CHANGE}
    return {k: v for k, v in config.items() if k != "ckpt_path"} | {"trainer": trainer}


def newest_checkpoint(run: Path) -> Path | None:
    """Return the complete checkpoint of the most steps in a run folder."""
    complete = [path.parent for path in run.glob(f"checkpoints/step_*.ckpt/{META}")]
    return max(complete, key=step_of, default=None)


def step_of(checkpoint: Path) -> int:
    """Return the number of steps that a checkpoint was made after."""
    return int(checkpoint.stem.removeprefix("step_"))
