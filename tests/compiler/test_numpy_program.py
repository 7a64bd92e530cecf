"""Programs of numpy calls: what torch does, to float error and with the same random numbers, or a refusal."""

import itertools
import warnings
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gymnasium import spaces
from table_rows import table_row

from alfish import nest
from alfish.compiler import numpy_operations, numpy_program
from alfish.compiler.numpy_program import NotTranslatable, NumpyProgram
from alfish.data import AlgStep
from alfish.networks import OneHot

ELSEWHERE = torch.ones(3, device="meta")
HALF = torch.tensor(0.5, dtype=torch.float64)  # 0-d, as progress is


def f32(*shape):
    return torch.randn(shape)


def f64(*shape):
    return torch.randn(shape, dtype=torch.float64)


def i64(*shape):
    return torch.randint(-3, 4, shape)


def u8(*shape):
    return torch.randint(0, 200, shape, dtype=torch.uint8)


def bits(*shape):
    return torch.rand(shape) < 0.5


def run(function, *arguments, **others):
    """What numpy makes of it; `others` are called after translation in place of the arguments."""
    program = NumpyProgram(lambda given: function(*given), arguments)
    leaves = nest.leaves(others.get("then", arguments))
    return tensors(program, [leaves[index].numpy() for index in program.used])


def tensors(program, arrays):
    """The program's results, which are arrays, as tensors."""
    results = program(arrays)
    assert all(type(leaf) is np.ndarray for leaf in nest.leaves(results))
    return nest.map(nest.as_tensor, results)


def assert_same(function, *arguments, then=None):
    """In values, shapes, dtypes and in what the generator has drawn; arguments are not written."""
    then = arguments if then is None else then
    before = [leaf.clone() for leaf in then]
    torch.manual_seed(1)
    expected, drawn = nest.leaves(function(*then)), torch.get_rng_state()
    torch.manual_seed(1)
    found = nest.leaves(run(function, *arguments, then=then))
    assert torch.equal(torch.get_rng_state(), drawn), "other random numbers"
    assert len(found) == len(expected) > 0
    for a, b in zip(found, expected):
        assert isinstance(a, torch.Tensor)
        tolerance = {"rtol": 1e-5, "atol": 1e-6} if b.is_floating_point() else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(a, b, equal_nan=True, **tolerance)
    assert all(np.array_equal(a, b, equal_nan=a.is_floating_point()) for a, b in zip(then, before))


UNARY = {
    "neg": torch.neg, "abs": torch.abs, "exp": torch.exp, "log": torch.log, "sqrt": torch.sqrt, "tanh": torch.tanh,
    "square": torch.square, "sigmoid": torch.sigmoid, "relu": torch.relu, "silu": F.silu, "softplus": F.softplus,
    "softplus of beta": lambda x: F.softplus(x, 2.0), "softplus of threshold": lambda x: F.softplus(x, 1.5, 0.1),
    "clone": torch.clone, "detach": torch.detach,
    "power": lambda x: x**2, "root": lambda x: x**0.5, "ones_like": torch.ones_like, "zeros_like": torch.zeros_like,
    "full_like": lambda x: torch.full_like(x, 3),
    "like of another dtype": lambda x: torch.zeros_like(x, dtype=torch.int8),
    "not": torch.logical_not, "clamp": lambda x: x.clamp(-0.5, 0.5), "clamp below": lambda x: x.clamp(min=0.25),
    "clamp above": lambda x: x.clamp(max=0.25), "clamp crossed": lambda x: x.clamp(0.5, -0.5),
    "clamp_min": lambda x: x.clamp_min(0.1), "clamp_max": lambda x: x.clamp_max(0.1),
    "clamp to tensors": lambda x: torch.clamp(x, -torch.ones_like(x), torch.full_like(x, 0.5)),
    "to float64": torch.Tensor.double, "to float32": torch.Tensor.float, "to int64": torch.Tensor.long,
    "to bool": torch.Tensor.bool, "to int8": lambda x: x.to(torch.int8),
    "scalar right": lambda x: (x + 2, x - 2, x * 2, x / 2, x + 0.5, x * 0.5, x - 0.5),
    "scalar left": lambda x: (2 + x, 2 - x, 2 * x, 0.5 + x, 0.5 - x, 0.5 * x),
    "rsub of alpha": lambda x: torch.rsub(x, 2, alpha=3),
    "compared with a number": lambda x: (x < 1, x <= 1, x > 1, x >= 1, x == 1, x != 1),
    "where number": lambda x: (torch.where(x > 0, x, 1), torch.where(x > 0, 2, x), torch.where(x > 0, x, 0.5)),
    "where": lambda x: torch.where(x > 0, x, -x),
    "in place on its own": lambda x: x.clone().mul_(3).add_(1).clamp_(0, 2),
}  # fmt: skip
OF_FLOATS = {"softplus", "softplus of beta", "softplus of threshold", "silu", "root", "clamp below", "clamp above"}
INPUTS = {
    "float32": f32(3, 4), "0-d": f32(), "empty": f32(0, 4), "float64": f64(3), "0-d float64": f64(), "int64": i64(5),
    "transposed": f32(4, 3).T, "0-d int64": i64(),
}  # fmt: skip


