// The kernels for AVX2 with FMA and F16C.
#include <immintrin.h>

#include "kernels.h"

namespace penstock {
namespace {

using std::size_t;

struct V {
  static constexpr size_t width = 8;
  using Half = __m128i;
  __m256 v;

  static V splat(float value) { return {_mm256_set1_ps(value)}; }
  static V load(const float* from) { return {_mm256_loadu_ps(from)}; }
  static void store(float* to, V value) { _mm256_storeu_ps(to, value.v); }
  static Half load_half(const unsigned short* from) { return _mm_loadu_si128(reinterpret_cast<const Half*>(from)); }
  static void store_half(unsigned short* to, Half half) { _mm_storeu_si128(reinterpret_cast<Half*>(to), half); }

  static V sqrt(V a) { return {_mm256_sqrt_ps(a.v)}; }
  static V fma(V a, V b, V c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
  friend V operator+(V a, V b) { return {_mm256_add_ps(a.v, b.v)}; }
  friend V operator-(V a, V b) { return {_mm256_sub_ps(a.v, b.v)}; }
  friend V operator*(V a, V b) { return {_mm256_mul_ps(a.v, b.v)}; }
  friend V operator/(V a, V b) { return {_mm256_div_ps(a.v, b.v)}; }

  static V from_bf16(Half half) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16))};
  }
  static Half to_bf16(V value) {
    const __m256i bits = _mm256_castps_si256(value.v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    return quiet_high(value, bits, rounded);
  }
  static V from_fp16(Half half) { return {_mm256_cvtph_ps(half)}; }
  static Half to_fp16(V value) { return _mm256_cvtps_ph(value.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

  static V join(Half high, Half low) {
    const __m256i top = _mm256_slli_epi32(_mm256_cvtepu16_epi32(high), 16);
    return {_mm256_castsi256_ps(_mm256_add_epi32(top, _mm256_cvtepi16_epi32(low)))};
  }
  static void split(V value, Half& high, Half& low) {
    const __m256i bits = _mm256_castps_si256(value.v);
    const __m256i number = _mm256_castps_si256(_mm256_cmp_ps(value.v, value.v, _CMP_ORD_Q));
    high = quiet_high(value, bits, _mm256_add_epi32(bits, _mm256_set1_epi32(0x8000)));
    low = narrow(_mm256_and_si256(_mm256_and_si256(bits, number), _mm256_set1_epi32(0xFFFF)));
  }

  struct Wide {
    __m256d low, high;
    static Wide squares(V value) {
      const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(value.v));
      const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(value.v, 1));
      return {_mm256_mul_pd(low, low), _mm256_mul_pd(high, high)};
    }
    static void store(double* to, Wide wide) {
      _mm256_storeu_pd(to, wide.low);
      _mm256_storeu_pd(to + 4, wide.high);
    }
    friend Wide operator+(Wide a, Wide b) { return {_mm256_add_pd(a.low, b.low), _mm256_add_pd(a.high, b.high)}; }
  };

 private:
  // 32-bit words below 2^16 as 16-bit words.
  static Half narrow(__m256i words) {
    const __m256i pairs = _mm256_packus_epi32(words, words);
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(pairs, 0b1000));
  }
  // The high halves of `rounded`, or of a quiet NaN where the value is one: rounding could carry a NaN into -0.
  static Half quiet_high(V value, __m256i bits, __m256i rounded) {
    const __m256 nan = _mm256_cmp_ps(value.v, value.v, _CMP_UNORD_Q);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256 kept = _mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet), nan);
    return narrow(_mm256_srli_epi32(_mm256_castps_si256(kept), 16));
  }
};

#include "kernels_impl.h"

}  // namespace

const Kernels kernels_avx2 = make_kernels("avx2");

}  // namespace penstock
