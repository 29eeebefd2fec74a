"""Keras callbacks for distributed training."""

if __name__ != "tfdist.callbacks":
    raise ImportError(
        f"This folder is the package tfdist.callbacks, not {__name__}. "
        "Install tfdist (`pip install -e .` in a checkout) and import tfdist.callbacks."
    )

from tfdist.callbacks.checkpoint import FaultTolerantCheckpoint
from tfdist.callbacks.communication import CommunicationMonitor
from tfdist.callbacks.deadline import DeadlineStop
from tfdist.callbacks.learning_rate import LearningRateWarmup, ScaleLearningRate
from tfdist.callbacks.metrics import MetricAverage
from tfdist.callbacks.policies import (
    any_of,
    best,
    every_epochs,
    every_minutes,
    every_steps,
    latest,
    on_preemption,
    union,
)
from tfdist.callbacks.workers import WorkerMonitor

__all__ = [
    "CommunicationMonitor",
    "DeadlineStop",
    "FaultTolerantCheckpoint",
    "LearningRateWarmup",
    "MetricAverage",
    "ScaleLearningRate",
    "WorkerMonitor",
    "any_of",
    "best",
    "every_epochs",
    "every_minutes",
    "every_steps",
    "latest",
    "on_preemption",
    "union",
]
