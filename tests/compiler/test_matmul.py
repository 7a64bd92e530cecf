"""Products in graphs: which way each is done, and that it is right.

The first of these tests compiles `matmul.cpp`, which takes some seconds, or one where torch's cache knows it.
"""

import itertools
import logging
import shutil

import pytest
import torch
from hidden_names import hide
from torch import nn
from torch.torch_version import TorchVersion

from alfish.compiler import inductor, kernels, matmul, torch_internals
from alfish.compiler.inductor import CompiledFunction

pytestmark = [
    # Torch's compiler, at import.
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler needs g++, which is not installed"),
]
kernel = pytest.mark.skipif(
    not matmul.suits_products(),
    reason=f"products are torch's without AVX2 or AVX-512, and before torch {matmul.OLDEST_TORCH}",
)
OWN, OWN_LOW = "alfish.product", "alfish.bfloat16_product"


@pytest.fixture(autouse=True)
def limit(monkeypatch):
    """Large, as to bfloat16, from 128 x 128 x 128."""
    monkeypatch.setattr(matmul, "LARGE_PRODUCT", 128**3)


def graph_of(function, arguments, precision="float32"):
    """The operations of the graph that is compiled, and the rewritten graph as a function."""
    targets, compile_ = [], inductor._compile

    def spy(graph, *_):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return lambda leaves: graph(*leaves)

    inductor._compile = spy
    try:
        return targets, CompiledFunction(function, arguments, precision)
    finally:
        inductor._compile = compile_


def count(targets, *names):
    return sum(name in target for target in targets for name in names)


def square(size=128):
    torch.manual_seed(0)
    return torch.randn(size, size), torch.randn(size, size), torch.randn(size)


PRODUCTS = {
    "mm": lambda a, b, bias: a @ b,
    "addmm": lambda a, b, bias: torch.addmm(bias, a, b.T),
    "linear": lambda a, b, bias: nn.functional.linear(a, b, bias),
    "bmm": lambda a, b, bias: torch.bmm(torch.stack([a, b]), torch.stack([b, a])),
    "baddbmm": lambda a, b, bias: torch.baddbmm(bias, torch.stack([a, b]), torch.stack([b, a]).mT),
}


@kernel
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("size", [128, 64])
def test_a_product_in_float32_is_done_by_the_kernel(name, size):
    arguments = square(size)
    expected = PRODUCTS[name](*arguments)
    targets, function = graph_of(lambda given: PRODUCTS[name](*given), arguments)
    assert count(targets, OWN) == 1 and not count(targets, "_to_copy")
    assert ((function(arguments) - expected).abs().max() / expected.abs().max()).item() < 1e-5


@kernel
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("has_kernel", [True, False])
def test_a_large_product_is_in_bfloat16_if_asked(name, has_kernel, monkeypatch):
    if has_kernel and not matmul.has_bfloat16_products():
        pytest.skip("this processor does not multiply pairs of bfloat16, or has tiles for them")
    monkeypatch.setattr(matmul, "has_bfloat16_products", lambda: has_kernel)
    arguments = square()
    expected = PRODUCTS[name](*arguments)
    targets, function = graph_of(lambda given: PRODUCTS[name](*given), arguments, "bfloat16")
    found = function(arguments)
    assert found.dtype == torch.float32
    assert count(targets, OWN_LOW) == has_kernel and count(targets, "_to_copy") == (2 if has_kernel else 3)
    assert 1e-4 < ((found - expected).abs().max() / expected.abs().max()).item() < 2e-2
    targets, _ = graph_of(lambda given: PRODUCTS[name](*given), square(64), "bfloat16")
    assert count(targets, OWN) == 1 and not count(targets, "_to_copy")


@kernel
@pytest.mark.parametrize("sizes", [(101, 300, 400), (300, 101, 400), (300, 400, 101)])
def test_narrow_products_keep_float32(sizes):
    """As those of the logits of 101 bins, forward and backward."""
    rows, inner, columns = sizes
    torch.manual_seed(0)
    a, b = torch.randn(rows, inner), torch.randn(inner, columns)
    targets, function = graph_of(lambda given: given[0] @ given[1], (a, b), "bfloat16")
    assert count(targets, OWN) == 1 and not count(targets, "_to_copy")
    torch.testing.assert_close(function((a, b)), a @ b, rtol=1e-4, atol=1e-4)


