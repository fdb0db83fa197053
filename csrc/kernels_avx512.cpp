// The kernels for AVX-512 (F, BW, VL, DQ).
//
// The conversion instructions of AVX512_BF16 are not used: they treat denormals as zero.
#include <immintrin.h>

#include "kernels.h"

namespace penstock {
namespace {

using std::size_t;

struct V {
  static constexpr size_t width = 16;
  using Half = __m256i;
  __m512 v;

  static V splat(float value) { return {_mm512_set1_ps(value)}; }
  static V load(const float* from) { return {_mm512_loadu_ps(from)}; }
  static void store(float* to, V value) { _mm512_storeu_ps(to, value.v); }
  static Half load_half(const unsigned short* from) { return _mm256_loadu_si256(reinterpret_cast<const Half*>(from)); }
  static void store_half(unsigned short* to, Half half) { _mm256_storeu_si256(reinterpret_cast<Half*>(to), half); }

  static V sqrt(V a) { return {_mm512_sqrt_ps(a.v)}; }
  static V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
  friend V operator+(V a, V b) { return {_mm512_add_ps(a.v, b.v)}; }
  friend V operator-(V a, V b) { return {_mm512_sub_ps(a.v, b.v)}; }
  friend V operator*(V a, V b) { return {_mm512_mul_ps(a.v, b.v)}; }
  friend V operator/(V a, V b) { return {_mm512_div_ps(a.v, b.v)}; }

  static V from_bf16(Half half) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
  }
  static Half to_bf16(V value) {
    const __m512i bits = _mm512_castps_si512(value.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    return quiet_high(value, bits, rounded);
  }
  static V from_fp16(Half half) { return {_mm512_cvtph_ps(half)}; }
  static Half to_fp16(V value) { return _mm512_cvtps_ph(value.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

  static V join(Half high, Half low) {
    const __m512i top = _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16);
    return {_mm512_castsi512_ps(_mm512_add_epi32(top, _mm512_cvtepi16_epi32(low)))};
  }
  static void split(V value, Half& high, Half& low) {
    const __m512i bits = _mm512_castps_si512(value.v);
    const __mmask16 number = _mm512_cmp_ps_mask(value.v, value.v, _CMP_ORD_Q);
    high = quiet_high(value, bits, _mm512_add_epi32(bits, _mm512_set1_epi32(0x8000)));
    low = _mm512_cvtepi32_epi16(_mm512_maskz_mov_epi32(number, bits));
  }

  struct Wide {
    __m512d low, high;
    static Wide squares(V value) {
      const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(value.v));
      const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(value.v, 1));
      return {_mm512_mul_pd(low, low), _mm512_mul_pd(high, high)};
    }
    static void store(double* to, Wide wide) {
      _mm512_storeu_pd(to, wide.low);
      _mm512_storeu_pd(to + 8, wide.high);
    }
    friend Wide operator+(Wide a, Wide b) { return {_mm512_add_pd(a.low, b.low), _mm512_add_pd(a.high, b.high)}; }
  };

 private:
  // The high halves of `rounded`, or of a quiet NaN where the value is one: rounding could carry a NaN into -0.
  static Half quiet_high(V value, __m512i bits, __m512i rounded) {
    const __mmask16 nan = _mm512_cmp_ps_mask(value.v, value.v, _CMP_UNORD_Q);
    const __m512i kept = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
  }
};

#include "kernels_impl.h"

}  // namespace

const Kernels kernels_avx512 = make_kernels("avx512");

}  // namespace penstock
