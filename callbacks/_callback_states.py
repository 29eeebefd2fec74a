"""The state of other callbacks, for a checkpoint.

A callback takes part that has ``get_state() -> dict`` and ``set_state(dict)``: of numbers, strings,
lists, dicts and numpy arrays. Keras' own, which have neither, are listed here by attribute.
"""

import keras

_ATTRIBUTES = {
    keras.callbacks.History: ("history", "epoch"),
    keras.callbacks.EarlyStopping: (
        "wait",
        "stopped_epoch",
        "best",
        "best_weights",
        "best_epoch",
    ),
    keras.callbacks.ReduceLROnPlateau: ("wait", "best", "cooldown_counter"),
    keras.callbacks.ModelCheckpoint: (
        "best",
        "_current_epoch",
        "_batches_seen_since_last_saving",
        "_last_batch_seen",
    ),
}


def check(callbacks):
    """Raises ValueError where a callback has one half of the protocol."""
    for callback in callbacks:
        has = [callable(getattr(callback, name, None)) for name in ("get_state", "set_state")]
        if any(has) and not all(has):
            missing = "set_state" if has[0] else "get_state"
            raise ValueError(
                f"{type(callback).__name__} has no {missing}(). A callback whose state shall be "
                "saved needs both get_state() and set_state(state)."
            )


def get_states(callbacks):
    """The states of those that have any: dict from a name (class, number) to a dict."""
    return {name: _get(callback) for name, callback in _with_state(callbacks)}


def set_states(callbacks, states):
    """Gives each callback its state; those that had none in the checkpoint stay as they are."""
    for name, callback in _with_state(callbacks):
        if name not in states:
            continue
        if hasattr(callback, "set_state"):
            callback.set_state(states[name])
            continue
        for attribute, value in states[name].items():
            setattr(callback, attribute, value)


def _with_state(callbacks):
    numbers = {}
    for callback in callbacks:
        if not hasattr(callback, "get_state") and not _attributes(callback):
            continue
        kind = type(callback).__name__
        number = numbers[kind] = numbers.get(kind, -1) + 1
        yield f"{kind}/{number}", callback


def _get(callback):
    if hasattr(callback, "get_state"):
        return callback.get_state()
    return {name: getattr(callback, name) for name in _attributes(callback)}


def _attributes(callback):
    return [
        name
        for kind, names in _ATTRIBUTES.items()
        if isinstance(callback, kind)
        for name in names
        if hasattr(callback, name)
    ]
