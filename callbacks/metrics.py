"""Logs that each worker has for itself, averaged over the workers."""

import math

import keras


class MetricAverage(keras.callbacks.Callback):
    """Averages the logs of each epoch over all workers, where they differ.

    Under tfdist's strategies the logs of ``fit`` are those of the whole batch on all workers. What
    callbacks add is not: times, figures of :class:`CommunicationMonitor`, a score on data of the
    worker's own. Put this callback after those, and before others that decide by them
    (``EarlyStopping``, ``ReduceLROnPlateau``) or write them: then all workers decide the same.

    The mean is over the workers that have a value, each counting once. What all have alike stays
    as it is, to the last bit; so does what is not a number. With one worker, under a
    ``ParameterServerStrategy`` (where the chief alone has logs), and under other strategies than
    tfdist's, it changes nothing.

    Args:
        names: list of the logs to average; None for all.

    Raises:
        ValueError: ``names`` is something else.
    """

    def __init__(self, names=None):
        super().__init__()
        is_list = isinstance(names, list | tuple | set) and all(isinstance(n, str) for n in names)
        if names is not None and not is_list:
            raise ValueError(
                f"MetricAverage: names must be a list of names of logs, got {names!r}."
            )
        self._names = names

    def on_epoch_end(self, epoch, logs=None):
        board = getattr(self.model.distribute_strategy, "board", None)
        if board is None:
            return
        logs = {} if logs is None else logs
        mine = {name: _as_number(value) for name, value in logs.items() if self._is_meant(name)}
        mine = {name: value for name, value in mine.items() if value is not None}
        everyone = board.gather("metric average", mine)
        for name in sorted(set().union(*everyone)):
            values = [theirs[name] for theirs in everyone if name in theirs]
            if len({repr(value) for value in values}) > 1 or name not in logs:
                logs[name] = math.fsum(values) / len(values)

    def _is_meant(self, name):
        return self._names is None or name in self._names


def _as_number(value):
    """A float of a number or of an array or tensor without dimensions; None of anything else."""
    if isinstance(value, bool | str | list | tuple | dict) or value is None:
        return None
    try:
        array = keras.ops.convert_to_numpy(value)
        return float(array) if array.ndim == 0 else None
    except (TypeError, ValueError):
        return None
