"""Which device `auto` means on this machine."""

import torch


def resolved_device(setting: str) -> str:
    """`cuda` where torch sees a GPU, else `cpu`; anything but `auto` as it is."""
    if setting != "auto":
        return setting
    return "cuda" if torch.cuda.is_available() else "cpu"
