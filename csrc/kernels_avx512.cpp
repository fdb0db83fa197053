// The kernels for AVX-512 (F, BW, VL, DQ): 32 elements at a time, a whole register of 16-bit words.
//
// A vector holds the even elements in one register and the odd ones in the other: then a 16-bit word becomes the fp32
// value in its place by one shift or mask. Only fp32 and fp16 arrays need permutations.
//
// The conversion instructions of AVX512_BF16 are not used: they treat denormals as zero.
#include <immintrin.h>

#include "kernels.h"

namespace penstock {
namespace {

using std::size_t;

struct V {
  static constexpr size_t width = 32;
  static constexpr bool knows_e4m3 = false;
  using Half = __m512i;
  __m512 a, b;

  static V splat(float value) { return {_mm512_set1_ps(value), _mm512_set1_ps(value)}; }
  static V load(const float* from) { return apart(_mm512_loadu_ps(from), _mm512_loadu_ps(from + 16)); }
  static void store(float* to, V x) {
    _mm512_storeu_ps(to, first(x));
    _mm512_storeu_ps(to + 16, second(x));
  }
  static void stream(float* to, V x) {
    _mm512_stream_ps(to, first(x));
    _mm512_stream_ps(to + 16, second(x));
  }
  static void end_stream() { _mm_sfence(); }
  static Half load_half(const unsigned short* from) { return _mm512_loadu_si512(from); }
  static void store_half(unsigned short* to, Half half) { _mm512_storeu_si512(to, half); }
  static void stream_half(unsigned short* to, Half half) { _mm512_stream_si512(reinterpret_cast<Half*>(to), half); }
  static Half larger_half(Half so_far, Half half) {
    return _mm512_max_epu16(so_far, _mm512_and_si512(half, _mm512_set1_epi16(0x7FFF)));
  }
  static unsigned short largest_half(Half half) {
    // There is an instruction for the smallest.
    const __m256i half_of_it = _mm256_max_epu16(_mm512_castsi512_si256(half), _mm512_extracti64x4_epi64(half, 1));
    const __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(half_of_it), _mm256_extracti128_si256(half_of_it, 1));
    return (unsigned short)~_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi32(-1))));
  }

  static V sqrt(V x) { return {_mm512_sqrt_ps(x.a), _mm512_sqrt_ps(x.b)}; }
  static V fma(V x, V y, V z) { return {_mm512_fmadd_ps(x.a, y.a, z.a), _mm512_fmadd_ps(x.b, y.b, z.b)}; }
  friend V operator+(V x, V y) { return {_mm512_add_ps(x.a, y.a), _mm512_add_ps(x.b, y.b)}; }
  friend V operator-(V x, V y) { return {_mm512_sub_ps(x.a, y.a), _mm512_sub_ps(x.b, y.b)}; }
  friend V operator*(V x, V y) { return {_mm512_mul_ps(x.a, y.a), _mm512_mul_ps(x.b, y.b)}; }
  friend V operator/(V x, V y) { return {_mm512_div_ps(x.a, y.a), _mm512_div_ps(x.b, y.b)}; }

  static V from_bf16(Half half) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(half, 16)), _mm512_castsi512_ps(_mm512_and_si512(half, high_mask()))};
  }
  static Half to_bf16(V x) { return high_words(plus<false>(x.a, to_even(x.a)), plus<false>(x.b, to_even(x.b))); }
  static V from_fp16(Half half) {
    return apart(_mm512_cvtph_ps(_mm512_castsi512_si256(half)), _mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1)));
  }
  static Half load_e4m3(const unsigned char* from) {
    const __m512i words = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    return _mm512_and_si512(_mm512_srai_epi16(_mm512_slli_epi16(words, 8), 1), _mm512_set1_epi16(short(0xBFFF)));
  }
  static Half to_fp16(V x) {
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtps_ph(first(x), nearest)),
                              _mm512_cvtps_ph(second(x), nearest), 1);
  }

  static V join(Half high, Half low) {
    const __m512i above = _mm512_add_epi16(high, _mm512_srai_epi16(low, 15));  // one less where the low word is negative
    return {_mm512_castsi512_ps(alternate(low, _mm512_slli_epi32(above, 16))),
            _mm512_castsi512_ps(alternate(_mm512_srli_epi32(low, 16), above))};
  }
  static void split(V x, Half& high, Half& low) {
    const __m512i half = _mm512_set1_epi32(0x8000);
    high = high_words(plus<true>(x.a, half), plus<true>(x.b, half));
    low = alternate(_mm512_maskz_mov_epi32(numbers(x.a), bits(x.a)), _mm512_maskz_slli_epi32(numbers(x.b), bits(x.b), 16));
  }

  struct U {
    __m512i a, b;
    static U splat(unsigned value) { return {_mm512_set1_epi32(int(value)), _mm512_set1_epi32(int(value))}; }
    static U count() {
      const __m512i a = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
      return {a, _mm512_add_epi32(a, _mm512_set1_epi32(1))};
    }
    static U load(const unsigned* from) { return {_mm512_loadu_si512(from), _mm512_loadu_si512(from + 16)}; }
    static void store(unsigned* to, U x) {
      _mm512_storeu_si512(to, x.a);
      _mm512_storeu_si512(to + 16, x.b);
    }
    static U load_bytes(const unsigned char* from) {
      const __m512i words = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
      return {_mm512_and_si512(words, _mm512_set1_epi32(0xFFFF)), _mm512_srli_epi32(words, 16)};
    }
    static U load_signed_bytes(const unsigned char* from) {
      const __m512i words = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
      return {_mm512_srai_epi32(_mm512_slli_epi32(words, 16), 16), _mm512_srai_epi32(words, 16)};
    }
    static void store_bytes(unsigned char* to, U x) {
      const __m512i words = alternate(x.a, _mm512_slli_epi32(x.b, 16));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi16_epi8(words));
    }
    static U bits(V x) { return {V::bits(x.a), V::bits(x.b)}; }
    static V float_of(U x) { return {_mm512_castsi512_ps(x.a), _mm512_castsi512_ps(x.b)}; }
    static V to_floats(U x) { return {_mm512_cvtepi32_ps(x.a), _mm512_cvtepi32_ps(x.b)}; }
    static U truncate(V x) { return {_mm512_cvttps_epi32(x.a), _mm512_cvttps_epi32(x.b)}; }
    static U larger(U x, U y) { return {_mm512_max_epu32(x.a, y.a), _mm512_max_epu32(x.b, y.b)}; }
    static U smaller(U x, U y) { return {_mm512_min_epu32(x.a, y.a), _mm512_min_epu32(x.b, y.b)}; }
    static unsigned largest(U x) { return _mm512_reduce_max_epu32(_mm512_max_epu32(x.a, x.b)); }
    static U shifted_signed(U x, int by) {
      return {_mm512_srai_epi32(x.a, unsigned(by)), _mm512_srai_epi32(x.b, unsigned(by))};
    }
    static U sum_unless(U what, U unless, U x, U y, U otherwise) {
      return {_mm512_mask_add_epi32(otherwise.a, _mm512_cmpneq_epi32_mask(what.a, unless.a), x.a, y.a),
              _mm512_mask_add_epi32(otherwise.b, _mm512_cmpneq_epi32_mask(what.b, unless.b), x.b, y.b)};
    }
    friend U operator+(U x, U y) { return {_mm512_add_epi32(x.a, y.a), _mm512_add_epi32(x.b, y.b)}; }
    friend U operator-(U x, U y) { return {_mm512_sub_epi32(x.a, y.a), _mm512_sub_epi32(x.b, y.b)}; }
    friend U operator*(U x, U y) { return {_mm512_mullo_epi32(x.a, y.a), _mm512_mullo_epi32(x.b, y.b)}; }
    friend U operator&(U x, U y) { return {_mm512_and_si512(x.a, y.a), _mm512_and_si512(x.b, y.b)}; }
    friend U operator|(U x, U y) { return {_mm512_or_si512(x.a, y.a), _mm512_or_si512(x.b, y.b)}; }
    friend U operator^(U x, U y) { return {_mm512_xor_si512(x.a, y.a), _mm512_xor_si512(x.b, y.b)}; }
    friend U operator<<(U x, int by) { return {_mm512_slli_epi32(x.a, unsigned(by)), _mm512_slli_epi32(x.b, unsigned(by))}; }
    friend U operator>>(U x, int by) { return {_mm512_srli_epi32(x.a, unsigned(by)), _mm512_srli_epi32(x.b, unsigned(by))}; }
  };
  // A float of 2^23 and more has ones in its lowest bits: with that exponent around it, a byte becomes a number by one
  // difference. Odd bytes stay where they are and are counted in 256ths. Signed ones lose their sign by their top bit.
  template <bool is_signed>
  static V load_middles(const unsigned char* from) {
    constexpr int flip = is_signed ? 0x80 : 0;
    constexpr int flip_masked = 0x6A;  // the first and the second, exclusive or the third
    const __m512i pairs = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    const __m512 even = _mm512_castsi512_ps(_mm512_ternarylogic_epi32(
        pairs, _mm512_set1_epi32(0xFF), _mm512_set1_epi32(0x4B000000 | flip), flip_masked));
    const __m512 odd = _mm512_castsi512_ps(_mm512_ternarylogic_epi32(
        pairs, _mm512_set1_epi32(0xFF00), _mm512_set1_epi32(0x4B000000 | flip << 8), flip_masked));
    return {is_signed ? _mm512_add_ps(_mm512_sub_ps(even, _mm512_set1_ps(0x1p23f + flip)), _mm512_set1_ps(0.5f))
                      : _mm512_sub_ps(even, _mm512_set1_ps(0x1p23f - 0.5f)),
            _mm512_fmadd_ps(odd, _mm512_set1_ps(0x1p-8f), _mm512_set1_ps(0.5f - flip - 0x1p15f))};
  }
  // A sum that is rounded down has the whole part in bits of its own: from the lowest of one register, from the ninth of the
  // other. Every magnitude is made larger by less than any lacks to a whole number: so -m, too, goes down to -1 - m.
  template <bool is_signed>
  static void store_codes(unsigned char* to, V x, float unit, V of) {
    constexpr int down = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
    if constexpr (is_signed) {
      constexpr int with_masked = 0xF8;  // the first, or the second where the third
      const __m512i sign = _mm512_set1_epi32(int(0x80000000u));
      x = {_mm512_castsi512_ps(_mm512_ternarylogic_epi32(bits(x.a), bits(of.a), sign, with_masked)),
           _mm512_castsi512_ps(_mm512_ternarylogic_epi32(bits(x.b), bits(of.b), sign, with_masked))};
    } else {
      const __m512i one = _mm512_castps_si512(_mm512_set1_ps(1 / unit));
      x = {at_least(one, x.a, of.a), at_least(one, x.b, of.b)};
    }
    const __m512 factor = _mm512_set1_ps(is_signed ? unit + unit * 0x1p-22f : unit);
    const __m512i low = bits(_mm512_fmadd_round_ps(x.a, factor, _mm512_set1_ps(0x1.8p23f), down));
    const __m512i high = bits(_mm512_fmadd_round_ps(x.b, factor, _mm512_set1_ps(0x1.8p15f), down));
    constexpr int second_where_masked = 0xD8;
    const __m512i pairs = _mm512_ternarylogic_epi32(low, high, _mm512_set1_epi32(0xFF00), second_where_masked);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(pairs));
  }
  // The instruction gives its second operand where either is a NaN.
  static V larger(V x, V y) {
    return {_mm512_mask_mov_ps(_mm512_max_ps(x.a, y.a), nans(x.a), x.a),
            _mm512_mask_mov_ps(_mm512_max_ps(x.b, y.b), nans(x.b), x.b)};
  }
  static V sign(V x) { return {sign(x.a), sign(x.b)}; }
  template <bool is_quiet>
  static Half to_bf16_up(V x, U added) { return high_words(plus<is_quiet>(x.a, added.a), plus<is_quiet>(x.b, added.b)); }

  struct Wide {
    __m512d parts[4];
    static Wide add_squares(Wide sum, V x) {
      return {square(sum.parts[0], _mm512_castps512_ps256(x.a)), square(sum.parts[1], _mm512_extractf32x8_ps(x.a, 1)),
              square(sum.parts[2], _mm512_castps512_ps256(x.b)), square(sum.parts[3], _mm512_extractf32x8_ps(x.b, 1))};
    }
    static Wide add(Wide sum, V x) {
      return {plus(sum.parts[0], _mm512_castps512_ps256(x.a)), plus(sum.parts[1], _mm512_extractf32x8_ps(x.a, 1)),
              plus(sum.parts[2], _mm512_castps512_ps256(x.b)), plus(sum.parts[3], _mm512_extractf32x8_ps(x.b, 1))};
    }
    static void store(double* to, Wide wide) {
      for (int i = 0; i < 32; ++i) to[i] = wide.parts[i % 2 * 2 + i / 16][i / 2 % 8];
    }

   private:
    static __m512d plus(__m512d sum, __m256 x) { return _mm512_add_pd(sum, _mm512_cvtps_pd(x)); }
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
  static __mmask16 numbers(__m512 x) { return _mm512_cmp_ps_mask(x, x, _CMP_ORD_Q); }
  // The bits of x, at least `least` where `of` is not 0.
  static __m512 at_least(__m512i least, __m512 x, __m512 of) {
    return _mm512_castsi512_ps(_mm512_mask_max_epu32(bits(x), _mm512_test_epi32_mask(bits(of), bits(of)), bits(x), least));
  }
  // What rounding to nearest even adds before the low half is cut off.
  static __m512i to_even(__m512 x) {
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits(x), 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF));
  }
  // The sum, or the bits of a quiet NaN where the value is one: rounding could carry a NaN into -0.
  template <bool is_quiet>
  static __m512i plus(__m512 x, __m512i added) {
    const __m512i otherwise = is_quiet ? bits(x) : _mm512_or_si512(bits(x), _mm512_set1_epi32(0x400000));
    return _mm512_mask_add_epi32(otherwise, numbers(x), bits(x), added);
  }
  static __m512i high_mask() { return _mm512_set1_epi32(int(0xFFFF0000u)); }
  // The low words of one with the high words of the other.
  static Half alternate(__m512i low, __m512i high) { return _mm512_mask_blend_epi16(0xAAAAAAAAu, low, high); }
  static Half high_words(__m512i even, __m512i odd) { return alternate(_mm512_srli_epi32(even, 16), odd); }
  // Between 32 floats in order, in two registers, and V.
  static V apart(__m512 x, __m512 y) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    return {_mm512_permutex2var_ps(x, even, y),
            _mm512_permutex2var_ps(x, _mm512_add_epi32(even, _mm512_set1_epi32(1)), y)};
  }
  static __m512 first(V x) {
    const __m512i order = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    return _mm512_permutex2var_ps(x.a, order, x.b);
  }
  static __m512 second(V x) {
    const __m512i order = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    return _mm512_permutex2var_ps(x.a, order, x.b);
  }
};

#include "kernels_impl.h"

}  // namespace

const Kernels kernels_avx512 = make_kernels("avx512");

}  // namespace penstock
