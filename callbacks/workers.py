"""How the workers of a parameter-server strategy get on."""

import keras
import tensorflow as tf

from tfdist.staleness import histogram


class WorkerMonitor(keras.callbacks.Callback):
    """Adds what the workers did to the logs of each epoch, under a ``ParameterServerStrategy``.

    =========================  =====================================================================
    ``staleness_mean``         of the gradients applied in the epoch: how many others were applied
                               between reading the weights and applying it; and the largest of it
    ``staleness_max``
    ``staleness_histogram``    list of int: how many gradients had staleness 0, 1, 2, ...
    ``steps_by_worker``        list of int: the steps that each worker has finished in the epoch
    ``lost_workers``           list of int: the workers that died, or hung, in the epoch
    =========================  =====================================================================

    ``History`` keeps all of them; put the callback before others that read the logs
    (``CSVLogger``). Under other strategies it adds nothing.

    Args:
        log_dir: folder to which a histogram of the staleness is written for TensorBoard; None for
            none.
    """

    def __init__(self, log_dir=None):
        super().__init__()
        self._log_dir = log_dir
        self._writer = None

    def on_epoch_begin(self, epoch, logs=None):
        strategy = self._strategy()
        if strategy is not None:
            strategy.read_staleness()
            self._steps = list(strategy.steps_by_worker)
            self._num_lost = len(strategy.coordinator.lost_workers)

    def on_epoch_end(self, epoch, logs=None):
        strategy = self._strategy()
        if strategy is None or logs is None:
            return
        staleness = strategy.read_staleness()
        if staleness:
            logs["staleness_mean"] = sum(staleness) / len(staleness)
            logs["staleness_max"] = float(max(staleness))
        logs["staleness_histogram"] = histogram(staleness)
        now = strategy.steps_by_worker
        logs["steps_by_worker"] = [b - a for a, b in zip(self._steps, now, strict=True)]
        logs["lost_workers"] = strategy.coordinator.lost_workers[self._num_lost :]
        if self._log_dir is not None and staleness:
            if self._writer is None:
                self._writer = tf.summary.create_file_writer(str(self._log_dir))
            with self._writer.as_default():
                tf.summary.histogram("staleness", staleness, step=epoch)
            self._writer.flush()

    def on_train_end(self, logs=None):
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _strategy(self):
        strategy = self.model.distribute_strategy
        return strategy if hasattr(strategy, "read_staleness") else None
