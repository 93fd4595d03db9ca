"""Lets torchvision be imported beside a CPU build of torch."""

import torch

# A torchvision wheel built for CUDA cannot load its operators beside a CPU torch, and its import then fails
# because it describes operators that do not exist. Declared here, they exist, and the models work.
# The library must stay alive: its declarations go with it.
try:
    import torchvision  # noqa: F401
except RuntimeError:
    operators = torch.library.Library("torchvision", "DEF")
    operators.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    operators.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
