"""Remove the media packages that vLLM pulls in where they do not fit the installed torch.

The CPU build of torch has no matching torchvision on PyPI, and a torchvision that fails its import
breaks transformers. Text models need none of the three, so what cannot be imported goes.
"""

import subprocess
import sys

for name in ("torchvision", "torchaudio", "torchcodec"):
    imports = subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True)
    if imports.returncode:
        subprocess.run(
            [sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", name], check=True
        )
