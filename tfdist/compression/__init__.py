"""Gradients in fewer bytes: ``compression=`` of the strategies.

A function here returns a :class:`Compressor` (one tensor, no communication) or an
:class:`Exchange` (all gradients, all replicas); the strategies take either. ``docs/compression.md``
says which to choose, and how to add one.
"""

from tfdist.compression._choice import by_size, by_variable, dgc
from tfdist.compression._compressor import (
    Compressor,
    error_feedback,
    mark_non_finite,
    non_finite_mark,
)
from tfdist.compression._exchange import (
    Collective,
    Exchange,
    all_reduce,
    as_exchange,
    compressor_for,
    everywhere,
    sent_through,
    through,
)
from tfdist.compression._low_rank import power_sgd
from tfdist.compression._quantizers import (
    bf16,
    fp16,
    int8,
    natural,
    one_bit,
    qsgd,
    tern_grad,
    threshold,
)
from tfdist.compression._sparsifiers import random_k, top_k

__all__ = [
    "Collective",
    "Compressor",
    "Exchange",
    "all_reduce",
    "as_exchange",
    "bf16",
    "by_size",
    "by_variable",
    "compressor_for",
    "dgc",
    "error_feedback",
    "everywhere",
    "fp16",
    "int8",
    "mark_non_finite",
    "natural",
    "non_finite_mark",
    "one_bit",
    "power_sgd",
    "qsgd",
    "random_k",
    "sent_through",
    "tern_grad",
    "threshold",
    "through",
    "top_k",
]
