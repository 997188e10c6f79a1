"""HFExport: the trained model as a Hugging Face folder, for transformers and vLLM to load."""

from typing import Protocol

import lightning.pytorch as pl
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from molt.agents.render import Renderer
from molt.model import Policy
from molt.parallel.shard import empty_model, model_folder


class Trained(Protocol):
    """What the callback needs of a module."""

    policy: Policy
    model_path: str


class HFExport(pl.Callback):
    """Write the weights after the last step, with tokenizer and chat template.

    A run that failed writes nothing.

    Args:
        folder: Where to; null writes nothing.
    """

    def __init__(self, folder: str | None = None) -> None:
        self.folder = folder

    def on_train_end(self, trainer: pl.Trainer, pl_module: Trained) -> None:
        """Gather the weights on rank 0 and write them; all ranks take part."""
        if self.folder is None:
            return
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(pl_module.policy, options=options)
        if trainer.is_global_zero:
            source = model_folder(pl_module.model_path)
            empty_model(source).save_pretrained(self.folder, state_dict=weights)
            Renderer.from_pretrained(str(source)).tokenizer.save_pretrained(self.folder)
        dist.barrier()
