"""The table of the parity suite: everything that must train as one process does."""

import input_cases
import metric_cases
import model_cases
import training_cases

CASES = [
    *training_cases.CASES,
    *model_cases.CASES,
    *input_cases.CASES,
    *metric_cases.CASES,
]
