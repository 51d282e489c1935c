"""Prometheus' text format, as engines, SMG and the session router answer `/metrics`."""


def prometheus_samples(text: bytes) -> dict[str, float]:
    """Samples by name, summed over their labels.

    Example:
        `errors{kind="a"} 1` and `errors{kind="b"} 2` -> {"errors": 3.0}.
    """
    samples: dict[str, float] = {}
    for line in text.decode().splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            samples[name] = samples.get(name, 0.0) + float(value)
    return samples