@kernel
def test_processors_with_bfloat16_products_use_them():
    """Else these tests would pass without the kernel that its own check found wrong."""
    pairs = torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.cpu._is_avx512_bf16_supported()
    assert matmul.has_bfloat16_products() == (pairs and not torch.cpu._is_amx_tile_supported())


@kernel
@pytest.mark.parametrize("has_kernel", [True, False])
def test_the_cost_of_bfloat16_is_measured(has_kernel, monkeypatch):
    """With and without the kernel for it; how fast it is depends on the processor."""
    called, expected = [], has_kernel and matmul.has_bfloat16_products()

    def seconds(function):
        called.append(function())
        return len(called)

    monkeypatch.setattr(matmul, "_seconds", seconds)
    monkeypatch.setattr(matmul, "has_bfloat16_products", lambda: expected)
    assert matmul.bfloat16_cost.__wrapped__() == 0.5
    assert all(torch.equal(result, torch.full((256, 256), 256.0)) for result in called) and len(called) == 2


def both_kernels():
    """Each as (function, dtype of what it takes)."""
    assert matmul.has_products()
    yield torch.ops.alfish.product, torch.float32
    if matmul.has_bfloat16_products():
        yield torch.ops.alfish.bfloat16_product, torch.bfloat16


def check(kernel, a, b, msg=None):
    found = kernel(a, b)
    assert found.is_contiguous() and found.dtype == torch.float32
    torch.testing.assert_close(found, (a.double() @ b.double()).float(), rtol=1e-4, atol=1e-4, msg=msg)


SIZES = (1, 2, 5, 6, 7, 16, 17, 48, 67)


@kernel
@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, False), (True, True)], ids=str)
def test_the_kernels_are_right_in_every_shape_and_stride(transposed):
    torch.manual_seed(0)
    for kernel, dtype in both_kernels():
        for rows, inner, columns in itertools.product(SIZES, repeat=3):
            a, b = torch.randn(rows, inner).to(dtype), torch.randn(inner, columns).to(dtype)
            check(kernel, *(x.T.contiguous().T if turn else x for x, turn in zip((a, b), transposed)))


@kernel
def test_the_kernels_go_through_a_long_inner_dimension_in_parts():
    torch.manual_seed(0)
    for kernel, dtype in both_kernels():
        for inner in (255, 256, 257, 511, 512, 513, 514, 1025, 1100):
            a, b = torch.randn(7, inner).to(dtype), torch.randn(inner, 83).to(dtype)
            for turned in (b, b.T.contiguous().T):
                check(kernel, a, turned)
                check(kernel, a.T.contiguous().T, turned)


@kernel
@pytest.mark.parametrize("inner", [30, 257])
@pytest.mark.parametrize("columns", [1, 63, 128, 300])
def test_kernels_copy_scattered_memory(inner, columns):
    """Gradients of the weights of wide layers: the left matrix is the transpose of a contiguous one."""
    torch.manual_seed(0)
    for kernel, dtype in both_kernels():
        for rows in (515, 600):
            a, b = torch.randn(2, inner, rows).to(dtype).mT, torch.randn(2, inner, 600).to(dtype)[..., :columns]
            check(kernel, a, b)
            check(kernel, a.contiguous(), b)
            check(kernel, a[0], b.mT.contiguous().mT[1])


