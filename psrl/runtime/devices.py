"""What torch can use of this machine.

torch is imported by who asks: the actor of an engine replica is told its device and never needs it (a second of start-up, 120 MiB).
"""

from dataclasses import replace

from psrl.config.machine import Machine, read_machine


def resolved_device(setting: str) -> str:
    """`cuda` where torch sees a GPU, else `cpu`; anything but `auto` as it is."""
    if setting != "auto":
        return setting
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def usable_machine() -> Machine:
    """This machine with the GPUs that torch sees: a driver may list some that a CPU build cannot use."""
    import torch

    count = torch.cuda.device_count()
    memory = min((torch.cuda.get_device_properties(index).total_memory for index in range(count)), default=0)
    return replace(read_machine(), num_gpus=count, gpu_bytes=memory)
