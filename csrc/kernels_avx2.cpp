// The kernels for AVX2 with FMA and F16C: 16 elements at a time, a whole register of 16-bit words.
//
// A vector holds the even elements in one register and the odd ones in the other, as in kernels_avx512.cpp.
#include <immintrin.h>

#include "kernels.h"

namespace penstock {
namespace {

using std::size_t;

struct V {
  static constexpr size_t width = 16;
  static constexpr bool knows_e4m3 = true;
  using Half = __m256i;
  __m256 a, b;

  static V splat(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
  static V load(const float* from) {
    return apart(_mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(from)), _mm_loadu_ps(from + 8), 1),
                 _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(from + 4)), _mm_loadu_ps(from + 12), 1));
  }
  static void store(float* to, V x) {
    const __m256 low = _mm256_unpacklo_ps(x.a, x.b), high = _mm256_unpackhi_ps(x.a, x.b);
    _mm_storeu_ps(to, _mm256_castps256_ps128(low));
    _mm_storeu_ps(to + 4, _mm256_castps256_ps128(high));
    _mm_storeu_ps(to + 8, _mm256_extractf128_ps(low, 1));
    _mm_storeu_ps(to + 12, _mm256_extractf128_ps(high, 1));
  }
  static void stream(float* to, V x) {
    alignas(32) float ordered[width];
    store(ordered, x);
    _mm256_stream_ps(to, _mm256_load_ps(ordered));
    _mm256_stream_ps(to + 8, _mm256_load_ps(ordered + 8));
  }
  static void end_stream() { _mm_sfence(); }
  static Half load_half(const unsigned short* from) { return _mm256_loadu_si256(reinterpret_cast<const Half*>(from)); }
  static void store_half(unsigned short* to, Half half) { _mm256_storeu_si256(reinterpret_cast<Half*>(to), half); }
  static void stream_half(unsigned short* to, Half half) { _mm256_stream_si256(reinterpret_cast<Half*>(to), half); }
  static Half larger_half(Half so_far, Half half) {
    return _mm256_max_epu16(so_far, _mm256_and_si256(half, _mm256_set1_epi16(0x7FFF)));
  }
  static unsigned short largest_half(Half half) {
    // There is an instruction for the smallest.
    const __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    return (unsigned short)~_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi32(-1))));
  }

  static V sqrt(V x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
  static V fma(V x, V y, V z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
  friend V operator+(V x, V y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
  friend V operator-(V x, V y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
  friend V operator*(V x, V y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
  friend V operator/(V x, V y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }

  static V from_bf16(Half half) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(half, 16)), _mm256_castsi256_ps(_mm256_and_si256(half, high_mask()))};
  }
  static Half to_bf16(V x) { return high_words(quiet<false>(x.a, round_even(x.a)), quiet<false>(x.b, round_even(x.b))); }
  static V from_fp16(Half half) {
    const __m256 x = _mm256_cvtph_ps(_mm256_castsi256_si128(half));
    const __m256 y = _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1));
    return apart(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31));
  }
  static Half load_e4m3(const unsigned char* from) {
    const __m256i words = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(words, 8), 1), _mm256_set1_epi16(short(0xBFFF)));
  }
  // See store_e4m3 in wire_impl.h: here what is of 16 bits at the end is taken together.
  static void store_e4m3(unsigned char* to, V x, V y) {
    const Half high_x = high_words(bits(x.a), bits(x.b)), high_y = high_words(bits(y.a), bits(y.b));
    const Half signs = _mm256_and_si256(_mm256_packs_epi16(high_x, high_y), _mm256_set1_epi8(char(0x80)));
    const Half both = _mm256_or_si256(_mm256_packus_epi16(e4m3(x, high_x), e4m3(y, high_y)), signs);
    _mm256_storeu_si256(reinterpret_cast<Half*>(to), _mm256_permute4x64_epi64(both, _MM_SHUFFLE(3, 1, 2, 0)));
  }
  // The bf16 of codes of e4m3 times a factor. The low four bits of a code choose from a table, a byte at a time; what is
  // above is two steps of the exponent each, 1 of the high byte. Codes below 16 have tables of their own.
  class Bf16OfE4m3 {
   public:
    static constexpr size_t width = 32;
    explicit Bf16OfE4m3(V factor) {
      const __m256i below = words_of(0, factor), above = words_of(16, factor);
      low_below_ = low_bytes(below), high_below_ = low_bytes(_mm256_srli_epi16(below, 8));
      low_ = low_bytes(above);
      high_ = _mm256_sub_epi8(low_bytes(_mm256_srli_epi16(above, 8)), _mm256_set1_epi8(1));
    }
    void put(unsigned short* to, const unsigned char* from) const {
      const __m256i loaded = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
      const __m256i codes = _mm256_permute4x64_epi64(loaded, _MM_SHUFFLE(3, 1, 2, 0));  // unpacking is by halves
      const __m256i choice = _mm256_and_si256(codes, _mm256_set1_epi8(15));
      const __m256i steps = _mm256_and_si256(_mm256_srli_epi16(codes, 4), _mm256_set1_epi8(7));
      const __m256i is_below = _mm256_cmpeq_epi8(steps, _mm256_setzero_si256());
      const __m256i above = _mm256_add_epi8(_mm256_shuffle_epi8(high_, choice), steps);
      const __m256i magnitude = _mm256_blendv_epi8(above, _mm256_shuffle_epi8(high_below_, choice), is_below);
      const __m256i high = _mm256_or_si256(magnitude, _mm256_and_si256(codes, _mm256_set1_epi8(char(0x80))));
      const __m256i low = _mm256_blendv_epi8(_mm256_shuffle_epi8(low_, choice),
                                             _mm256_shuffle_epi8(low_below_, choice), is_below);
      store_half(to, _mm256_unpacklo_epi8(low, high));
      store_half(to + V::width, _mm256_unpackhi_epi8(low, high));
    }

   private:
    static __m256i words_of(char first, V factor) {
      const __m128i count = _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
      alignas(16) unsigned char codes[16];
      _mm_store_si128(reinterpret_cast<__m128i*>(codes), _mm_add_epi8(count, _mm_set1_epi8(first)));
      return to_bf16(from_fp16(load_e4m3(codes)) * factor);
    }
    static __m256i low_bytes(__m256i words) {
      const __m256i low = _mm256_and_si256(words, _mm256_set1_epi16(0xFF));
      return _mm256_broadcastsi128_si256(
          _mm_packus_epi16(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1)));
    }

    __m256i low_, high_, low_below_, high_below_;
  };
  static Half to_fp16(V x) {
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    const __m128i low = _mm256_cvtps_ph(_mm256_unpacklo_ps(x.a, x.b), nearest);
    const __m128i high = _mm256_cvtps_ph(_mm256_unpackhi_ps(x.a, x.b), nearest);
    return _mm256_set_m128i(_mm_unpackhi_epi64(low, high), _mm_unpacklo_epi64(low, high));
  }

  static V join(Half high, Half low) {
    const __m256i even = _mm256_srai_epi32(_mm256_slli_epi32(low, 16), 16);
    return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32(high, 16), even)),
            _mm256_castsi256_ps(_mm256_add_epi32(_mm256_and_si256(high, high_mask()), _mm256_srai_epi32(low, 16)))};
  }
  static void split(V x, Half& high, Half& low) {
    const __m256i half = _mm256_set1_epi32(0x8000);
    high = high_words(quiet<true>(x.a, _mm256_add_epi32(bits(x.a), half)),
                      quiet<true>(x.b, _mm256_add_epi32(bits(x.b), half)));
    low = alternate(bits_of_number(x.a), _mm256_slli_epi32(bits_of_number(x.b), 16));
  }

  struct U {
    __m256i a, b;
    static U splat(unsigned value) { return {_mm256_set1_epi32(int(value)), _mm256_set1_epi32(int(value))}; }
    static U count() {
      return {_mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14), _mm256_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15)};
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
      const __m256i words = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
      return {_mm256_and_si256(words, _mm256_set1_epi32(0xFFFF)), _mm256_srli_epi32(words, 16)};
    }
    static U load_signed_bytes(const unsigned char* from) {
      const __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
      return {_mm256_srai_epi32(_mm256_slli_epi32(words, 16), 16), _mm256_srai_epi32(words, 16)};
    }
    static void store_bytes(unsigned char* to, U x) {
      const __m256i low = _mm256_set1_epi32(0xFF);
      const __m256i words = alternate(_mm256_and_si256(x.a, low), _mm256_slli_epi32(_mm256_and_si256(x.b, low), 16));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                       _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
    }
    static U bits(V x) { return {V::bits(x.a), V::bits(x.b)}; }
    static V float_of(U x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
    static V to_floats(U x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
    static U truncate(V x) { return {_mm256_cvttps_epi32(x.a), _mm256_cvttps_epi32(x.b)}; }
    static U larger(U x, U y) { return {_mm256_max_epu32(x.a, y.a), _mm256_max_epu32(x.b, y.b)}; }
    static U smaller(U x, U y) { return {_mm256_min_epu32(x.a, y.a), _mm256_min_epu32(x.b, y.b)}; }
    static unsigned largest(U x) {
      const __m256i eight = _mm256_max_epu32(x.a, x.b);
      __m128i four = _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
      four = _mm_max_epu32(four, _mm_shuffle_epi32(four, _MM_SHUFFLE(1, 0, 3, 2)));
      return unsigned(_mm_cvtsi128_si32(_mm_max_epu32(four, _mm_shuffle_epi32(four, _MM_SHUFFLE(2, 3, 0, 1)))));
    }
    static U shifted_signed(U x, int by) {
      return {_mm256_srai_epi32(x.a, by), _mm256_srai_epi32(x.b, by)};
    }
    static U sum_unless(U what, U unless, U x, U y, U otherwise) {
      return {_mm256_blendv_epi8(_mm256_add_epi32(x.a, y.a), otherwise.a, _mm256_cmpeq_epi32(what.a, unless.a)),
              _mm256_blendv_epi8(_mm256_add_epi32(x.b, y.b), otherwise.b, _mm256_cmpeq_epi32(what.b, unless.b))};
    }
    friend U operator+(U x, U y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
    friend U operator-(U x, U y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
    friend U operator*(U x, U y) { return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; }
    friend U operator&(U x, U y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
    friend U operator|(U x, U y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
    friend U operator^(U x, U y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
    friend U operator<<(U x, int by) { return {_mm256_slli_epi32(x.a, unsigned(by)), _mm256_slli_epi32(x.b, unsigned(by))}; }
    friend U operator>>(U x, int by) { return {_mm256_srli_epi32(x.a, unsigned(by)), _mm256_srli_epi32(x.b, unsigned(by))}; }
  };
  template <bool is_signed>
  static V load_middles(const unsigned char* from) {
    return U::to_floats(is_signed ? U::load_signed_bytes(from) : U::load_bytes(from)) + splat(0.5f);
  }
  // Without masks: packing saturates, and what is a byte stays as it is.
  template <bool is_signed>
  static void store_codes(unsigned char* to, V x, float unit, V of) {
    const U whole = U::truncate(is_signed ? x : x * splat(unit));
    const U codes = is_signed ? whole ^ U::shifted_signed(U::bits(of), 31)
                              : U::larger(whole, U::smaller(U::bits(of), U::splat(1)));
    const __m256i words = alternate(codes.a, _mm256_slli_epi32(codes.b, 16));
    const __m128i first = _mm256_castsi256_si128(words), second = _mm256_extracti128_si256(words, 1);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                     is_signed ? _mm_packs_epi16(first, second) : _mm_packus_epi16(first, second));
  }
  // The instruction gives its second operand where either is a NaN.
  static V larger(V x, V y) { return {larger(x.a, y.a), larger(x.b, y.b)}; }
  static V sign(V x) { return {sign(x.a), sign(x.b)}; }
  template <bool is_quiet>
  static Half to_bf16_up(V x, U added) {
    return high_words(quiet<is_quiet>(x.a, _mm256_add_epi32(bits(x.a), added.a)),
                      quiet<is_quiet>(x.b, _mm256_add_epi32(bits(x.b), added.b)));
  }

  struct Wide {
    __m256d parts[4];
    static Wide add_squares(Wide sum, V x) {
      return {square(sum.parts[0], _mm256_castps256_ps128(x.a)), square(sum.parts[1], _mm256_extractf128_ps(x.a, 1)),
              square(sum.parts[2], _mm256_castps256_ps128(x.b)), square(sum.parts[3], _mm256_extractf128_ps(x.b, 1))};
    }
    static Wide add(Wide sum, V x) {
      return {plus(sum.parts[0], _mm256_castps256_ps128(x.a)), plus(sum.parts[1], _mm256_extractf128_ps(x.a, 1)),
              plus(sum.parts[2], _mm256_castps256_ps128(x.b)), plus(sum.parts[3], _mm256_extractf128_ps(x.b, 1))};
    }
    static void store(double* to, Wide wide) {
      for (int i = 0; i < 16; ++i) to[i] = wide.parts[i % 2 * 2 + i / 8][i / 2 % 4];
    }

   private:
    static __m256d plus(__m256d sum, __m128 x) { return _mm256_add_pd(sum, _mm256_cvtps_pd(x)); }
    // The square is exact in fp64, so that fusing it with the addition changes nothing.
    static __m256d square(__m256d sum, __m128 x) {
      const __m256d wide = _mm256_cvtps_pd(x);
      return _mm256_fmadd_pd(wide, wide, sum);
    }
  };

 private:
  // Codes of e4m3 without their signs; `high` are the high words.
  static Half e4m3(V x, Half high) {
    const Half exponents = _mm256_max_epi16(_mm256_and_si256(high, _mm256_set1_epi16(0x7F80)), _mm256_set1_epi16(121 << 7));
    const __m256i a = sum_e4m3(x.a, _mm256_slli_epi32(exponents, 16));
    const __m256i b = sum_e4m3(x.b, _mm256_and_si256(exponents, high_mask()));
    return _mm256_add_epi16(alternate(a, _mm256_slli_epi32(b, 16)), _mm256_srli_epi16(exponents, 4));
  }
  static __m256i sum_e4m3(__m256 x, __m256i exponent) {
    const __m256 magnitude = _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF)));
    const __m256i power = _mm256_add_epi32(exponent, _mm256_set1_epi32((20 << 23) + 0x10000 - 8 * (127 - 6)));
    return bits(_mm256_add_ps(magnitude, _mm256_castsi256_ps(power)));
  }
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
  template <bool is_quiet>
  static __m256i quiet(__m256 x, __m256i rounded) {
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i otherwise = is_quiet ? bits(x) : _mm256_or_si256(bits(x), _mm256_set1_epi32(0x400000));
    return _mm256_blendv_epi8(rounded, otherwise, nan);
  }
  // The bits, or 0 of a NaN.
  static __m256i bits_of_number(__m256 x) {
    return _mm256_and_si256(bits(x), _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_ORD_Q)));
  }
  static __m256i high_mask() { return _mm256_set1_epi32(int(0xFFFF0000u)); }
  // The low words of one with the high words of the other.
  static Half alternate(__m256i low, __m256i high) { return _mm256_blend_epi16(low, high, 0xAA); }
  static Half high_words(__m256i even, __m256i odd) { return alternate(_mm256_srli_epi32(even, 16), odd); }
  // From elements 0 to 3 and 8 to 11 in one register, 4 to 7 and 12 to 15 in the other.
  static V apart(__m256 x, __m256 y) {
    return {_mm256_shuffle_ps(x, y, _MM_SHUFFLE(2, 0, 2, 0)), _mm256_shuffle_ps(x, y, _MM_SHUFFLE(3, 1, 3, 1))};
  }
};

#include "kernels_impl.h"

}  // namespace

const Kernels kernels_avx2 = make_kernels("avx2");

}  // namespace penstock