@kernel
@pytest.mark.parametrize("shape", [(3, 70, 90, 130), (1, 700, 30, 40), (1, 7, 900, 90), (5, 64, 64, 64)], ids=str)
def test_the_kernels_give_the_same_numbers_on_any_number_of_threads(shape):
    """Of these, one has more panels than threads, and two have but one or two."""
    members, rows, inner, columns = shape
    torch.manual_seed(0)
    num_threads = torch.get_num_threads()
    for kernel, dtype in both_kernels():
        a, b = torch.randn(members, rows, inner).to(dtype), torch.randn(members, inner, columns).to(dtype)
        a = a.mT.contiguous().mT if rows > 512 else a
        found = []
        try:
            for count in (1, 2, 5):
                torch.set_num_threads(count)
                found.append(kernel(a, b))
        finally:
            torch.set_num_threads(num_threads)
        check(kernel, a, b)
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@kernel
def test_the_kernels_take_several_matrices_and_parts_of_them():
    torch.manual_seed(0)
    for kernel, dtype in both_kernels():
        a, b = torch.randn(3, 7, 20).to(dtype), torch.randn(3, 20, 30).to(dtype)
        last = [x.permute(1, 2, 0).contiguous().permute(2, 0, 1) for x in (a, b)]
        cases = {
            "of a few rows and columns": (a[:, 1:6, 3:14], b[:, 3:14, 2:25]),
            "pairs at odd places": (a[:, 1:6, 3:13], b.mT.contiguous().mT[:, 3:13, 2:25]),
            "odd rows": (a[..., 1:], b[:, 1:]),
            "rows at odd places": (torch.randn(3, 8, 21).to(dtype)[..., :20], b),
            "members at odd places": (a.flatten()[: 3 * 139].view(3, 139)[:, :120].unflatten(1, (6, 20)), b),
            "one matrix for all": (a[:1].expand(3, 7, 20), b),
            "members last": last,
            "every other column": (a[..., ::2], b[:, ::2, ::3]),
            "no rows": (a[:, :0], b),
            "no inner dimension": (a[..., :0], b[:, :0]),
        }
        for name, (left, right) in cases.items():
            check(kernel, left, right, f"{name}, {dtype}")


@kernel
def test_the_kernels_propagate_values_that_are_not_finite():
    for kernel, dtype in both_kernels():
        for columns in (16, 19):
            a, b = torch.ones(7, 5, dtype=dtype), torch.ones(5, columns, dtype=dtype)
            a[3, 2], b[1, 11] = torch.nan, torch.inf
            found, expected = kernel(a, b), a.float() @ b.float()
            assert torch.equal(found.isnan(), expected.isnan()) and torch.equal(found.isinf(), expected.isinf())


@kernel
@pytest.mark.parametrize("rows", [20, 600])
@pytest.mark.parametrize("turned", [False, True])
def test_kernels_read_only_their_matrices(turned, rows):
    for kernel, dtype in both_kernels():
        a, b = (torch.full((rows, 40), torch.nan, dtype=dtype) for _ in range(2))
        a[:, :11], b[:11, :19] = 1, 2
        left, right = a[:, :11], b[:11, :19]
        if turned:
            left, right = a.T.contiguous().T[:, :11], b.T.contiguous().T[:11, :19]
        assert torch.equal(kernel(left, right), torch.full((rows, 19), 22.0))


@kernel
def test_torchs_compiler_knows_what_the_kernels_return():
    for kernel, dtype in both_kernels():
        for shape in ((5, 6), (3, 5, 6)):
            a = torch.randn(shape).to(dtype)
            torch.library.opcheck(kernel.default, (a, a.mT), test_utils="test_faketensor")


VECTORS = {  # of a [2, 5, 4], b [2, 4, 1], c [2, 1, 3] and biases
    "a column": lambda a, b, c, bias: a[0] @ b[0],
    "columns": lambda a, b, c, bias: a @ b,
    "a column and a bias": lambda a, b, c, bias: torch.addmm(bias, a[0], b[0]),
    "columns and biases": lambda a, b, c, bias: torch.baddbmm(bias[None], a, b),
    "an outer product": lambda a, b, c, bias: b[0] @ c[0],
    "outer products": lambda a, b, c, bias: torch.bmm(b, c),
    "of a transpose": lambda a, b, c, bias: a[0].T @ (a[0] @ b[0]),
}


@pytest.mark.parametrize("name", VECTORS)
def test_products_with_vectors_are_written_out(name):
    arguments = torch.randn(2, 5, 4), torch.randn(2, 4, 1), torch.randn(2, 1, 3), torch.randn(1)
    targets, function = graph_of(lambda given: VECTORS[name](*given), arguments)
    torch.testing.assert_close(function(arguments), VECTORS[name](*arguments))
    assert not count(targets, OWN, *(str(target) for target in matmul.PRODUCTS))


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int64])
def test_a_product_of_integers_keeps_its_dtype(dtype):
    arguments = torch.full((4, 3), 100, dtype=dtype), torch.full((3, 1), 2, dtype=dtype)
    _, function = graph_of(lambda given: given[0] @ given[1], arguments)
    found = function(arguments)
    assert found.dtype == dtype and torch.equal(found, arguments[0] @ arguments[1])


class Far:
    """The layout of a tensor on another device, where tracing needs no numbers."""

    dtype, device = torch.float32, torch.device("meta")

    def __init__(self, *shape):
        self.shape, self.stride = shape, torch.empty(shape, device="meta").stride


