"""The collectives as torch operators: fake-tensor rules, gradients, and their order in compiled code.

ops             the operators
rows_gradient   the gradients of `combine_rows`
inductor        how compiled calls keep their order
"""
