// The kernels for AVX2 with FMA and F16C: 16 elements at a time, a whole register of 16-bit words.
#include <immintrin.h>

#include "kernels.h"

namespace penstock {
namespace {

using std::size_t;

struct V {
  static constexpr size_t width = 16;
  using Half = __m256i;
  __m256 a, b;

  static V splat(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
  static V load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
  static void store(float* to, V x) {
    _mm256_storeu_ps(to, x.a);
    _mm256_storeu_ps(to + 8, x.b);
  }
  static Half load_half(const unsigned short* from) { return _mm256_loadu_si256(reinterpret_cast<const Half*>(from)); }
  static void store_half(unsigned short* to, Half half) { _mm256_storeu_si256(reinterpret_cast<Half*>(to), half); }

  static V sqrt(V x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
  static V fma(V x, V y, V z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
  friend V operator+(V x, V y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
  friend V operator-(V x, V y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
  friend V operator*(V x, V y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
  friend V operator/(V x, V y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }

  static V from_bf16(Half half) { return interleave(_mm256_setzero_si256(), half); }
  static Half to_bf16(V x) { return high_words(quiet(x.a, round_even(x.a)), quiet(x.b, round_even(x.b))); }
  static V from_fp16(Half half) {
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(half)), _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1))};
  }
  static Half to_fp16(V x) {
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return _mm256_set_m128i(_mm256_cvtps_ph(x.b, nearest), _mm256_cvtps_ph(x.a, nearest));
  }

  // Flipping the remainder's sign bit adds 0x8000 and makes it unsigned; one subtraction from the whole takes that back.
  static V join(Half high, Half low) {
    const __m256i half = _mm256_set1_epi32(0x8000);
    const V x = interleave(_mm256_xor_si256(low, _mm256_set1_epi16(short(0x8000))), high);
    return {_mm256_castsi256_ps(_mm256_sub_epi32(bits(x.a), half)),
            _mm256_castsi256_ps(_mm256_sub_epi32(bits(x.b), half))};
  }
  static void split(V x, Half& high, Half& low) {
    const __m256i half = _mm256_set1_epi32(0x8000);
    high = high_words(quiet(x.a, _mm256_add_epi32(bits(x.a), half)), quiet(x.b, _mm256_add_epi32(bits(x.b), half)));
    low = pack(low_word_of_number(x.a), low_word_of_number(x.b));
  }

  struct U {
    __m256i a, b;
    static U splat(unsigned value) { return {_mm256_set1_epi32(int(value)), _mm256_set1_epi32(int(value))}; }
    static U count() {
      return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
    }
    static U load(const unsigned* from) {
      return {_mm256_loadu_si256(reinterpret_cast<const Half*>(from)),
              _mm256_loadu_si256(reinterpret_cast<const Half*>(from + 8))};
    }
    static void store(unsigned* to, U x) {
      _mm256_storeu_si256(reinterpret_cast<Half*>(to), x.a);
      _mm256_storeu_si256(reinterpret_cast<Half*>(to + 8), x.b);
    }
    static U load_bytes(const unsigned char* from) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
      return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
    }
    static void store_bytes(unsigned char* to, U x) {
      const Half words = pack(x.a, x.b);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                       _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
    }
    static U bits(V x) { return {V::bits(x.a), V::bits(x.b)}; }
    static V float_of(U x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
    static V to_floats(U x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
    static U truncate(V x) { return {_mm256_cvttps_epi32(x.a), _mm256_cvttps_epi32(x.b)}; }
    static U larger(U x, U y) { return {_mm256_max_epu32(x.a, y.a), _mm256_max_epu32(x.b, y.b)}; }
    U shifted(U by) const { return {_mm256_srlv_epi32(a, by.a), _mm256_srlv_epi32(b, by.b)}; }
    friend U operator+(U x, U y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
    friend U operator-(U x, U y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
    friend U operator*(U x, U y) { return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; }
    friend U operator&(U x, U y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
    friend U operator|(U x, U y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
    friend U operator^(U x, U y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
    friend U operator<<(U x, int by) { return {_mm256_slli_epi32(x.a, unsigned(by)), _mm256_slli_epi32(x.b, unsigned(by))}; }
    friend U operator>>(U x, int by) { return {_mm256_srli_epi32(x.a, unsigned(by)), _mm256_srli_epi32(x.b, unsigned(by))}; }
  };
  // The instruction gives its second operand where either is a NaN.
  static V larger(V x, V y) { return {larger(x.a, y.a), larger(x.b, y.b)}; }
  static V sign(V x) { return {sign(x.a), sign(x.b)}; }
  static U one_more_unless_less(U n, V x, V y) {
    return {_mm256_sub_epi32(n.a, bits(_mm256_cmp_ps(x.a, y.a, _CMP_NLT_UQ))),
            _mm256_sub_epi32(n.b, bits(_mm256_cmp_ps(x.b, y.b, _CMP_NLT_UQ)))};
  }
  static U if_less(V x, V y, U yes, U no) {
    return {_mm256_blendv_epi8(no.a, yes.a, bits(_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ))),
            _mm256_blendv_epi8(no.b, yes.b, bits(_mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)))};
  }
  static V if_zero(U what, V yes, V no) {
    const __m256i zero = _mm256_setzero_si256();
    return {_mm256_blendv_ps(no.a, yes.a, _mm256_castsi256_ps(_mm256_cmpeq_epi32(what.a, zero))),
            _mm256_blendv_ps(no.b, yes.b, _mm256_castsi256_ps(_mm256_cmpeq_epi32(what.b, zero)))};
  }
  static V lookup(const float* table, U index) {
    const __m256 entries = _mm256_load_ps(table);
    return {_mm256_permutevar8x32_ps(entries, index.a), _mm256_permutevar8x32_ps(entries, index.b)};
  }
  static V clamp(V x, float least, float most) {
    const __m256 low = _mm256_set1_ps(least), high = _mm256_set1_ps(most);
    return {_mm256_min_ps(_mm256_max_ps(x.a, low), high), _mm256_min_ps(_mm256_max_ps(x.b, low), high)};
  }
  static Half to_bf16_up(V x, U added) {
    return high_words(quiet(x.a, _mm256_add_epi32(bits(x.a), added.a)), quiet(x.b, _mm256_add_epi32(bits(x.b), added.b)));
  }

  struct Wide {
    __m256d parts[4];
    static Wide add_squares(Wide sum, V x) {
      return {square(sum.parts[0], _mm256_castps256_ps128(x.a)), square(sum.parts[1], _mm256_extractf128_ps(x.a, 1)),
              square(sum.parts[2], _mm256_castps256_ps128(x.b)), square(sum.parts[3], _mm256_extractf128_ps(x.b, 1))};
    }
    static void store(double* to, Wide wide) {
      for (int i = 0; i < 4; ++i) _mm256_storeu_pd(to + 4 * i, wide.parts[i]);
    }

   private:
    // The square is exact in fp64, so that fusing it with the addition changes nothing.
    static __m256d square(__m256d sum, __m128 x) {
      const __m256d wide = _mm256_cvtps_pd(x);
      return _mm256_fmadd_pd(wide, wide, sum);
    }
  };

 private:
  static __m256 larger(__m256 x, __m256 y) {
    return _mm256_blendv_ps(_mm256_max_ps(x, y), x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  }
  static __m256 sign(__m256 x) {
    const __m256 zero = _mm256_setzero_ps(), one = _mm256_set1_ps(1.0f);
    return _mm256_sub_ps(_mm256_and_ps(_mm256_cmp_ps(x, zero, _CMP_GT_OQ), one),
                         _mm256_and_ps(_mm256_cmp_ps(x, zero, _CMP_LT_OQ), one));
  }
  static __m256i bits(__m256 x) { return _mm256_castps_si256(x); }
  static __m256i round_even(__m256 x) {
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits(x), 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(bits(x), _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
  }
  // `rounded`, or the bits of a quiet NaN where the value is one: rounding could carry a NaN into -0.
  static __m256i quiet(__m256 x, __m256i rounded) {
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, _mm256_or_si256(bits(x), _mm256_set1_epi32(0x400000)), nan);
  }
  static __m256i low_word_of_number(__m256 x) {
    const __m256i number = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_ORD_Q));
    return _mm256_and_si256(_mm256_and_si256(bits(x), number), _mm256_set1_epi32(0xFFFF));
  }
  static Half high_words(__m256i a, __m256i b) { return pack(_mm256_srli_epi32(a, 16), _mm256_srli_epi32(b, 16)); }
  // 32-bit words below 2^16 as 16-bit words. Packing works within halves of a register; the permutation undoes that.
  static Half pack(__m256i a, __m256i b) {
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), _MM_SHUFFLE(3, 1, 2, 0));
  }
  // The floats whose low and high words these are.
  static V interleave(Half low, Half high) {
    const __m256i l = _mm256_permute4x64_epi64(low, _MM_SHUFFLE(3, 1, 2, 0));
    const __m256i h = _mm256_permute4x64_epi64(high, _MM_SHUFFLE(3, 1, 2, 0));
    return {_mm256_castsi256_ps(_mm256_unpacklo_epi16(l, h)), _mm256_castsi256_ps(_mm256_unpackhi_epi16(l, h))};
  }
};

#include "kernels_impl.h"

}  // namespace

const Kernels kernels_avx2 = make_kernels("avx2");

}  // namespace penstock
