"""torchvision's wheel is built for CUDA: beside a torch for CPUs its operators do not load, and it cannot be imported.

Declares the two that are asked for while it is imported, and computes the one that a detector needs.
"""

import torch

_library = torch.library.Library("torchvision", "FRAGMENT")
for _schema in (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
):
    _library.define(_schema)


def _nms(boxes, scores, threshold):
    kept = []
    order = scores.argsort(descending=True).tolist()
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    while order:
        first, *rest = order
        kept.append(first)
        if not rest:
            break
        others = boxes[rest]
        low, high = torch.maximum(boxes[first, :2], others[:, :2]), torch.minimum(boxes[first, 2:], others[:, 2:])
        shared = (high - low).clamp(min=0).prod(1)
        overlap = shared / (areas[first] + areas[rest] - shared)
        order = [i for i, over in zip(rest, (overlap > threshold).tolist(), strict=True) if not over]
    return torch.tensor(kept, dtype=torch.int64)


_library.impl("nms", _nms, "CPU")

import torchvision.extension  # noqa: E402  (needs what is declared above)

torchvision.extension._has_ops = lambda: True