@pytest.mark.parametrize(("precision", "num_low"), [("float32", 0), ("bfloat16", 1)])
def test_on_a_gpu_only_large_products_change_and_only_in_bfloat16(precision, num_low):
    def function(given):
        image, weight, a, b, small = given
        return torch.conv2d(image, weight, padding=1), a @ b, small @ b[:, :1], a[:1] @ b

    layouts = Far(128, 32, 16, 16), Far(32, 32, 3, 3), Far(128, 128), Far(128, 128), Far(4, 128)
    targets, _ = graph_of(function, layouts, precision)
    assert count(targets, OWN, OWN_LOW, "aten.mul") == 0
    assert count(targets, "aten.mm") == 3 and count(targets, "aten.convolution") == 1
    assert count(targets, "_to_copy") == 6 * num_low  # two operands and the result, of the convolution and a product


@pytest.mark.parametrize("precision", matmul.PRECISIONS)
def test_one_product_after_another_is_rewritten(precision):
    a, b, _ = square()
    _, function = graph_of(lambda given: given[0] @ given[1] @ given[0], (a, b), precision)
    assert function((a, b)).shape == a.shape


def test_what_several_products_take_becomes_bfloat16_once():
    a, b, _ = square()
    targets, function = graph_of(lambda given: given[0] @ given[1] + given[0].T @ given[1].mT, (a, b), "bfloat16")
    # a and b, and where oneDNN multiplied, two results
    assert count(targets, "_to_copy") == (2 if matmul.has_bfloat16_products() else 4)
    torch.testing.assert_close(function((a, b)), a @ b + a.T @ b.T, rtol=0.02, atol=0.3)


def test_what_is_written_between_products_becomes_bfloat16_again():
    def function(given):
        a, b = given
        view = a.T
        before = view @ b
        a.mul_(2)
        return before, view @ b

    a, b, _ = square()
    _, rewritten = graph_of(function, (a, b), "bfloat16")
    before, after = rewritten((a.clone(), b))
    torch.testing.assert_close(after, 2 * before)


def test_products_with_factors_and_of_float64_are_not_rewritten():
    a, b, bias = square()
    targets, _ = graph_of(lambda given: torch.addmm(given[2], given[0], given[1], beta=2), (a, b, bias), "bfloat16")
    assert not count(targets, "_to_copy", OWN, OWN_LOW)
    for size in (64, 128):
        a, b, _ = square(size)
        targets, _ = graph_of(lambda given: given[0] @ given[1], (a.double(), b.double()), "bfloat16")
        assert not count(targets, "_to_copy", OWN, OWN_LOW)


@pytest.fixture
def forgotten():
    def forget():
        kernels.library.cache_clear()
        kernels._being_built.cache_clear()
        matmul.has_products.cache_clear()
        matmul.has_bfloat16_products.cache_clear()

    forget()
    yield
    forget()


@kernel
def test_a_kernel_without_bfloat16_leaves_it_to_torch(monkeypatch, forgotten):
    real = matmul._is_right

    def is_right(product, dtype):
        if dtype == torch.bfloat16:
            raise NotImplementedError("no kernel for this processor")
        return real(product, dtype)

    monkeypatch.setattr(matmul, "_is_right", is_right)
    assert matmul.has_products() and not matmul.has_bfloat16_products()


@kernel
@pytest.mark.parametrize("when", ["at once", "later"])
def test_without_a_compiler_products_are_torchs(monkeypatch, caplog, forgotten, when):
    from torch._inductor.codecache import CppCodeCache

    def refuse():
        raise RuntimeError("no C++ compiler\nand a long report")

    monkeypatch.setattr(CppCodeCache, "load_async", lambda source, submit_fn: refuse if when == "later" else refuse())
    a, b, _ = square(64)
    targets, function = graph_of(lambda given: given[0] @ given[1], (a, b))
    assert count(targets, "aten.mm") == 1 and torch.equal(function((a, b)), a @ b)
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert record.getMessage().endswith("could not be compiled: no C++ compiler")


