"""Callbacks: what happens around a step. Imported as ``molt.callbacks``."""

if __name__ != "molt.callbacks":
    raise ImportError(
        f"import molt.callbacks, not {__name__}: imported twice, a callback's class is two classes"
    )

from molt.callbacks.checkpoint import SaveCheckpoint
from molt.callbacks.evaluation import Evaluation
from molt.callbacks.graceful_stop import GracefulStop
from molt.callbacks.hf_export import HFExport
from molt.callbacks.ledger import Ledger
from molt.callbacks.progress import ProgressBar
from molt.callbacks.report import RunReport
from molt.callbacks.rollout_health import RolloutHealth
from molt.callbacks.rollout_log import RolloutLog
from molt.callbacks.throughput import Throughput
from molt.callbacks.trace import Trace
from molt.callbacks.watchdog import Watchdog
from molt.callbacks.weight_sync import WeightSync

__all__ = [
    "Evaluation",
    "GracefulStop",
    "HFExport",
    "Ledger",
    "ProgressBar",
    "RolloutHealth",
    "RolloutLog",
    "RunReport",
    "SaveCheckpoint",
    "Throughput",
    "Trace",
    "Watchdog",
    "WeightSync",
]
