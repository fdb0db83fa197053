// The kernels for AVX-512 (F, BW, VL, DQ): 32 elements at a time, a whole register of 16-bit words.
//
// The conversion instructions of AVX512_BF16 are not used: they treat denormals as zero.
#include <immintrin.h>

#include "kernels.h"

namespace penstock {
namespace {

using std::size_t;

struct V {
  static constexpr size_t width = 32;
  using Half = __m512i;
  __m512 a, b;

  static V splat(float value) { return {_mm512_set1_ps(value), _mm512_set1_ps(value)}; }
  static V load(const float* from) { return {_mm512_loadu_ps(from), _mm512_loadu_ps(from + 16)}; }
  static void store(float* to, V x) {
    _mm512_storeu_ps(to, x.a);
    _mm512_storeu_ps(to + 16, x.b);
  }
  static Half load_half(const unsigned short* from) { return _mm512_loadu_si512(from); }
  static void store_half(unsigned short* to, Half half) { _mm512_storeu_si512(to, half); }

  static V sqrt(V x) { return {_mm512_sqrt_ps(x.a), _mm512_sqrt_ps(x.b)}; }
  static V fma(V x, V y, V z) { return {_mm512_fmadd_ps(x.a, y.a, z.a), _mm512_fmadd_ps(x.b, y.b, z.b)}; }
  friend V operator+(V x, V y) { return {_mm512_add_ps(x.a, y.a), _mm512_add_ps(x.b, y.b)}; }
  friend V operator-(V x, V y) { return {_mm512_sub_ps(x.a, y.a), _mm512_sub_ps(x.b, y.b)}; }
  friend V operator*(V x, V y) { return {_mm512_mul_ps(x.a, y.a), _mm512_mul_ps(x.b, y.b)}; }
  friend V operator/(V x, V y) { return {_mm512_div_ps(x.a, y.a), _mm512_div_ps(x.b, y.b)}; }

  static V from_bf16(Half half) { return interleave(_mm512_setzero_si512(), half); }
  static Half to_bf16(V x) { return high_words(quiet(x.a, round_even(x.a)), quiet(x.b, round_even(x.b))); }
  static V from_fp16(Half half) {
    return {_mm512_cvtph_ps(_mm512_castsi512_si256(half)), _mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1))};
  }
  static Half to_fp16(V x) {
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtps_ph(x.a, nearest)), _mm512_cvtps_ph(x.b, nearest), 1);
  }

  // Flipping the remainder's sign bit adds 0x8000 and makes it unsigned; one subtraction from the whole takes that back.
  static V join(Half high, Half low) {
    const __m512i half = _mm512_set1_epi32(0x8000);
    const V x = interleave(_mm512_xor_si512(low, _mm512_set1_epi16(short(0x8000))), high);
    return {_mm512_castsi512_ps(_mm512_sub_epi32(bits(x.a), half)),
            _mm512_castsi512_ps(_mm512_sub_epi32(bits(x.b), half))};
  }
  static void split(V x, Half& high, Half& low) {
    const __m512i half = _mm512_set1_epi32(0x8000);
    high = high_words(quiet(x.a, _mm512_add_epi32(bits(x.a), half)), quiet(x.b, _mm512_add_epi32(bits(x.b), half)));
    low = _mm512_permutex2var_epi16(_mm512_maskz_mov_epi32(~nans(x.a), bits(x.a)), even_words(),
                                    _mm512_maskz_mov_epi32(~nans(x.b), bits(x.b)));
  }

  struct Wide {
    __m512d parts[4];
    static Wide add_squares(Wide sum, V x) {
      return {square(sum.parts[0], _mm512_castps512_ps256(x.a)), square(sum.parts[1], _mm512_extractf32x8_ps(x.a, 1)),
              square(sum.parts[2], _mm512_castps512_ps256(x.b)), square(sum.parts[3], _mm512_extractf32x8_ps(x.b, 1))};
    }
    static void store(double* to, Wide wide) {
      for (int i = 0; i < 4; ++i) _mm512_storeu_pd(to + 8 * i, wide.parts[i]);
    }

   private:
    // The square is exact in fp64, so that fusing it with the addition changes nothing.
    static __m512d square(__m512d sum, __m256 x) {
      const __m512d wide = _mm512_cvtps_pd(x);
      return _mm512_fmadd_pd(wide, wide, sum);
    }
  };

 private:
  static __m512i bits(__m512 x) { return _mm512_castps_si512(x); }
  static __mmask16 nans(__m512 x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
  static __m512i round_even(__m512 x) {
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits(x), 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(bits(x), _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  }
  // `rounded`, or the bits of a quiet NaN where the value is one: rounding could carry a NaN into -0.
  static __m512i quiet(__m512 x, __m512i rounded) {
    return _mm512_mask_or_epi32(rounded, nans(x), bits(x), _mm512_set1_epi32(0x400000));
  }
  static __m512i even_words() {
    return _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32, 30, 28, 26, 24, 22, 20, 18,
                            16, 14, 12, 10, 8, 6, 4, 2, 0);
  }
  static Half high_words(__m512i a, __m512i b) {
    return _mm512_permutex2var_epi16(a, _mm512_add_epi16(even_words(), _mm512_set1_epi16(1)), b);
  }
  // The floats whose low and high words these are.
  static V interleave(Half low, Half high) {
    const __m512i first = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                                           37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
    return {_mm512_castsi512_ps(_mm512_permutex2var_epi16(low, first, high)),
            _mm512_castsi512_ps(_mm512_permutex2var_epi16(low, second, high))};
  }
};

#include "kernels_impl.h"

}  // namespace

const Kernels kernels_avx512 = make_kernels("avx512");

}  // namespace penstock
