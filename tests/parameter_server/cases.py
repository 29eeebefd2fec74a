"""The cases of the conformance suite, on parameter servers."""

import dataclasses

import input_cases
import metric_cases
import model_cases
import training_cases

CASES = [
    dataclasses.replace(case, topologies=("ps",), check=None)
    for table in (model_cases, input_cases, metric_cases, training_cases)
    for case in table.CASES
    if case.compare
]
