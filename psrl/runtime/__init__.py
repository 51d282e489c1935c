"""How a run is put together, driven and ended.

Importing this package sets the environment of the driver and of every process that it starts. It happens here and nowhere later,
because Ray, TransferQueue and transformers read these variables when they are imported.
"""

import os

from psrl.config.processor import openblas_environment

PROCESS_ENVIRONMENT = {
    # Threads that wait must sleep: trainer and engine share cores and take turns.
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    # Nothing is fetched at run time: models and tokenizers are folders.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    # TransferQueue warns at every call when it has more threads than cores.
    "TQ_NUM_THREADS": "1",
    "TQ_CLIENT_ZMQ_IO_THREADS": "1",
    # What it warns of psrl says by name: a storage unit that is dead when the run ends, in nine lines.
    "TQ_LOGGING_LEVEL": "ERROR",
    "RAY_DEDUP_LOGS": "0",
    "RAY_usage_stats_enabled": "0",
    # Ray's head would keep 2.6 KB of each of the last 100,000 actor calls, for a dashboard that is off: 250 MiB after an hour.
    "RAY_task_events_report_interval_ms": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
os.environ.update(PROCESS_ENVIRONMENT | openblas_environment())
