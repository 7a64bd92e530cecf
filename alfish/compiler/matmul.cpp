// Matrix products: `alfish::product` of float32, and `alfish::bfloat16_product` with sums and result in float32.
//
// The result is computed in panels, each a few vectors wide. A tile of a panel stays in registers during the loop over
// the inner dimension. The part of b that a panel needs is copied to contiguous memory first, unless its rows are near
// one another. Rows of a whose neighbours are far apart are copied too, once for several panels. Arguments may have any
// strides. OpenMP's threads, or the helpers of `thread_pool.h`, divide the panels and their rows. The result does not
// depend on the number of threads. `thread_pool.h` is compiled before this file.
//
// In bfloat16, the processor multiplies pairs of neighbours along the inner dimension. A pair is a word of 32 bits,
// like a float32, so the code for tiles and copies works for both types.
//
// The code uses torch's stable interface: torch's other headers take three times as long to compile, and twice the
// memory.

#include <ATen/cpu/vec/vec.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#ifdef _OPENMP
#include <omp.h>
#endif

// With AMX (tiles for bfloat16), torch's library is used instead.
#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__) && !defined(__AMX_BF16__)
#define MULTIPLIES_BFLOAT16
#endif

namespace {

using Tensor = torch::stable::Tensor;
using Vec = at::vec::Vectorized<float>;
constexpr int64_t LANES = Vec::size();
// A tile needs registers for ROWS * COLUMNS sums, COLUMNS vectors of b, and one number of a. AVX2 has 16 registers,
// AVX-512 and Neon have 32.
constexpr int ROWS = 6;
constexpr int COLUMNS = LANES == 8 ? 2 : 4;
constexpr int64_t WIDTH = COLUMNS * LANES;  // columns of a panel
constexpr int64_t GROUP = 256;              // columns of a task that copies rows of a
constexpr int64_t DEPTH = 256;              // inner dimension per pass; a panel's part of b then stays in the cache
constexpr int64_t HEIGHT = 48;              // rows of a that are copied at a time
// Distance of neighbours, in words, from which a copy is faster: few of their cache lines fit in a cache, and they lie
// on many pages.
constexpr int64_t FAR = 512;
// Multiply-adds from which a product uses OpenMP's threads, which spin, and helpers, which sleep.
constexpr int64_t WORTH_THREADS = 1 << 19, WORTH_HELPERS = 1 << 23;
constexpr int64_t TASKS = 8;          // smallest number of tasks with helpers, so that late helpers find some
constexpr int64_t LEAST_HEIGHT = 48;  // smallest number of rows of a task, because each task copies its part of b

// Strides in words.
struct Matrix {
  const float* data;
  int64_t row, column;
};

// Returns an array that the compiler can keep in registers; a loop over default constructors prevents that.
template <size_t... I>
std::array<Vec, sizeof...(I)> zeros(std::index_sequence<I...>) {
  return {((void)I, Vec(0.0f))...};
}

template <bool PAIRS>
Vec multiply_add(Vec a, Vec b, Vec sum) {
#ifdef MULTIPLIES_BFLOAT16
  if constexpr (PAIRS) return _mm512_dpbf16_ps(sum, (__m512bh)(__m512)a, (__m512bh)(__m512)b);
#endif
  return at::vec::fmadd(a, b, sum);
}

// Computes R rows and C vectors of columns of the result; the last vector has `last` lanes. `adds`: whether to add to
// the old result.
template <bool PAIRS, int R, int C>
void tile(Matrix a, Matrix b, float* out, int64_t out_row, int64_t inner, int64_t last, bool adds) {
  auto sums = zeros(std::make_index_sequence<R * C>());
  for (int64_t k = 0; k < inner; ++k, a.data += a.column, b.data += b.row) {
    auto of_b = zeros(std::make_index_sequence<C>());
    #pragma GCC unroll 8
    for (int c = 0; c < C; ++c) of_b[c] = Vec::loadu(b.data + c * LANES);
    #pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      Vec of_a(a.data[r * a.row]);
      #pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sums[r * C + c] = multiply_add<PAIRS>(of_a, of_b[c], sums[r * C + c]);
    }
  }
  #pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    #pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      float* to = out + r * out_row + c * LANES;
      int64_t lanes = c == C - 1 ? last : LANES;
      Vec sum = sums[r * C + c];
      if (lanes == LANES) {
        (adds ? sum + Vec::loadu(to) : sum).store(to);
      } else {
        (adds ? sum + Vec::loadu(to, lanes) : sum).store(to, lanes);
      }
    }
  }
}

// Computes all whole tiles of R rows from row i on; returns the row after them.
template <bool PAIRS, int R, int C>
int64_t tiles(
    int64_t i, Matrix a, Matrix b, float* out, int64_t out_row, int64_t rows, int64_t inner, int64_t last, bool adds) {
  for (; i + R <= rows; i += R) {
    tile<PAIRS, R, C>({a.data + i * a.row, a.row, a.column}, b, out + i * out_row, out_row, inner, last, adds);
  }
  return i;
}

