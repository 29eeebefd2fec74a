"""The cases of the conformance suite, on parameter servers."""

import dataclasses

import input_cases
import metric_cases
import model_cases
import training_cases

OTHERWISE = {
    # What can't be: see docs/parameter_server.md.
    "batch_normalization_synchronized": "refused",
    "batch_normalization_synchronized_uneven": "refused",
    "dataset_not_sharded": "each worker reads its own data",
    "dataset_sharded_by_file": "each worker reads its own data",
    "datasets_from_function": "each worker reads its own data",
    "datasets_from_function_infinite": "each worker reads its own data",
    "gan_with_two_optimizers": "both gradients are computed before either is applied",
}

CASES = [
    dataclasses.replace(case, topologies=("ps",), check=None)
    for table in (model_cases, input_cases, metric_cases, training_cases)
    for case in table.CASES
    if case.compare and case.name not in OTHERWISE and not case.name.startswith("masked_")
]
