"""The table of what touches files or decides in callbacks, on all workers."""

import callback_cases
import saving_cases

CASES = [*saving_cases.CASES, *callback_cases.CASES]
