"""Write files of tensors, whole or not at all."""

import os
import tempfile
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def write_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write contiguous tensors that share no memory to a file, atomically, with the usual permissions."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    os.close(handle)
    try:
        save_file(tensors, temporary, metadata=metadata)
        os.umask(mask := os.umask(0))
        os.chmod(temporary, 0o666 & ~mask)  # mkstemp and safetensors make private files
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
