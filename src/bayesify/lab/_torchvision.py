"""Import torchvision where it is installed, as Lightning's metrics do, to name it if it doesn't fit torch."""

import importlib

import torch

from bayesify.errors import BayesifyError

try:
    TORCHVISION = importlib.import_module("torchvision")
except ModuleNotFoundError:
    TORCHVISION = None  # type: ignore[assignment]
except Exception as error:  # whatever an extension built for another torch raises
    raise BayesifyError(
        f"the torchvision that is installed can't be imported ({error}), and Lightning imports it. Install the one for "
        f"torch {torch.__version__} (pip install --upgrade torchvision), or remove it (pip uninstall torchvision)"
    ) from error