def test_operations_of_one_tensor_equal_torchs():
    for (name, function), (kind, x) in itertools.product(UNARY.items(), INPUTS.items()):
        if name in OF_FLOATS and "int" in kind:
            continue  # torch has it for floats
        with table_row(name, kind):
            assert_same(function, x)


BINARY = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "minimum": torch.minimum,
    "maximum": torch.maximum, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge, "eq": torch.eq,
    "ne": torch.ne, "logical_and": torch.logical_and, "where": lambda x, y: torch.where(x < y, x, y),
    "where not": lambda x, y: torch.where(x > 0, y, x),
}  # fmt: skip
PAIRS = {
    "alike": (f32(3, 4), f32(3, 4)), "broadcast": (f32(3, 1), f32(4)), "0-d right": (f32(3), f32()),
    "0-d left": (f32(), f32(3)), "both 0-d": (f32(), f32()), "0-d float64 right": (f32(3), HALF),
    "0-d float64 left": (HALF, f32(3)), "float64": (f32(3), f64(3)), "both 0-d, float64": (f32(), HALF),
    "int64 and float32": (i64(3), f32(3)), "int64 and float64 0-d": (i64(3), HALF), "int64": (i64(3), i64(3)),
    "uint8 and int64": (u8(3), i64(3)), "uint8 and float32": (u8(3), f32(3)),
    "int32 and 0-d int64": (i64(3).int(), i64()),
    "bool and float32": (bits(3), f32(3)), "empty": (f32(0, 4), f32(4)),
}  # fmt: skip


def test_real_functions_of_small_integers_compute_in_float32():
    for x in (torch.tensor([1, 5, 12], dtype=torch.uint8), torch.tensor([1, 5, 11], dtype=torch.int8), bits(4)):
        for function in (torch.exp, torch.log, torch.sqrt, torch.tanh, torch.sigmoid):
            assert_same(function, x)


def test_operations_of_two_tensors_equal_torchs():
    for (name, function), (kind, pair) in itertools.product(BINARY.items(), PAIRS.items()):
        if name == "sub" and "bool" in kind:
            continue  # torch has none
        with table_row(name, kind):
            assert_same(function, *pair)


def test_a_0d_float64_is_rounded_before_it_is_compared():
    """0.1 in float32 is more than 0.1 in float64, and torch compares both as float32."""
    near, tenth = torch.tensor([0.1, 0.0, 0.2]), torch.tensor(0.1, dtype=torch.float64)
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        with table_row(name):
            assert_same(BINARY[name], near, tenth)
            assert_same(BINARY[name], tenth, near)


def test_reductions():
    x = f32(3, 4, 5)
    names, dims = ("sum", "mean", "amax", "amin", "argmax"), (0, 1, -1, -2, (0, 2), (-1,), (), (0, 1, 2))
    for name, dim, keepdim in itertools.product(names, dims, (False, True)):
        if name == "argmax" and isinstance(dim, tuple):
            continue  # it is of one dimension
        with table_row(name, dim, keepdim):
            assert_same(lambda x, row=(name, dim, keepdim): getattr(torch, row[0])(x, row[1], keepdim=row[2]), x)


def test_reductions_of_other_dtypes():
    assert_same(lambda x: (x.sum(-1), x.amax(0), x.argmax(-1), (x > 0).sum(0)), i64(3, 4))
    assert_same(lambda x: (x.sum(-1), x.amax(0), x.argmax(-1)), u8(3, 4))
    assert_same(lambda x: (x.argmax(), x.argmax(-1, keepdim=True)), f32(3, 4))
    assert_same(lambda x: x.sum(-1), bits(3, 4))


def test_softmaxes():
    x = f32(3, 4) * 30
    x[1, 2], x[0, 0] = -torch.inf, 500
    for d in (0, 1, -1):
        with table_row(d):
            assert_same(lambda x, d=d: (x.softmax(d), x.log_softmax(d), x.log_softmax(d, dtype=torch.float64)), x)


