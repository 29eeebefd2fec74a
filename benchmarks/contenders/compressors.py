"""The compressors that are measured, with their settings; plain data until one is made."""

import functools

EXAMPLE_THRESHOLD = 1e-3
COMPRESSORS = {  # name: function of tfdist.compression, arguments
    "fp16": ("fp16", {}),
    "bf16": ("bf16", {}),
    "int8": ("int8", {}),
    "qsgd": ("qsgd", {"levels": 4}),
    "natural": ("natural", {}),
    "one_bit": ("one_bit", {}),
    "tern_grad": ("tern_grad", {}),
    "threshold": ("threshold", {"t": EXAMPLE_THRESHOLD}),
    "top_k": ("top_k", {"fraction": 0.01}),
    "dgc": ("dgc", {"fraction": 0.01, "momentum": 0.0}),
    "random_k": ("random_k", {"fraction": 0.01}),
    "power_sgd": ("power_sgd", {"rank": 4}),
}
WITH_ERROR_FEEDBACK = (
    "fp16",
    "bf16",
    "one_bit",
    "threshold",
    "top_k",
    "random_k",
    "power_sgd",
)
"""Those whose error feedback can be left out."""


def make(name, **more):
    """What ``compression=`` takes; None for ``none``."""
    import tfdist.compression

    if name == "none":
        return None
    function, settings = COMPRESSORS[name]
    return functools.partial(getattr(tfdist.compression, function), **settings)(**more)
