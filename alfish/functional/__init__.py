"""Pure functions on time-major rows `[T, B]`, with distributions of actions and value representations.

`returns` computes targets for unrolls, `targets` for windows of replay and for rows of another policy, and `losses` a
loss for each row. `distributions` contains distributions over actions; `values` and `return_distributions` contain the
representations of the values that critics predict.
"""