// Computes all rows of C vectors of columns.
template <bool PAIRS, int C>
void panel(Matrix a, Matrix b, float* out, int64_t out_row, int64_t rows, int64_t inner, int64_t last, bool adds) {
  int64_t i = tiles<PAIRS, ROWS, C>(0, a, b, out, out_row, rows, inner, last, adds);
  i = tiles<PAIRS, 2, C>(i, a, b, out, out_row, rows, inner, last, adds);
  tiles<PAIRS, 1, C>(i, a, b, out, out_row, rows, inner, last, adds);
}

// Computes all rows of a panel of at most WIDTH columns.
template <bool PAIRS>
void multiply(
    Matrix a, Matrix b, float* out, int64_t out_row, int64_t rows, int64_t inner, int64_t columns, bool adds) {
  int64_t vectors = (columns + LANES - 1) / LANES, last = columns - (vectors - 1) * LANES;
  switch (vectors) {
    case 1: return panel<PAIRS, 1>(a, b, out, out_row, rows, inner, last, adds);
    case 2: return panel<PAIRS, 2>(a, b, out, out_row, rows, inner, last, adds);
    case 3: return panel<PAIRS, std::min(3, COLUMNS)>(a, b, out, out_row, rows, inner, last, adds);
    default: return panel<PAIRS, COLUMNS>(a, b, out, out_row, rows, inner, last, adds);
  }
}

int64_t whole_vectors(int64_t numbers) { return (numbers + LANES - 1) / LANES * LANES; }

// Copies `from` to contiguous `[rows, padded]`, with zeros beyond its columns. `padded` is a multiple of LANES.
void pack(Matrix from, float* to, int64_t rows, int64_t columns, int64_t padded) {
  for (int64_t j = 0; j < padded; j += LANES) {
    const float* first = from.data + j * from.column;
    int64_t k = 0, lanes = std::min(columns - j, LANES);
    if (from.column == 1 && lanes == LANES) {
      for (; k < rows; ++k) Vec::loadu(first + k * from.row).store(to + k * padded + j);
    } else if (from.column == 1) {
      for (; k < rows; ++k) Vec::loadu(first + k * from.row, lanes).store(to + k * padded + j);
    } else if (from.row == 1 && lanes == LANES) {
      for (; k + LANES <= rows; k += LANES) {
        at::vec::transpose_mxn<float, LANES, LANES>(first + k, from.column, to + k * padded + j, padded);
      }
    }
    for (; k < rows; ++k) {
      float* row = to + k * padded + j;
      Vec(0.0f).store(row);
      for (int64_t i = 0; i < lanes; ++i) row[i] = first[k * from.row + i * from.column];
    }
  }
}

// Strides in numbers.
struct Halves {
  const uint16_t* data;
  int64_t row, column;
};

// Copies rows 2 k and 2 k + 1 of `from` as pairs in row k, `[ceil(rows / 2), padded]`, with zeros beyond its rows.
void pack_pairs(Halves from, float* to, int64_t rows, int64_t columns, int64_t padded) {
  if (from.row == 1 && from.column % 2 == 0 && rows % 2 == 0) {  // already pairs in memory
    return pack({reinterpret_cast<const float*>(from.data), 1, from.column / 2}, to, rows / 2, columns, padded);
  }
  for (int64_t k = 0; k < rows; k += 2, to += padded) {
    const uint16_t *low = from.data + k * from.row, *high = low + from.row;
    bool has_high = k + 1 < rows;
    int64_t j = 0;
#ifdef MULTIPLIES_BFLOAT16
    if (from.column == 1 && has_high) {
      for (; j + LANES <= columns; j += LANES) {
        __m512i first = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(low + j)));
        __m512i second = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(high + j)));
        _mm512_storeu_si512(to + j, _mm512_or_si512(first, _mm512_slli_epi32(second, 16)));
      }
    }
#endif
    for (; j < padded; ++j) {
      uint16_t pair[2]{};
      if (j < columns) pair[0] = low[j * from.column];
      if (j < columns && has_high) pair[1] = high[j * from.column];
      std::memcpy(to + j, pair, sizeof(pair));
    }
  }
}

