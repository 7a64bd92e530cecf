"""Pure functions on time-major rows `[T, B]`, with distributions of actions and kinds of values.

`returns` and `corrections` compute targets for unrolls, `targets` computes targets for replay's windows, and `losses`
computes a loss for each row. `distributions` has distributions over actions; `values` and `return_distributions` have
the kinds of values that critics predict.
"""