@kernel
def test_where_torch_has_moved_its_loader_products_are_torchs(monkeypatch, caplog, forgotten):
    place = hide(monkeypatch, "CppCodeCache")
    assert not matmul.has_products()
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert f"has no {place}" in record.getMessage()


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT"), (torch, "__version__", TorchVersion("2.9.1+cpu"))],
    ids=["a processor where nobody measured", "a torch without its interface"],
)
def test_on_some_machines_products_are_torchs(monkeypatch, caplog, forgotten, where, name, value):
    monkeypatch.setattr(where, name, value)
    a, b, _ = square(64)
    targets, _ = graph_of(lambda given: given[0] @ given[1], (a, b))
    assert count(targets, "aten.mm") == 1 and not caplog.records


def rounded(x):
    """The nearest number with the 8 significant bits of bfloat16, half a unit of which is 2^-9 to 2^-8 of it."""
    return x.bfloat16().to(x.dtype)


class RoundedConvolution(torch.autograd.Function):
    """A convolution whose arguments and results are rounded to bfloat16, forward and backward, and its sums are not."""

    @staticmethod
    def forward(context, images, weight, stride):
        context.save_for_backward(rounded(images), rounded(weight))
        context.stride = stride
        return rounded(nn.functional.conv2d(rounded(images), rounded(weight), stride=stride))

    @staticmethod
    def backward(context, gradient):
        images, weight = context.saved_tensors
        with torch.enable_grad():
            arguments = images.requires_grad_(), weight.requires_grad_()
            result = nn.functional.conv2d(*arguments, stride=context.stride)
        return *(rounded(each) for each in torch.autograd.grad(result, arguments, rounded(gradient))), None


def rounded_convolution(images, weight, bias, stride):
    return RoundedConvolution.apply(images, weight, stride) + bias.view(-1, 1, 1)


def two_convolutions(convolve, dtype=torch.float32):
    """Returns a function of images and parameters: the second layer's result, and gradients of its mean square."""

    def function(given):
        images, *parameters = (each.to(dtype) for each in given)
        with torch.enable_grad():
            w, b, v, c = parameters = [parameter.detach().requires_grad_() for parameter in parameters]
            result = convolve(convolve(images, w, b, 2).relu(), v, c, 1)
            return [result.detach(), *torch.autograd.grad(result.square().mean(), parameters)]

    return function


@pytest.mark.skipif(not torch_internals.has_bfloat16_convolutions(), reason="oneDNN has no bfloat16 on this processor")
def test_bfloat16_convolutions_round_only_arguments_and_results(monkeypatch):
    monkeypatch.setattr(matmul, "LARGE_PRODUCT", 1)
    torch.manual_seed(0)
    images = torch.randn(4, 3, 12, 12).contiguous(memory_format=torch.channels_last)
    given = [images, torch.randn(8, 3, 3, 3), torch.randn(8), torch.randn(5, 8, 3, 3), torch.randn(5)]
    exact = two_convolutions(nn.functional.conv2d)
    targets, low = graph_of(exact, given, "bfloat16")
    assert count(targets, "convolution") == 4 and count(targets, "_to_copy") >= 4
    expected = two_convolutions(rounded_convolution, torch.float64)(given)
    # Float32 sums of up to 200 products are within 2^-20 of exact ones, and numbers of bfloat16 are 2^-8 to 2^-7 apart.
    # So of these thousand results about one lies so close to the middle of two numbers that it takes the other one.
    for found, rounded_only, without in zip(low(given), expected, exact(given)):
        assert found.dtype == torch.float32
        error = (found - rounded_only).norm()
        assert error <= 2**-7 * rounded_only.abs().max(), "one result, the largest, takes the other number"
        assert error < 0.5 * (found - without).norm(), "it is rounded, and nearly all of the difference comes from that"
    plain = graph_of(exact, given)[1]
    torch.testing.assert_close(plain(given), exact(given))


def test_convolutions_stay_in_float32_where_onednn_has_no_bfloat16(monkeypatch):
    monkeypatch.setattr(matmul, "LARGE_PRODUCT", 1)
    monkeypatch.setattr(torch_internals, "has_bfloat16_convolutions", lambda: False)
    given = [
        torch.randn(4, 3, 12, 12),
        torch.randn(8, 3, 3, 3),
        torch.randn(8),
        torch.randn(5, 8, 3, 3),
        torch.randn(5),
    ]
    targets, function = graph_of(two_convolutions(nn.functional.conv2d), given, "bfloat16")
    assert count(targets, "convolution") == 4 and count(targets, "_to_copy") == 0
    torch.testing.assert_close(function(given), two_convolutions(nn.functional.conv2d)(given))