// `[M, K] x [K, N]`, or `[E, M, K] x [E, K, N]`.
template <bool PAIRS>
Tensor product(const Tensor& left, const Tensor& right) {
  auto size = left.sizes(), of_left = left.strides(), of_right = right.strides();
  int64_t m = left.dim() - 2;  // where the matrix begins among the dimensions
  int64_t members = m ? size[0] : 1, rows = size[m], inner = size[m + 1], columns = right.size(m + 1);
  int64_t shape[]{members, rows, columns}, strides[]{rows * columns, columns, 1};
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      m + 2, shape + 1 - m, strides + 1 - m, aoti_torch_dtype_float32(), aoti_torch_device_type_cpu(), 0, &handle));
  Tensor out(handle);
  float* result = out.mutable_data_ptr<float>();

  int64_t a_member = of_left[0], depth = PAIRS ? (inner + 1) / 2 : inner;  // in words from here
  Matrix a{static_cast<const float*>(left.const_data_ptr()), of_left[m], of_left[m + 1]};
  std::unique_ptr<float[]> pairs;
  if (PAIRS && a.column == 1 && a.row % 2 == 0 && a_member % 2 == 0 && inner % 2 == 0) {  // already pairs in memory
    a.row /= 2, a_member /= 2;
  } else if (PAIRS) {
    auto* numbers = static_cast<const uint16_t*>(left.const_data_ptr());
    int64_t padded = whole_vectors(rows);
    pairs.reset(new float[members * depth * padded]);
    for (int64_t e = 0; e < members; ++e) {
      pack_pairs({numbers + e * a_member, a.column, a.row}, pairs.get() + e * depth * padded, inner, rows, padded);
    }
    a = {pairs.get(), 1, padded}, a_member = depth * padded;
  }

  bool copies = a.row == 1 && a.column >= FAR;
  int64_t group = copies ? GROUP : WIDTH, groups = (columns + group - 1) / group, parts = 1;  // of the rows
  int64_t work = members * rows * inner * columns, threads = 1;
#ifdef _OPENMP
  threads = omp_get_max_threads();
#endif
  auto& pool = alfish::ThreadPool::instance();
  bool shares = threads > 1 && work >= WORTH_THREADS;
  bool helped = threads == 1 && work >= WORTH_HELPERS && pool.has_helpers();
  if (shares && members * groups < threads) parts = threads;
  if (helped) parts = TASKS / (members * groups);
  parts = std::clamp<int64_t>(parts, 1, rows / LEAST_HEIGHT + 1);
  int64_t height = (rows + parts - 1) / parts, tasks = members * groups * parts;

  // Returns a panel's part of b: `deep` words from k on, of `wide` columns from j on. Copies it to `to` if need be.
  auto part_of_b = [&](int64_t e, int64_t k, int64_t j, int64_t deep, int64_t wide, int64_t tall, float* to) {
    int64_t padded = whole_vectors(wide), offset = e * of_right[0] + j * of_right[m + 1];
    if constexpr (PAIRS) {
      auto* numbers = static_cast<const uint16_t*>(right.const_data_ptr());
      Halves from{numbers + offset + 2 * k * of_right[m], of_right[m], of_right[m + 1]};
      pack_pairs(from, to, std::min(inner - 2 * k, 2 * DEPTH), wide, padded);
    } else {
      auto* numbers = static_cast<const float*>(right.const_data_ptr());
      Matrix from{numbers + offset + k * of_right[m], of_right[m], of_right[m + 1]};
      if (from.column == 1 && wide == padded && (from.row < FAR || tall < 2 * HEIGHT)) return from;
      pack(from, to, deep, wide, padded);
    }
    return Matrix{to, padded, 1};
  };
  auto run = [&](int64_t task) {
    alignas(64) float copy_of_a[HEIGHT * DEPTH], copies_of_b[GROUP * DEPTH];
    Matrix of_b[GROUP / WIDTH];
    int64_t e = task / (groups * parts), i = task % parts * height, j = task / parts % groups * group;
    int64_t tall = std::min(rows - i, height), wide = std::min(columns - j, group);
    float* to = result + (e * rows + i) * columns + j;
    for (int64_t k = 0; k == 0 || k < depth; k += DEPTH) {
      int64_t deep = std::min(depth - k, DEPTH), step = copies ? HEIGHT : std::max<int64_t>(tall, 1);
      for (int64_t c = 0; c < wide; c += WIDTH) {
        of_b[c / WIDTH] = part_of_b(e, k, j + c, deep, std::min(wide - c, WIDTH), tall, copies_of_b + c * DEPTH);
      }
      for (int64_t r = 0; r < tall; r += step) {
        int64_t high = std::min(tall - r, step), padded = whole_vectors(deep);
        Matrix of_a{a.data + e * a_member + (i + r) * a.row + k * a.column, a.row, a.column};
        if (copies) {
          pack(of_a, copy_of_a, high, deep, padded);
          of_a = {copy_of_a, padded, 1};
        }
        for (int64_t c = 0; c < wide; c += WIDTH) {
          float* out_panel = to + r * columns + c;
          multiply<PAIRS>(of_a, of_b[c / WIDTH], out_panel, columns, high, deep, std::min(wide - c, WIDTH), k > 0);
        }
      }
    }
  };
#ifdef _OPENMP
  if (shares) {
    #pragma omp parallel for
    for (int64_t task = 0; task < tasks; ++task) run(task);
    return out;
  }
#endif
  if (helped) {
    pool.run(tasks, work, run);
    return out;
  }
  for (int64_t task = 0; task < tasks; ++task) run(task);  // OpenMP with one thread takes as long as a small product
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(alfish, CPU, library) {
  library.impl("product", TORCH_BOX(&product<false>));
#ifdef MULTIPLIES_BFLOAT16
  library.impl("bfloat16_product", TORCH_BOX(&product<true>));
#endif
}
