"""What the exchange of gradients costs, in the history and in TensorBoard."""

import time

import keras


class CommunicationMonitor(keras.callbacks.Callback):
    """Adds figures of the gradient exchange to the logs of each epoch.

    ============================  =================================================================
    ``sent_megabytes_per_step``   what this worker sends for the gradients of a step, by the formula
                                  of its compressor (10^6 bytes)
    ``compression_ratio``         what it would send without compression, divided by that
    ``residual_to_gradient``      norm of what error feedback keeps at the end of the epoch, divided
                                  by the root mean square norm of a step's gradient
    ``exchange_share``            part of a step's time between the last gradient and the last sum:
                                  what compression could save at most. What overlaps with
                                  back-propagation is not in it
    ============================  =================================================================

    The figures are this worker's. Put the callback before those that read the logs
    (``TensorBoard``, ``CSVLogger``); ``History`` always comes last. It costs two clock readings and
    one pass over the gradients in a step.

    Under other strategies than tfdist's, and with one replica, it adds nothing.
    """

    def set_model(self, model):
        super().set_model(model)
        watch = getattr(model.distribute_strategy, "watch_communication", None)
        if watch is not None and not model.distribute_strategy.extended.is_watched:
            watch()
            model.train_function = None  # one traced before keeps no statistics

    def on_epoch_begin(self, epoch, logs=None):
        self._step_seconds = 0.0
        self._read()

    def on_train_batch_begin(self, batch, logs=None):
        self._began = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self._step_seconds += time.perf_counter() - self._began

    def on_epoch_end(self, epoch, logs=None):
        read = self._read()
        if logs is None or read is None or not read["steps"]:
            return
        logs["sent_megabytes_per_step"] = read["sent_bytes"] / 1e6
        logs["compression_ratio"] = read["uncompressed_bytes"] / max(read["sent_bytes"], 1.0)
        logs["residual_to_gradient"] = read["residual_norm"] / max(read["gradient_norm"], 1e-30)
        logs["exchange_share"] = read["seconds"] / max(self._step_seconds, 1e-9)

    def _read(self):
        optimizer = self.model.optimizer
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        exchange = getattr(optimizer, "gradient_exchange", None)
        return None if exchange is None else exchange.read_statistics()