def test_a_sigmoid_keeps_its_small_values():
    assert_same(lambda x: x.sigmoid().log(), torch.tensor([-60.0, -20.0, 0.0, 20.0]))
    assert_same(lambda x: (x.sigmoid(), F.silu(x)), torch.tensor([-200.0, -100.0, 100.0, 200.0]))
    assert_same(lambda x: x.sigmoid(), u8(4))


SHAPES = {
    "view": lambda x: x.view(6, 4), "reshape": lambda x: x.permute(2, 0, 1).reshape(8, -1),
    "flatten": lambda x: x.flatten(1),
    "unsqueeze": lambda x: (x.unsqueeze(0), x.unsqueeze(-1), x.unsqueeze(-2)), "squeeze": lambda x: x[:, :1].squeeze(1),
    "squeeze all": lambda x: x[:1, :1].squeeze(), "squeeze some": lambda x: x[:1, :1].squeeze((0, 1)),
    "expand": lambda x: (x[:1].expand(5, -1, -1), x[0, 0, 0].expand(3)), "transpose": lambda x: x.transpose(0, -1),
    "t": lambda x: (x[0].t(), x[0].T, x[0, 0].t()), "permute": lambda x: (x.permute(-1, 0, 1), x.movedim(-1, 0)),
    "slice": lambda x: (x[1:], x[:, :2], x[..., -2:], x[..., ::2], x[5:], x[..., 1:100], x[:, -2:-1], x[...]),
    "select": lambda x: (x[0], x[:, -1], x[..., 2], x.select(-2, -1), x[0, 0, 0]),
    "split": lambda x: (*x.split(3, -1), *x.split(1), *x.split(9, 1)), "split sizes": lambda x: x.split([1, 0, 3], -1),
    "split of nothing": lambda x: (x + 1)[:0].split(2),
    "chunk": lambda x: (*x.chunk(2, -1), *x.chunk(2)), "unbind": lambda x: (*x.unbind(-1), *x.unbind()),
    "cat": lambda x: (torch.cat([x, x[:1]]), torch.cat([x, x], -1)), "stack": lambda x: torch.stack([x, x + 1], -1),
    "cat of dtypes": lambda x: torch.cat([x, x.double()], 1),
    "stack of 0-d": lambda x: torch.stack([x[0, 0, 0], x[0, 0, 1]]),
    "full": lambda x: (torch.full((2,), 3), torch.full((2,), 0.5, dtype=torch.float64), torch.zeros(2), torch.ones(3)),
    "arange": lambda x: (torch.arange(3), torch.arange(2.0), torch.arange(1, 4), torch.arange(5, 1, -2)),
    "arange of a dtype": lambda x: torch.arange(0, 3, dtype=torch.int32),
}  # fmt: skip


def test_shapes():
    for name, function in SHAPES.items():
        with table_row(name):
            assert_same(function, f32(2, 3, 4))
            assert_same(function, i64(2, 3, 4))


def test_one_hot_codes():
    for spec, digits in ((spaces.Discrete(3), torch.tensor([2, 0])), (spaces.MultiDiscrete([2, 3]), i64(4, 2).abs())):
        with table_row(spec):
            assert_same(OneHot(spec), digits)


