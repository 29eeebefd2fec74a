"""Learning rates for large batches: scaled by the size of the batch, and warmed up.

Both callbacks multiply the rate that an optimizer uses in an update by a factor; the rate that it
shows and saves stays as it is. So other callbacks and schedules go on as if these were not there,
factors multiply one another, and a resumed run needs nothing but the count of its updates.
"""

import threading

import keras


class _RateFactor(keras.callbacks.Callback):
    """Multiplies the learning rate in the updates of one ``fit``; subclasses say by what."""

    def set_model(self, model):
        super().set_model(model)
        model.train_function = None  # one traced before has no factor

    def on_train_begin(self, logs=None):
        optimizer = _optimizer_of(self.model, type(self).__name__)
        board = getattr(self.model.distribute_strategy, "board", None)
        if board is not None:
            board.require_same(type(self).__name__, self._settings())
        factors = _factors_of(optimizer, fit=self.params)
        factors[id(self)] = self._make_factor(optimizer)

    def on_epoch_end(self, epoch, logs=None):
        if logs is not None:
            optimizer = _optimizer_of(self.model, type(self).__name__)
            shown = float(keras.ops.convert_to_numpy(optimizer.learning_rate))
            last = max(0, int(keras.ops.convert_to_numpy(optimizer.iterations)) - 1)
            factors = _factors_of(optimizer, fit=self.params).values()
            logs["effective_learning_rate"] = shown * _product(last, factors)

    def on_train_end(self, logs=None):
        optimizer = _optimizer_of(self.model, type(self).__name__)
        _factors_of(optimizer, fit=self.params).pop(id(self), None)
        self.model.train_function = None


class LearningRateWarmup(_RateFactor):
    """Lets the learning rate rise linearly over the first updates.

    In update t (0 is the first) of the first W, the rate is ``start + (1 - start) (t + 1) / W``
    times what it would be otherwise.

    The optimizer's count of updates says where the warm-up is, so a resumed run goes on where it
    was, and a second ``fit`` does not warm up again. It is exact for each update, also with
    ``steps_per_execution``. The factor is computed in the step: schedules, ``ReduceLROnPlateau``,
    ``LearningRateScheduler`` and files see the rate without it, and are multiplied by it.

    Adds ``effective_learning_rate``, that of the last update, to the logs of each epoch. It holds
    for the ``fit`` that it is given to; the training step is traced anew at its begin.

    Args:
        epochs: float, over how many epochs; the number of steps in one must be known.
        steps: int, over how many updates; one of both.
        start: float in [0, 1], the factor from which it rises. Goyal et al. start from the rate
            of one worker, which is ``1 / k`` where :class:`ScaleLearningRate` scales by k.

    Raises:
        ValueError: the arguments are something else; at the begin of ``fit``, the model has no
            optimizer, or the number of steps in an epoch is not known.
        WorkersDisagree: (a RuntimeError) the workers have other arguments.

    Reference: Goyal et al. 2017, "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour",
    arXiv:1706.02677, section 2.2.
    """

    def __init__(self, epochs=None, *, steps=None, start=0.0):
        super().__init__()
        if (epochs is None) == (steps is None):
            raise ValueError(
                "LearningRateWarmup: expected one of epochs and steps, got "
                f"epochs={epochs}, steps={steps}."
            )
        length = epochs if steps is None else steps
        if not _is_number(length) or length <= 0:
            name = "epochs" if steps is None else "steps"
            raise ValueError(f"LearningRateWarmup: {name} must be above 0, got {length!r}.")
        if not _is_number(start) or not 0 <= start <= 1:
            raise ValueError(f"LearningRateWarmup: start must be in [0, 1], got {start!r}.")
        self._epochs, self._steps, self._start = epochs, steps, float(start)

    def _settings(self):
        return {"epochs": self._epochs, "steps": self._steps, "start": self._start}

    def _make_factor(self, optimizer):
        steps = self._steps
        if steps is None:
            per_epoch = self.params.get("steps")
            if per_epoch is None:
                raise ValueError(
                    "LearningRateWarmup: epochs was given, but how many steps an epoch has is not "
                    "known for this input. Give steps instead, or fit(steps_per_epoch=...)."
                )
            per_update = optimizer.gradient_accumulation_steps or 1
            steps = self._epochs * per_epoch / per_update
        start, steps = self._start, max(1.0, float(steps))

        def factor(update):
            part = (keras.ops.cast(update, "float32") + 1) / steps
            return start + (1 - start) * keras.ops.minimum(part, 1.0)

        return factor


