"""Keras callbacks for distributed training."""

if __name__ != "tfdist.callbacks":
    raise ImportError(
        f"This folder is the package tfdist.callbacks, not {__name__}. "
        "Install tfdist (`pip install -e .` in a checkout) and import tfdist.callbacks."
    )

from tfdist.callbacks.communication import CommunicationMonitor
from tfdist.callbacks.workers import WorkerMonitor

__all__ = ["CommunicationMonitor", "WorkerMonitor"]
