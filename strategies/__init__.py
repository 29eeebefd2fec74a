"""Strategies for ``model.fit``: subclasses of TensorFlow's, drop-in by name and arguments."""

if __name__ != "tfdist.strategies":
    raise ImportError(
        f"This folder is the package tfdist.strategies, but was imported as {__name__!r}. "
        "Install tfdist (`pip install .`) and `import tfdist`."
    )

from tfdist.strategies import _keras, _saving
from tfdist.strategies.mirrored import MirroredStrategy
from tfdist.strategies.model_parallel import ModelParallelStrategy
from tfdist.strategies.multi_worker import MultiWorkerMirroredStrategy
from tfdist.strategies.parameter_server import ParameterServerStrategy
from tfdist.strategies.tpu import TPUStrategy

__all__ = [
    "MirroredStrategy",
    "ModelParallelStrategy",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "TPUStrategy",
]


def prepare_keras():
    """Teaches Keras what callbacks need of it; models without a strategy train as before."""
    _keras.install()
    _saving.install()