class ScaleLearningRate(_RateFactor):
    """Multiplies the learning rate, for a batch that is larger than the one it was chosen for.

    The *linear scaling rule*: a k times larger batch takes a k times larger rate. With more than
    a few workers it needs a :class:`LearningRateWarmup` beside it.

    The optimizer shows and saves the rate without the factor: a run that is resumed with another
    number of workers is scaled for these. Otherwise it is as :class:`LearningRateWarmup` says.

    Args:
        by: float, how many times larger the global batch is. None: the number of replicas whose
            gradients make one update, for a batch that grows with them. (Under a
            ``ParameterServerStrategy`` that is not ``Sync`` it is the devices of one worker.)
        rule: "linear" multiplies by ``by``, "sqrt" by its square root.

    Raises:
        ValueError: the arguments are something else; at the begin of ``fit``, the model has no
            optimizer.
        WorkersDisagree: (a RuntimeError) the workers have other arguments.

    Reference: Goyal et al. 2017, arXiv:1706.02677, section 2.1; the square root: Krizhevsky 2014,
    "One weird trick for parallelizing convolutional neural networks", arXiv:1404.5997.
    """

    def __init__(self, by=None, *, rule="linear"):
        super().__init__()
        if by is not None and (not _is_number(by) or not 0 < by < float("inf")):
            raise ValueError(f"ScaleLearningRate: by must be above 0, got {by!r}.")
        if rule not in ("linear", "sqrt"):
            raise ValueError(f"ScaleLearningRate: rule must be 'linear' or 'sqrt', got {rule!r}.")
        self._by, self._rule = by, rule

    def _settings(self):
        return {"by": self._by, "rule": self._rule}

    def _make_factor(self, optimizer):
        by = _replicas_in_update(self.model.distribute_strategy) if self._by is None else self._by
        factor = float(by) ** (0.5 if self._rule == "sqrt" else 1.0)
        return lambda update: factor


class _Updates:
    """Takes the place of ``optimizer.apply``: while it runs, ``learning_rate`` has the factors.

    (The optimizer is of a subclass for that time, since properties belong to classes. Replicas
    run in threads, so more than one may be in it.)
    """

    def __init__(self, optimizer):
        self.factors = {}
        self.fit = None
        self._optimizer = optimizer
        self._apply = optimizer.apply
        self._lock = threading.Lock()
        self._num_inside = 0
        self._class = shown = type(optimizer)

        def learning_rate(optimizer):
            rate = keras.ops.convert_to_tensor(shown.learning_rate.fget(optimizer))
            factor = _product(optimizer.iterations, self.factors.values())
            return rate * keras.ops.cast(factor, rate.dtype)

        names = {"learning_rate": shown.learning_rate.getter(learning_rate)}
        self._class_inside = type(shown.__name__, (shown,), names)

    def __call__(self, *args, **kwargs):
        with self._lock:
            self._num_inside += 1
            object.__setattr__(self._optimizer, "__class__", self._class_inside)
        try:
            return self._apply(*args, **kwargs)
        finally:
            with self._lock:
                self._num_inside -= 1
                if not self._num_inside:
                    object.__setattr__(self._optimizer, "__class__", self._class)


def _factors_of(optimizer, fit):
    """The factors of an optimizer's rate in a ``fit``: a dict from ids to functions of the update.

    Args:
        fit: the ``params`` that the callbacks of one ``fit`` share. What one that ended by an error
            has left behind is dropped.
    """
    updates = vars(optimizer).get("apply")
    if not isinstance(updates, _Updates):
        updates = vars(optimizer)["apply"] = _Updates(optimizer)
    if updates.fit is not fit:
        updates.factors.clear()
        updates.fit = fit
    return updates.factors


def _product(update, factors):
    product = 1.0
    for factor in factors:
        product = product * factor(update)
    return product


def _optimizer_of(model, name):
    """The optimizer that has the rate: the one inside of a loss scaler."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        raise ValueError(
            f"{name}: the model has no optimizer. Give one to compile(), also where a train_step "
            "of its own uses others."
        )
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer


def _replicas_in_update(strategy):
    settings = getattr(strategy, "settings", None)
    is_together = getattr(settings, "is_synchronous", False)
    num_workers = len(strategy.steps_by_worker) if is_together else 1
    return strategy.num_replicas_in_sync * num_workers


def _is_number(value):
    return isinstance(value, int | float) and not isinstance(value, bool)
