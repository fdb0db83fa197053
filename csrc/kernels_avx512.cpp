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

  struct U {
    __m512i a, b;
    static U splat(unsigned value) { return {_mm512_set1_epi32(int(value)), _mm512_set1_epi32(int(value))}; }
    static U count() {
      const __m512i a = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
      return {a, _mm512_add_epi32(a, _mm512_set1_epi32(16))};
    }
    static U load(const unsigned* from) { return {_mm512_loadu_si512(from), _mm512_loadu_si512(from + 16)}; }
    static void store(unsigned* to, U x) {
      _mm512_storeu_si512(to, x.a);
      _mm512_storeu_si512(to + 16, x.b);
    }
    static U load_bytes(const unsigned char* from) {
      return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))),
              _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 16)))};
    }
    static void store_bytes(unsigned char* to, U x) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(x.a));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 16), _mm512_cvtepi32_epi8(x.b));
    }
    static U bits(V x) { return {V::bits(x.a), V::bits(x.b)}; }
    static V float_of(U x) { return {_mm512_castsi512_ps(x.a), _mm512_castsi512_ps(x.b)}; }
    static V to_floats(U x) { return {_mm512_cvtepi32_ps(x.a), _mm512_cvtepi32_ps(x.b)}; }
    static U truncate(V x) { return {_mm512_cvttps_epi32(x.a), _mm512_cvttps_epi32(x.b)}; }
    static U larger(U x, U y) { return {_mm512_max_epu32(x.a, y.a), _mm512_max_epu32(x.b, y.b)}; }
    U shifted(U by) const { return {_mm512_srlv_epi32(a, by.a), _mm512_srlv_epi32(b, by.b)}; }
    friend U operator+(U x, U y) { return {_mm512_add_epi32(x.a, y.a), _mm512_add_epi32(x.b, y.b)}; }
    friend U operator-(U x, U y) { return {_mm512_sub_epi32(x.a, y.a), _mm512_sub_epi32(x.b, y.b)}; }
    friend U operator*(U x, U y) { return {_mm512_mullo_epi32(x.a, y.a), _mm512_mullo_epi32(x.b, y.b)}; }
    friend U operator&(U x, U y) { return {_mm512_and_si512(x.a, y.a), _mm512_and_si512(x.b, y.b)}; }
    friend U operator|(U x, U y) { return {_mm512_or_si512(x.a, y.a), _mm512_or_si512(x.b, y.b)}; }
    friend U operator^(U x, U y) { return {_mm512_xor_si512(x.a, y.a), _mm512_xor_si512(x.b, y.b)}; }
    friend U operator<<(U x, int by) { return {_mm512_slli_epi32(x.a, unsigned(by)), _mm512_slli_epi32(x.b, unsigned(by))}; }
    friend U operator>>(U x, int by) { return {_mm512_srli_epi32(x.a, unsigned(by)), _mm512_srli_epi32(x.b, unsigned(by))}; }
  };
  // The instruction gives its second operand where either is a NaN.
  static V larger(V x, V y) {
    return {_mm512_mask_mov_ps(_mm512_max_ps(x.a, y.a), nans(x.a), x.a),
            _mm512_mask_mov_ps(_mm512_max_ps(x.b, y.b), nans(x.b), x.b)};
  }
  static V sign(V x) { return {sign(x.a), sign(x.b)}; }
  static U one_more_unless_less(U n, V x, V y) {
    const __m512i one = _mm512_set1_epi32(1);
    return {_mm512_mask_add_epi32(n.a, _mm512_cmp_ps_mask(x.a, y.a, _CMP_NLT_UQ), n.a, one),
            _mm512_mask_add_epi32(n.b, _mm512_cmp_ps_mask(x.b, y.b, _CMP_NLT_UQ), n.b, one)};
  }
  static U if_less(V x, V y, U yes, U no) {
    return {_mm512_mask_mov_epi32(no.a, _mm512_cmp_ps_mask(x.a, y.a, _CMP_LT_OQ), yes.a),
            _mm512_mask_mov_epi32(no.b, _mm512_cmp_ps_mask(x.b, y.b, _CMP_LT_OQ), yes.b)};
  }
  static V if_zero(U what, V yes, V no) {
    return {_mm512_mask_mov_ps(no.a, _mm512_testn_epi32_mask(what.a, what.a), yes.a),
            _mm512_mask_mov_ps(no.b, _mm512_testn_epi32_mask(what.b, what.b), yes.b)};
  }
  static V lookup(const float* table, U index) {
    const __m512 entries = _mm512_broadcast_f32x8(_mm256_load_ps(table));
    return {_mm512_permutexvar_ps(index.a, entries), _mm512_permutexvar_ps(index.b, entries)};
  }
  static V clamp(V x, float least, float most) {
    const __m512 low = _mm512_set1_ps(least), high = _mm512_set1_ps(most);
    return {_mm512_min_ps(_mm512_max_ps(x.a, low), high), _mm512_min_ps(_mm512_max_ps(x.b, low), high)};
  }
  static Half to_bf16_up(V x, U added) {
    return high_words(quiet(x.a, _mm512_add_epi32(bits(x.a), added.a)), quiet(x.b, _mm512_add_epi32(bits(x.b), added.b)));
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
  static __m512 sign(__m512 x) {
    const __m512 zero = _mm512_setzero_ps();
    const __m512 positive = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, zero, _CMP_GT_OQ), _mm512_set1_ps(1.0f));
    return _mm512_mask_mov_ps(positive, _mm512_cmp_ps_mask(x, zero, _CMP_LT_OQ), _mm512_set1_ps(-1.0f));
  }
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