def test_gather_reads_as_many_rows_as_the_index_has():
    for dim, shape in itertools.product((0, 1, -1), ((3, 4), (1, 1), (2, 3), (3, 1), (1, 4))):
        with table_row(dim, shape):
            assert_same(lambda x, index, dim=dim: x.gather(dim, index), f32(3, 4), torch.randint(3, shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [4, 450], ids=["small", "large"])
def test_products(size, dtype):
    """`large` goes through torch."""
    a, w, b = (torch.randn(shape, dtype=dtype) for shape in ((size, 30), (20, 30), (20,)))
    assert (size * 30 * 20 > numpy_operations.SMALL_PRODUCT) == (size == 450)
    assert_same(F.linear, a, w, b)
    assert_same(F.linear, a, w)
    assert_same(lambda a, w: (a @ w.T, a[:2] @ a[:2].T), a, w)
    assert_same(F.linear, a[:1], w, b)
    assert_same(lambda a, w, b: F.linear(a.view(2, -1, 30), w, b), a, w, b)
    assert_same(lambda row, w: row.expand(size, 30) @ w.T, a[0], w)
    assert_same(F.linear, torch.randn(1, 5 * size, dtype=dtype), torch.randn(20, 5 * size, dtype=dtype))
    assert_same(lambda a, w, b: torch.addmm(b.expand(size, 20), a, w.T), a, w, b)


def test_products_of_batches():
    x, y = f32(3, 5, 4), f32(3, 4, 5)
    assert_same(lambda x, y: (torch.bmm(x, y), torch.bmm(y, x), torch.bmm(x[:, :1], y)), x, y)


@pytest.mark.parametrize("size", [1, 40], ids=["small", "large"])
def test_convolutions(size):
    """`large` goes through torch."""
    x, w, b = f32(size, 3, 9, 8), f32(5, 3, 3, 2), f32(5)
    assert (size * 9 * 9 * w.numel() > numpy_operations.SMALL_PRODUCT) == (size == 40)
    for settings in ((1, 1), (2, (1, 2)), ((1, 3), (2, 0))):
        with table_row(settings):
            assert_same(lambda x, w, b, settings=settings: F.conv2d(x, w, b, *settings), x, w, b)
            assert_same(lambda x, w, settings=settings: F.conv2d(x, w, None, *settings), x, w)
    last = x.permute(0, 2, 3, 1).contiguous()
    assert_same(lambda x, w, b: F.conv2d(x.permute(0, 3, 1, 2), w, b), last, w, b)
    assert_same(lambda x, w, b: F.conv2d(x[..., 1:], w, b), x, w, b)


def test_a_batch_may_be_empty():
    assert_same(lambda a, w, b: F.linear(a, w, b).tanh().log_softmax(-1).argmax(-1), f32(0, 3), f32(4, 3), f32(4))


RANDOM = {
    "rand": lambda x: torch.rand(x.shape), "rand_like": torch.rand_like, "randn": lambda x: torch.randn(2, 3),
    "randn of float64": lambda x: torch.randn(20, dtype=torch.float64), "randn_like": torch.randn_like,
    "randn_like of another dtype": lambda x: torch.randn_like(x, dtype=torch.float64),
    "exponential": lambda x: torch.empty_like(x).exponential_(),
    "exponential of a shape": lambda x: torch.empty(x.shape, dtype=torch.float64).exponential_(),
    "randint_like": lambda x: torch.randint_like(x, 7),
    "randint_like of int64": lambda x: torch.randint_like(x.long(), 7),
    "one after another": lambda x: (torch.rand_like(x), torch.randn_like(x), torch.randint_like(x, 3), torch.rand(1)),
    "a number that nobody reads": lambda x: (torch.randn_like(x), x + 1)[1],
    "of a part": lambda x: torch.randn_like(x.chunk(2, -1)[0]),
    "of a broadcast": lambda x: torch.randn_like(x[:1].expand(9, -1)),
}  # fmt: skip


def test_random_numbers_are_torchs_in_the_same_order():
    for (name, function), size in itertools.product(RANDOM.items(), (2, 40)):
        with table_row(name, size):
            assert_same(function, f32(size, 4))


REFUSED = {
    "add of alpha": (lambda x: torch.add(x, x, alpha=2), "alpha"),
    "sub of alpha": (lambda x: torch.sub(x, x, alpha=2), "alpha"),
    "a scaled product": (lambda x: torch.addmm(x, x, x, beta=2), "beta"),
    "a sum in another dtype": (lambda x: (x * 3).sum(-1, dtype=torch.int64), "dtype"),
    "a rate of exponentials": (lambda x: torch.empty_like(x).exponential_(3.0), "exponential"),
    "random numbers in another order": (lambda x: torch.randn_like(x.T), "an order other than row-major"),
    "a generator": (lambda x: torch.rand(3, generator=torch.Generator()), "generator|not an argument"),
    "an operation without translation": (lambda x: torch.linalg.det(x), "numpy equivalent|linalg"),
    "an unread draw without translation": (lambda x: (torch.bernoulli(x.sigmoid()), x)[1], "bernoulli"),
    "several results": (lambda x: x.max(-1).values, "max"),
    "a look at a value": (lambda x: x + 1 if x.sum() > 0 else x, "reads values"),
    "an item": (lambda x: x * x[0, 0].item(), "_local_scalar_dense.*reads values"),
    "numpy": (lambda x: torch.from_numpy(np.abs(x.numpy())), "reads values"),
    "an array": (lambda x: x + float(np.asarray(x).sum()), "reads values"),
    "a list": (lambda x: x + x.tolist()[0][0], "reads values"),
    "a tensor of values": (lambda x: x + torch.tensor([x[0, 0], x[0, 1], 0]), "reads values"),
    "a tensor of whole values": (lambda x: x + torch.tensor([x.argmax(), 0, 0]), "reads values"),
    "a tensor of an array": (lambda x: x + torch.from_numpy(np.array([x[0, 0]])), "reads values"),
    "a tensor of values like it": (lambda x: x + x.new_tensor([x[0, 0], 0, 0]), "reads values"),
    "a constant elsewhere": (lambda x: torch.ops.aten.lift_fresh(ELSEWHERE), "constant is on meta"),
    "writing a constant": (lambda x: torch.tensor([1.0, 2.0, 3.0]).add_(x[0]), "add_.*writes to its arguments"),
    "writing an argument": (lambda x: x.add_(1), "add_.*writes to its arguments"),
    "writing an argument unread": (lambda x: (x.add_(1), torch.zeros(2))[1], "writes to its arguments"),
    "writing a part of an argument": (lambda x: (x[0].zero_(), x)[1], "zero_.*writes to its arguments"),
    "writing all of an argument through a view": (lambda x: x.view(x.shape).add_(1), "add_.*writes to its arguments"),
    "writing all of an argument by another name": (lambda x: x[...].add_(1), "add_.*writes to its arguments"),
    "writing what a view sees": (lambda x: (lambda y: (y[0], y.add_(1)))(x * 2), "memory that other tensors share"),
    "writing through an overload with out": (lambda x: torch.add(x, x, out=torch.empty_like(x)),
                                             "writes|not an argument"),
    "bfloat16": (lambda x: x.bfloat16().float(), "bfloat16"),
    "a number that does not fit": (lambda x: x.to(torch.uint8) + (-1), "out of bounds"),
    "a comparison with one": (lambda x: x.to(torch.uint8) > -1, "gt.Scalar of torch.uint8 and -1"),
    "a convolution with dilation": (lambda x: F.conv2d(x[None, None], x[None, None, :2, :2], dilation=2), "dilation"),
    "a convolution of a sequence": (lambda x: F.conv1d(x[None], x[None]), "not two-dimensional"),
    "the mean of nothing": (lambda x: x[:0].mean(0), "in numpy: Mean"),
}  # fmt: skip


def test_functions_that_cannot_be_translated_are_refused():
    for name, (function, message) in REFUSED.items():
        with table_row(name), pytest.raises(NotTranslatable, match=message):
            run(function, f32(3, 3))


def test_an_attribute_is_refused():
    held = torch.ones(3)
    with pytest.raises(NotTranslatable):
        run(lambda x: x + held, f32(3))


def test_arguments_in_bfloat16_are_refused():
    with pytest.raises(NotTranslatable, match="bfloat16"):
        run(lambda x: x.float(), f32(3).bfloat16())


def test_translation_draws_no_random_numbers():
    x, state = f32(3), torch.get_rng_state()
    NumpyProgram(lambda x: torch.randn_like(x) + torch.rand(3), x)
    assert torch.equal(torch.get_rng_state(), state)


def test_programs_emit_no_numpy_warnings():
    """numpy warns of overflow and of division by zero; warnings are errors here."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = torch.tensor([0.0, -1.0, 1e5, torch.inf, torch.nan])
        assert_same(
            lambda x: (x.log(), x.exp(), x / x, x / (0 * x), x - x, x.sqrt(), x.square() * 1e38), f32(5), then=(x,)
        )


def test_a_result_may_be_an_argument_or_a_view_of_one():
    x = f32(3, 4)
    assert_same(lambda x: {"itself": x, "view": x.T, "row": x[1], "column": x[:, 0], "wide": x[:1].expand(5, 4)}, x)
    found = run(lambda x: (x, x[0].expand(5, 4), x.clone()), x)
    assert found[0].data_ptr() == x.data_ptr() and found[2].data_ptr() != x.data_ptr()
    found[1].add_(1)  # every result may be written


def test_arguments_are_read_at_every_call():
    x, w = f32(2, 3), f32(4, 3)
    program = NumpyProgram(lambda given: F.linear(*given).tanh(), (x, w))
    arrays = [x.numpy(), w.numpy()]
    for _ in range(2):
        torch.testing.assert_close(tensors(program, arrays), F.linear(x, w).tanh())
        w.add_(1)
        x.mul_(2)


def test_one_tensor_in_two_places_is_two_arguments():
    x = f32(3)
    program = NumpyProgram(lambda given: given[0] - given[1], (x, x))
    assert program([np.full(3, 5, np.float32), np.full(3, 2, np.float32)]).tolist() == [3, 3, 3]


def test_the_program_lists_the_arguments_that_it_reads():
    program = NumpyProgram(lambda given: given["c"] + given["a"], {"a": f32(2), "b": f32(3), "c": f32(2)})
    assert program.used == [0, 2]
    assert program([np.ones(2, np.float32), np.full(2, 2, np.float32)]).tolist() == [3, 3]


def test_results_have_the_structure_of_the_function():
    found = run(lambda x: {"a": (x, None), "b": AlgStep(x + 1, None, {"c": x > 0})}, f32(2))
    assert found["a"][1] is None and isinstance(found["b"], AlgStep)
    assert found["b"].info["c"].dtype == torch.bool


def test_every_entry_is_tested(monkeypatch):
    """An operation that is added to the tables needs a case above."""
    seen = set()

    def spy(node, table):
        seen.add(node.target)
        return numpy_operations.translated(node, table)

    cases = [(f, (f32(2, 3),)) for f in UNARY.values()] + [(f, (f32(2), f32(2))) for f in BINARY.values()]
    cases += [(f, (f32(2, 3, 4),)) for f in SHAPES.values()] + [(f, (f32(2, 4),)) for f in RANDOM.values()]
    cases += [(f, (f32(2, 3),)) for f in CONSTANTS.values()] + [(others, (f32(3, 3), i64(3, 3), bits(3)))]
    monkeypatch.setattr(numpy_program, "translated", spy)
    for function, arguments in cases:
        NumpyProgram(lambda given, function=function: function(*given), arguments)
    entries = {*numpy_operations.TABLE, *numpy_operations.DISTRIBUTIONS, *numpy_operations.OUTPUTS_OF_SEVERAL}
    assert entries <= seen


def others(x, index, bit):
    return (x.sum(0), x.mean(0), x.amax(0), x.amin(0), x.argmax(), x.softmax(0), x.log_softmax(0), x @ x,
            x[None].bmm(x[None]), F.linear(x, x, x[0]), F.conv2d(x[None, None], x[None, None]),
            x.gather(0, index.clamp(0, 2)), ~bit, bit & bit, bit | bit, x.clone())  # fmt: skip


def test_values_of_fixed_arguments_are_computed_once_by_prepare():
    x, w = f32(2, 3), f32(4, 3)
    program = NumpyProgram(lambda given: given[1] @ given[0].exp().T, (w, x), num_fixed=1)
    array = w.numpy().copy()
    for _ in range(2):
        program.prepare([array])
        expected = x @ torch.from_numpy(array).exp().T
        torch.testing.assert_close(tensors(program, [x.numpy()]), expected)
        array += 1
        torch.testing.assert_close(tensors(program, [x.numpy()]), expected)  # until it is called again


# Constants.

CONSTANTS = {
    "a number": lambda x: (x * torch.tensor(2.0), torch.tensor(2.0) - x, x / torch.tensor(4)),
    "a number of more bits": lambda x: (x * torch.tensor(0.1, dtype=torch.float64), x > np.pi * torch.tensor(0.1)),
    "a list": lambda x: x + torch.tensor([1.0, 2.0, 3.0]),
    "a list of lists": lambda x: x @ torch.tensor([[1.0, -1.0], [2.0, -2.0], [3.0, -3.0]]),
    "whole numbers": lambda x: x + torch.tensor([1, 2, 3]),
    "bits": lambda x: torch.where(torch.tensor([True, False, True]), x, -x),
    "of its shape": lambda x: x.sum(0) / torch.tensor(x.shape[0]),
    "like it": lambda x: x + x.new_tensor([1.0, 2.0, 3.0]),
    "an array": lambda x: x + torch.from_numpy(np.arange(3, dtype=np.float32)) + torch.as_tensor(np.ones(3)),
    "a transposed array": lambda x: x.T + torch.from_numpy(np.arange(6.0).reshape(2, 3).T),
    "an array's copy": lambda x: x + torch.tensor(np.ones(3), dtype=torch.float32),
    "none": lambda x: torch.cat([x, torch.tensor([]).view(0, 3)]),
    "infinite": lambda x: torch.where(x > 0, x, torch.tensor(-torch.inf)),
    "with a gradient": lambda x: x * torch.tensor(2.0, requires_grad=True),
    "in place": lambda x: (x * 2).mul_(torch.tensor([1.0, 2.0, 3.0])),
    "one that stands twice": lambda x: (lambda c: (c + x, c * x, c))(torch.tensor([1.0, 2.0, 3.0])),
    "lifted, and none": torch.ops.aten.lift_fresh,
    "alone": lambda x: {"number": torch.tensor(2.0), "view": torch.tensor([1.0, 2.0]).view(2, 1)},
}  # fmt: skip


def test_tensors_made_from_python_data_are_constants():
    for name, function in CONSTANTS.items():
        with table_row(name):
            assert_same(function, f32(2, 3), then=(f32(2, 3),))


def test_a_constant_that_is_a_result_may_be_written():
    program = NumpyProgram(
        lambda x: (torch.tensor([1.0, 2.0]), torch.tensor(3.0), torch.tensor([4.0, 5.0])[1:]), f32(2)
    )
    for _ in range(2):
        found = program([])
        assert [each.tolist() for each in found] == [[1, 2], 3, [5]]
        for each in found:
            each += 1


# The functions that are written.


def test_constants_of_every_kind_find_their_places():
    def function(given):
        x, y = given["x"], given["y"]
        joined = torch.cat([x, x[:, 1:], torch.full((2, 1), 0.5), y.double().float()], -1)
        return {
            "joined": joined, "sums": (joined.sum((0, 1)), joined.sum(-1, keepdim=True)), "none": None,
            "limits": x.clamp(max=0.25), "stacked": torch.stack([x, x + 1, 2 * x], 1), "parts": y.split([1, 2], 1),
            "infinite": torch.where(x > 0, x, -torch.inf), "big": torch.full((1,), 1e30), "kinds": x > torch.zeros(()),
        }  # fmt: skip

    assert_same(lambda x, y: function({"x": x, "y": y}), f32(2, 3), f32(2, 3))
    found = run(lambda x, y: function({"x": x, "y": y}), f32(2, 3), f32(2, 3))
    assert found["none"] is None and type(found["sums"]) is type(found["parts"]) is tuple


def test_names_of_operations_do_not_clash():
    """A graph names its results after operations, and some of these are Python's builtins or numpy's functions."""

    def function(x, w):
        for _ in range(3):
            x = 0.1 * abs(x).sum(-1, keepdim=True) + x.exp().log() - x.amax() + torch.pow(x, 2).mean(0) + w.abs().sum(0)
            x = torch.where(x > 0, x, -x)[..., 0:].view(x.shape).tanh()
        return {"sum": x.sum((0, 1)), "abs": abs(x), "slice": x[1:], "exp": x.exp(), "run": x}

    assert_same(function, 0.1 * f32(3, 4), f32(2))
    x, w = 0.1 * f32(3, 4), f32(2)
    program = NumpyProgram(lambda given: function(given[1], given[0]), (w, x), num_fixed=1)
    program.prepare([w.numpy()])
    expected = function(x, w)
    for name, leaf in tensors(program, [x.numpy()]).items():
        torch.testing.assert_close(leaf, expected[name])


def test_results_without_dimensions_are_arrays_wherever_they_come_from():
    held, given = torch.tensor(2.0), torch.tensor(3.0)

    def function(arguments):
        w, x = arguments
        return {
            "fixed": w,
            "of fixed": w.exp(),
            "given": x,
            "of given": x.square(),
            "both": w * x,
            "none": torch.ones(()),
        }

    program = NumpyProgram(function, (held, given), num_fixed=1)
    for k in range(3):
        fixed = np.array(2.0 + k, np.float32)
        program.prepare([fixed])
        found = program([np.array(3.0, np.float32)])
        expected = function((torch.from_numpy(fixed), given))
        for name, leaf in found.items():
            assert type(leaf) is np.ndarray and leaf.shape == () and leaf.dtype == np.float32, name
            assert leaf == pytest.approx(expected[name].item()), name


def test_programs_emit_no_numpy_warnings_for_fixed_arguments():
    w, x = torch.ones(3), torch.ones(3)
    program = NumpyProgram(lambda given: given[0].log() / given[1], (w, x), num_fixed=1)
    before = np.geterr()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program.prepare([np.array([0, -1, np.inf], np.float32)])
        found = program([np.zeros(3, np.float32)])
    assert np.array_equal(found, np.array([-np.inf, np.nan, np.inf], np.float32), equal_nan=True)
    assert np.geterr() == before


def test_functions_are_written_once_and_not_at_a_call(monkeypatch):
    written = []
    write = numpy_program._lines

    def spy(arguments, lines, result):
        written.append(lines)
        return write(arguments, lines, result)

    monkeypatch.setattr(numpy_program, "_lines", spy)
    w, x = f32(4, 3), f32(2, 3)
    program = NumpyProgram(lambda given: given[1] @ given[0].exp().T, (w, x), num_fixed=1)
    assert len(written) == 2 and all(written)  # something depends on the fixed argument alone, something does not
    for _ in range(3):
        program.prepare([w.numpy()])
        program([x.numpy()])
    assert len(written) == 2


def test_random_numbers_like_a_fixed_argument_are_drawn_at_every_call():
    w, x = f32(3), f32(3)
    program = NumpyProgram(lambda given: given[0].exp() + torch.randn_like(given[0]) + given[1], (w, x), num_fixed=1)
    torch.manual_seed(4)
    program.prepare([w.numpy()])
    found = [tensors(program, [x.numpy()]) for _ in range(2)]
    torch.manual_seed(4)
    for each in found:
        torch.testing.assert_close(each, w.exp() + torch.randn(3) + x)


def test_random_numbers_of_earlier_calls_stay():
    x = f32(3)
    program = NumpyProgram(lambda x: (torch.rand_like(x), torch.randint_like(x, 9)), x)
    drawn = [program([x.numpy()]) for _ in range(3)]
    torch.manual_seed(1)
    again = [nest.map(np.copy, program([x.numpy()])) for _ in range(3)]
    torch.manual_seed(1)
    for each, copy in zip([program([x.numpy()]) for _ in range(3)], again):
        assert all(np.array_equal(a, b) for a, b in zip(each, copy))
    assert len({each[0].tobytes() for each in drawn}) == 3


VIEWS_OF_DRAWS = {
    "unsqueeze": lambda x: x.unsqueeze(0), "view": lambda x: x.view(3, 2), "expand": lambda x: x.expand(2, 2, 3),
    "transpose": lambda x: x.t(), "select": lambda x: x[1], "slice": lambda x: x[:, 1:],
    "split": lambda x: x.split(2, 1)[1], "detach": torch.detach, "where": lambda x: torch.where(x > 2, 0, x),
    "clone": torch.clone,
    "cast": lambda x: x.to(torch.float32), "clamp": lambda x: x.clamp(0, 1), "relu": torch.relu,
}  # fmt: skip


def test_views_of_random_numbers_stay():
    for name, view in VIEWS_OF_DRAWS.items():
        program = NumpyProgram(lambda x, view=view: view(torch.rand_like(x)), f32(2, 3))
        x = [np.zeros((2, 3), np.float32)]
        first = program(x)
        kept = first.copy()
        assert not np.array_equal(program(x), kept), name
        assert np.array_equal(first, kept), name


class Several(NamedTuple):
    one: object
    other: object


def test_results_come_in_the_nest_that_the_function_made():
    def function(x, y):
        return {"z": (x + y, None), "a": Several([x * y], ()), 3: {"deep": x - y}}

    x, y = f32(2), f32(2)
    found, expected = run(function, x, y), function(x, y)
    assert list(found) == list(expected)
    assert type(found["a"]) is Several and type(found["a"].one) is list and found["a"].other == ()
    assert found["z"][1] is None
    torch.testing.assert_close(nest.leaves(found), nest.leaves(expected))


def test_where_does_not_write_into_its_arguments():
    condition = torch.tensor([True, False, True])
    assert_same(lambda c, a, b: torch.where(c, a, b), condition, f32(3), f32(3))
    assert_same(lambda c, a, b: torch.where(c, a, b), condition[:1], f32(3), f32(3))
    assert_same(lambda c, a, b: torch.where(c, a, b), condition.expand(2, 3), f32(3), f32(3))
    assert_same(lambda c, a, b: torch.where(c, a, b), condition[0], f32(), f32())
    assert_same(lambda c, a, b: torch.where(c, a, b), condition, f32(3), f32(2, 3))


def test_prepare_casts_the_fixed_arguments_of_comparisons(monkeypatch):
    written, write = [], numpy_program._lines
    monkeypatch.setattr(numpy_program, "_lines", lambda a, b, *rest: written.append(len(b)) or write(a, b, *rest))
    program = NumpyProgram(lambda given: given[1] < given[0], (HALF, f32(3)), num_fixed=1)
    assert written == [1, 1]  # the cast, and the comparison
    program.prepare([np.array(0.5)])
    assert program([np.array([0.25, 0.5, 0.75], np.float32)]).tolist() == [True, False, False]


def test_numpys_warnings_elsewhere_are_unchanged():
    program = NumpyProgram(lambda x: x.log(), f32(3))
    program([np.zeros(3, np.float32)])
    with pytest.warns(RuntimeWarning, match="divide by zero"):
        np.log(np.zeros(3))


def test_values_that_only_define_a_draw_shape_are_not_computed(monkeypatch):
    lines, function = [], numpy_program._lines
    monkeypatch.setattr(numpy_program, "_lines", lambda a, b, *rest: lines.extend(b) or function(a, b, *rest))
    assert_same(lambda x: torch.randn_like(x.exp().log()) + x.tanh(), f32(2, 3))
    assert len(lines) == 3  # tanh, the draw, the sum
