"""Distributed training for Keras 3 on TensorFlow.

Public names load on first use (PEP 562), so that the command line and
:mod:`tfdist.cluster` never pay for importing TensorFlow.
"""

import importlib

__version__ = "0.1.0"

_HOME = {
    "Async": "tfdist.staleness",
    "DelayCompensation": "tfdist.staleness",
    "MirroredStrategy": "tfdist.strategies",
    "ModelParallelStrategy": "tfdist.strategies",
    "MultiWorkerMirroredStrategy": "tfdist.strategies",
    "ParameterServerStrategy": "tfdist.strategies",
    "Stale": "tfdist.staleness",
    "StalenessScaledRate": "tfdist.staleness",
    "Sync": "tfdist.staleness",
    "TPUStrategy": "tfdist.strategies",
}
_MODULES = (
    "callbacks",
    "checkpoints",
    "cluster",
    "collectives",
    "compression",
    "launch",
    "parallel",
    "partition",
    "rendezvous",
    "schedules",
    "staleness",
    "storage",
    "strategies",
)

__all__ = ["__version__", *_HOME, *_MODULES]


def __getattr__(name):
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__():
    return sorted(__all__)
