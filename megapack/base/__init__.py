"""What every room stands on: typed arrays and checked inputs, files, compiled kernels.

arrays               lengths, ids and budgets, read and checked
choices, field_docs  names that settings may take; texts under the fields of dataclasses
files                strict reads, whole writes, strict JSON
jit                  `kernel`: numba, cached by the sources of all kernels
"""
