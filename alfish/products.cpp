// Products of float32 matrices too small for a library's preparations to pay: `alfish::small_product`.
//
// A tile of the result is kept in registers while the inner dimension passes by. Any strides are taken; the rows of b
// are copied together where they are not contiguous. One thread. It is made with torch's stable interface, because its
// other headers take three times as long to compile, and twice the memory.

#include <ATen/cpu/vec/vec.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

namespace {

using Tensor = torch::stable::Tensor;
using Vec = at::vec::Vectorized<float>;
constexpr int64_t LANES = Vec::size();
// Registers: ROWS * COLUMNS sums, COLUMNS vectors of b, one number of a. AVX2 has 16 of them, AVX-512 and Neon 32.
constexpr int ROWS = 6;
constexpr int COLUMNS = LANES == 8 ? 2 : 4;

struct Matrix {
  const float* data;
  int64_t row, column;  // strides
};

// An array whose elements the compiler can keep in registers, which a loop over default constructors prevents.
template <size_t... I>
std::array<Vec, sizeof...(I)> zeros(std::index_sequence<I...>) {
  return {((void)I, Vec(0.0f))...};
}

// R rows and C vectors of columns of the result, the last of these with `last` lanes.
template <int R, int C>
void tile(Matrix a, Matrix b, float* out, int64_t out_row, int64_t inner, int64_t last) {
  auto sums = zeros(std::make_index_sequence<R * C>());
  for (int64_t k = 0; k < inner; ++k) {
    const float* from = b.data + k * b.row;
    auto of_b = zeros(std::make_index_sequence<C>());
    #pragma GCC unroll 8
    for (int c = 0; c < C - 1; ++c) of_b[c] = Vec::loadu(from + c * LANES);
    of_b[C - 1] = last == LANES ? Vec::loadu(from + (C - 1) * LANES) : Vec::loadu(from + (C - 1) * LANES, last);
    #pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      Vec of_a(a.data[r * a.row + k * a.column]);
      #pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sums[r * C + c] = at::vec::fmadd(of_a, of_b[c], sums[r * C + c]);
    }
  }
  #pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    #pragma GCC unroll 8
    for (int c = 0; c < C - 1; ++c) sums[r * C + c].store(out + r * out_row + c * LANES);
    sums[r * C + C - 1].store(out + r * out_row + (C - 1) * LANES, last);
  }
}

// All rows of C vectors of columns.
template <int C>
void panel(Matrix a, Matrix b, float* out, int64_t out_row, int64_t rows, int64_t inner, int64_t last) {
  int64_t i = 0;
  for (; i + ROWS <= rows; i += ROWS) {
    tile<ROWS, C>({a.data + i * a.row, a.row, a.column}, b, out + i * out_row, out_row, inner, last);
  }
  for (; i < rows; ++i) {
    tile<1, C>({a.data + i * a.row, a.row, a.column}, b, out + i * out_row, out_row, inner, last);
  }
}

void multiply(Matrix a, Matrix b, float* out, int64_t rows, int64_t columns, int64_t inner) {
  for (int64_t j = 0; j < columns; j += COLUMNS * LANES) {
    int64_t left = std::min<int64_t>(columns - j, COLUMNS * LANES);
    int64_t vectors = (left + LANES - 1) / LANES, last = left - (vectors - 1) * LANES;
    Matrix part{b.data + j, b.row, 1};
    switch (vectors) {
      case 1: panel<1>(a, part, out + j, columns, rows, inner, last); break;
      case 2: panel<2>(a, part, out + j, columns, rows, inner, last); break;
      case 3: panel<std::min(3, COLUMNS)>(a, part, out + j, columns, rows, inner, last); break;
      default: panel<COLUMNS>(a, part, out + j, columns, rows, inner, last);
    }
  }
}

// `[M, K] x [K, N]`, or `[E, M, K] x [E, K, N]`, of float32.
Tensor small_product(const Tensor& a, const Tensor& b) {
  auto size = a.sizes(), of_a = a.strides(), of_b = b.strides();
  int64_t m = a.dim() - 2;  // where the matrix begins among the dimensions
  int64_t members = m ? size[0] : 1, rows = size[m], inner = size[m + 1], columns = b.size(m + 1);
  int64_t shape[]{members, rows, columns}, strides[]{rows * columns, columns, 1};
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      m + 2, shape + 1 - m, strides + 1 - m, aoti_torch_dtype_float32(), aoti_torch_device_type_cpu(), 0, &handle));
  Tensor out(handle);
  std::vector<float> copy(of_b[m + 1] == 1 ? 0 : inner * columns);
  for (int64_t e = 0; e < members; ++e) {
    Matrix left{a.const_data_ptr<float>() + e * of_a[0], of_a[m], of_a[m + 1]};
    Matrix right{b.const_data_ptr<float>() + e * of_b[0], of_b[m], of_b[m + 1]};
    if (!copy.empty()) {
      // In blocks that stay in the nearest cache.
      for (int64_t j = 0; j < columns; j += LANES)
        for (int64_t k = 0; k < inner; ++k)
          for (int64_t i = j; i < std::min(j + LANES, columns); ++i)
            copy[k * columns + i] = right.data[k * right.row + i * right.column];
      right = {copy.data(), columns, 1};
    }
    multiply(left, right, out.mutable_data_ptr<float>() + e * rows * columns, rows, columns, inner);
  }
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(alfish, CPU, library) { library.impl("small_product", TORCH_BOX(&small_product)); }
