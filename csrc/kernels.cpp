// The kernels over the compiler's vectors, compiled once for each instruction set: with registers of 16 bytes for any
// processor (NEON on AArch64), of 32 for AVX2 with FMA and F16C, of 64 for AVX-512 (F, BW, VL, DQ).
//
// A vector holds the even elements in one register and the odd ones in the other: then a 16-bit word becomes the fp32
// value in its place by one shift or mask. Only fp32 and fp16 arrays need permutations.
#include <utility>

#include "kernels.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace penstock {
namespace {

using std::size_t;

#if defined(__AVX512BW__)
constexpr const char* isa = "avx512";
constexpr size_t register_bytes = 64;
#elif defined(__AVX2__)
constexpr const char* isa = "avx2";
constexpr size_t register_bytes = 32;
#else
#if defined(__aarch64__)
constexpr const char* isa = "neon";
#else
constexpr const char* isa = "generic";
#endif
constexpr size_t register_bytes = 16;
#endif
#if defined(__AVX2__)
constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
#endif
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

template <class T, size_t bytes>
struct RegisterOf {
  typedef T type __attribute__((vector_size(bytes)));
};
template <class T, size_t bytes = register_bytes>
using Register = typename RegisterOf<T, bytes>::type;
using Floats = Register<float>;
using Doubles = Register<double>;
using Words = Register<unsigned>;
using Ints = Register<int>;
using Halves = Register<unsigned short>;
using Shorts = Register<short>;
using Bytes = Register<unsigned char>;
using Longs = Register<std::uint64_t>;
template <class R>
constexpr size_t lanes = sizeof(R) / sizeof(R{}[0]);
template <class R>
constexpr size_t half_of = lanes<R> / 2;

template <class R>
R read(const void* from) {
  R read;
  __builtin_memcpy(&read, from, sizeof read);
  return read;
}
template <class R>
void write(void* to, R written) {
  __builtin_memcpy(to, &written, sizeof written);
}
// Lane i of the result is lane of(i) of x and, behind it, y.
template <class To, class Of, class R, size_t... i>
To pick(Of, R x, R y, std::index_sequence<i...>) {
  return __builtin_shufflevector(x, y, Of{}(i)...);
}
template <class To, class Of, class R>
To pick(Of of, R x, R y) {
  return pick<To>(of, x, y, std::make_index_sequence<lanes<To>>{});
}
template <class R>
R larger_of(R x, R y) {
  return x > y ? x : y;
}
// The larger of the halves of x, and of those, down to some bytes.
template <size_t bytes, class R>
auto halved(R x) {
  if constexpr (sizeof(R) == bytes) {
    return x;
  } else {
    using Half = Register<std::remove_cvref_t<decltype(x[0])>, sizeof(R) / 2>;
    const Half first = pick<Half>([](size_t i) { return i; }, x, x);
    return halved<bytes>(larger_of(first, pick<Half>([](size_t i) { return i + lanes<Half>; }, x, x)));
  }
}

// What the compiler's vectors have no word for, or what GCC 12 makes slower code of: all that is written for one instruction
// set. Behind it is the time of a kernel without it, measured from the cache on a Zen 4.
//
// - fused: x * y + z, rounded once; root: the square root. A loop over the lanes becomes the same instruction, but later than
//   GCC decides what to put inline: updates 1.7 to 3.1.
// - doubles: the first half of the lanes, or the second: norms of bf16 1.05, of fp32 1.3 with AVX2 and 2.0 with AVX-512.
// - load_part, store_part, stream_part: half of what goes into V, in the order in which `grain` lanes are permuted together.
//   AVX2 permutes within 16 bytes, and puts the first part together of the first and the third of them: AdamW 1.03.
// - stream: past the cache, and end_streams before others read.
// - floats_of, halves_of: fp16. By arithmetic reading takes 1.2 to 2.3, writing 1.9 to 2.9.
// - widened: signed bytes as words; pairs_of: bytes in pairs, the first of each in the low bits: unpacking int8 1.05 to 1.09.
// - packed: the bytes of words that are bytes, those of x and of y in turns of 8; packed_signs: their signs: packing fp8 1.22.
// - store_bytes, store_halves: the low bits of words. By itself GCC narrows into memory, which is slow: states in int8 1.04.
// - looked_up: of each 16 bytes of a table those that 4 bits choose: unpacking fp8 into bf16 2.2.
// - largest_of: of 8 words: packing int8 and int4 1.05.
// - fused_down: rounded down; with_sign, with_second_bytes: states in int8 1.06.
#if defined(__AVX512BW__)
Floats fused(Floats x, Floats y, Floats z) { return _mm512_fmadd_ps(x, y, z); }
Doubles fused(Doubles x, Doubles y, Doubles z) { return _mm512_fmadd_pd(x, y, z); }
Words fused_down(Floats x, Floats y, Floats z) {
  return (Words)_mm512_fmadd_round_ps(x, y, z, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}
Floats with_sign(Floats x, Floats of) {
  constexpr int with_masked = 0xF8;  // the first, or the second where the third
  return (Floats)_mm512_ternarylogic_epi32((__m512i)x, (__m512i)of, _mm512_set1_epi32(int(0x80000000u)), with_masked);
}
Words with_second_bytes(Words x, Words of) {
  constexpr int second_where_masked = 0xD8;
  return (Words)_mm512_ternarylogic_epi32((__m512i)x, (__m512i)of, _mm512_set1_epi32(0xFF00), second_where_masked);
}
void store_halves(void* to, Words x) {
  _mm256_storeu_si256(static_cast<__m256i*>(to), _mm512_cvtepi32_epi16((__m512i)x));
}
void store_bytes(void* to, Halves x) {
  _mm256_storeu_si256(static_cast<__m256i*>(to), _mm512_cvtepi16_epi8((__m512i)x));
}
Floats root(Floats x) { return _mm512_sqrt_ps(x); }
Doubles doubles(Floats x, bool second) {
  return _mm512_cvtps_pd(second ? _mm512_extractf32x8_ps(x, 1) : _mm512_castps512_ps256(x));
}
void stream(void* to, Words written) { _mm512_stream_si512(static_cast<__m512i*>(to), (__m512i)written); }
Floats floats_of(Halves half, bool second) {
  return _mm512_cvtph_ps(second ? _mm512_extracti64x4_epi64((__m512i)half, 1) : _mm512_castsi512_si256((__m512i)half));
}
Halves halves_of(Floats first, Floats second) {
  const __m512i low = _mm512_castsi256_si512(_mm512_cvtps_ph(first, nearest));
  return (Halves)_mm512_inserti64x4(low, _mm512_cvtps_ph(second, nearest), 1);
}
Shorts widened(const unsigned char* from) { return (Shorts)_mm512_cvtepi8_epi16(read<__m256i>(from)); }
Words pairs_of(const unsigned char* from) { return (Words)_mm512_cvtepu16_epi32(read<__m256i>(from)); }
Bytes packed(Halves x, Halves y) { return (Bytes)_mm512_packus_epi16((__m512i)x, (__m512i)y); }
Bytes packed_signs(Halves x, Halves y) { return (Bytes)_mm512_packs_epi16((__m512i)x, (__m512i)y); }
Bytes looked_up(Bytes table, Bytes choice) { return (Bytes)_mm512_shuffle_epi8((__m512i)table, (__m512i)choice); }
#elif defined(__AVX2__)
Floats fused(Floats x, Floats y, Floats z) { return _mm256_fmadd_ps(x, y, z); }
Doubles fused(Doubles x, Doubles y, Doubles z) { return _mm256_fmadd_pd(x, y, z); }
Floats root(Floats x) { return _mm256_sqrt_ps(x); }
Doubles doubles(Floats x, bool second) {
  return _mm256_cvtps_pd(second ? _mm256_extractf128_ps(x, 1) : _mm256_castps256_ps128(x));
}
Floats load_part(const float* from, bool second) {
  return _mm256_loadu2_m128(from + 8 + 4 * second, from + 4 * second);
}
void store_part(float* to, bool second, Floats x) {
  _mm256_storeu2_m128(to + 8 + 4 * second, to + 4 * second, x);
}
void stream_part(float* to, bool second, Floats x) {
  _mm_stream_ps(to + 4 * second, _mm256_castps256_ps128(x));
  _mm_stream_ps(to + 8 + 4 * second, _mm256_extractf128_ps(x, 1));
}
void stream(void* to, Words written) { _mm256_stream_si256(static_cast<__m256i*>(to), (__m256i)written); }
Floats floats_of(Halves half, bool second) {
  const __m256i parts = _mm256_permute4x64_epi64((__m256i)half, _MM_SHUFFLE(3, 1, 2, 0));
  return _mm256_cvtph_ps(second ? _mm256_extracti128_si256(parts, 1) : _mm256_castsi256_si128(parts));
}
Halves halves_of(Floats first, Floats second) {
  const __m256i parts = _mm256_set_m128i(_mm256_cvtps_ph(second, nearest), _mm256_cvtps_ph(first, nearest));
  return (Halves)_mm256_permute4x64_epi64(parts, _MM_SHUFFLE(3, 1, 2, 0));
}
Shorts widened(const unsigned char* from) { return (Shorts)_mm256_cvtepi8_epi16(read<__m128i>(from)); }
Words pairs_of(const unsigned char* from) { return (Words)_mm256_cvtepu16_epi32(read<__m128i>(from)); }
Bytes packed(Halves x, Halves y) { return (Bytes)_mm256_packus_epi16((__m256i)x, (__m256i)y); }
Bytes packed_signs(Halves x, Halves y) { return (Bytes)_mm256_packs_epi16((__m256i)x, (__m256i)y); }
Bytes looked_up(Bytes table, Bytes choice) { return (Bytes)_mm256_shuffle_epi8((__m256i)table, (__m256i)choice); }
#elif defined(__aarch64__)
Floats fused(Floats x, Floats y, Floats z) { return vfmaq_f32(z, x, y); }
Doubles fused(Doubles x, Doubles y, Doubles z) { return vfmaq_f64(z, x, y); }
Floats root(Floats x) { return vsqrtq_f32(x); }
Doubles doubles(Floats x, bool second) { return vcvt_f64_f32(second ? vget_high_f32(x) : vget_low_f32(x)); }
#else
Floats root(Floats x) {
  for (size_t i = 0; i < lanes<Floats>; ++i) x[i] = __builtin_sqrtf(x[i]);
  return x;
}
Doubles doubles(Floats x, bool second) { return second ? Doubles{x[2], x[3]} : Doubles{x[0], x[1]}; }
// There is no instruction, and the routine of the library takes a call for each lane. The product is exact in fp64. Of a sum
// that is not, the neighbour is taken that is odd and on the side of the rest: then rounding it to fp32 is right (Boldo and
// Melquiond, Emulation of FMA and correctly rounded sums, 2008).
Doubles fused_odd(Doubles x, Doubles y, Doubles z) {
  const Doubles product = x * y, sum = product + z, added = sum - product;
  const Doubles rest = (product - (sum - added)) + (z - added);  // exact
  const Longs bits = (Longs)sum, inexact = (Longs)((rest < 0) | (rest > 0)), towards_zero = (Longs)((rest > 0) ^ (sum > 0));
  return (Doubles)(bits + (inexact & ((bits & 1u) - 1u) & (towards_zero | 1u)));
}
Floats fused(Floats x, Floats y, Floats z) {
  const Doubles low = fused_odd(doubles(x, false), doubles(y, false), doubles(z, false));
  const Doubles high = fused_odd(doubles(x, true), doubles(y, true), doubles(z, true));
  return Floats{float(low[0]), float(low[1]), float(high[0]), float(high[1])};
}
#endif

template <class R>
R add_product(R x, R y, R z) {
#if defined(__AVX2__) || defined(__aarch64__)
  return fused(x, y, z);
#else
  return x * y + z;
#endif
}
#if defined(__AVX2__)
void end_streams() { _mm_sfence(); }
unsigned short largest_of(Register<unsigned short, 16> eight) {  // there is an instruction for the smallest
  return (unsigned short)~_mm_cvtsi128_si32(_mm_minpos_epu16((__m128i)~eight));
}
#else
void end_streams() {}
void stream(void* to, Words written) { write(to, written); }
Shorts widened(const unsigned char* from) {
  const Bytes bytes = (Bytes)Longs{read<std::uint64_t>(from)};
  return (Shorts)pick<Bytes>([](size_t i) { return i / 2; }, bytes, bytes) >> 8;
}
Words pairs_of(const unsigned char* from) {
  const Halves pairs = (Halves)Longs{read<std::uint64_t>(from)};
  return (Words)pick<Halves>([](size_t i) { return i / 2 + i % 2 * lanes<Halves>; }, pairs, Halves{});
}
Bytes packed(Halves x, Halves y) { return pick<Bytes>([](size_t i) { return 2 * i; }, (Bytes)x, (Bytes)y); }
Bytes packed_signs(Halves x, Halves y) { return pick<Bytes>([](size_t i) { return 2 * i + 1; }, (Bytes)x, (Bytes)y); }
unsigned short largest_of(Halves eight) { return halved<sizeof(eight[0])>(eight)[0]; }
#endif
#if !defined(__AVX512BW__)
void store_bytes(void* to, Halves x) {
  write(to, __builtin_convertvector(x, Register<unsigned char, register_bytes / 2>));
}
#endif
#if defined(__AVX512BW__) || !defined(__AVX2__)
Floats load_part(const float* from, bool second) { return read<Floats>(from + lanes<Floats> * second); }
void store_part(float* to, bool second, Floats x) { write(to + lanes<Floats> * second, x); }
void stream_part(float* to, bool second, Floats x) { stream(to + lanes<Floats> * second, (Words)x); }
#endif
constexpr size_t grain = register_bytes == 32 ? 4 : lanes<Floats>;

// `width` floats. Of what is less plain: Half, as many 16-bit words, of which larger_half takes the magnitude of the second
// alone; U, unsigned words, in the order of V; load_e4m3, as fp16 of 2^-8 of the value; join and split, the remainder form;
// to_bf16_up, which adds bits below the last one before it truncates (all NaNs of a result of arithmetic are quiet, and split
// takes nothing else).
struct V {
  static constexpr size_t width = register_bytes / 2;
  using Half = Halves;
  Floats a, b;

  static V splat(float value) { return {value - Floats{}, value - Floats{}}; }
  static V load(const float* from) { return apart(load_part(from, false), load_part(from, true)); }
  static void store(float* to, V x) {
    store_part(to, false, first(x));
    store_part(to, true, second(x));
  }
  static void stream(float* to, V x) {
    stream_part(to, false, first(x));
    stream_part(to, true, second(x));
  }
  static void end_stream() { end_streams(); }
  static Half load_half(const unsigned short* from) { return read<Half>(from); }
  static void store_half(unsigned short* to, Half half) { write(to, half); }
  static void stream_half(unsigned short* to, Half half) { penstock::stream(to, (Words)half); }
  static Half larger_half(Half so_far, Half half) { return larger_of<Half>(so_far, half & (unsigned short)0x7FFF); }
  static unsigned short largest_half(Half half) { return largest_of(halved<16>(half)); }

  static V sqrt(V x) { return {root(x.a), root(x.b)}; }
  static V fma(V x, V y, V z) { return {fused(x.a, y.a, z.a), fused(x.b, y.b, z.b)}; }
  friend V operator+(V x, V y) { return {x.a + y.a, x.b + y.b}; }
  friend V operator-(V x, V y) { return {x.a - y.a, x.b - y.b}; }
  friend V operator*(V x, V y) { return {x.a * y.a, x.b * y.b}; }
  friend V operator/(V x, V y) { return {x.a / y.a, x.b / y.b}; }

  static V from_bf16(Half half) { return {Floats((Words)half << 16), Floats((Words)half & 0xFFFF0000u)}; }
  static Half to_bf16(V x) { return high_words(quiet<false>(x.a, to_even(x.a)), quiet<false>(x.b, to_even(x.b))); }
  static V from_fp16(Half half) {
#if defined(__AVX2__)
    return apart(floats_of(half, false), floats_of(half, true));
#else
    return {from_fp16((Words)half & 0xFFFFu), from_fp16((Words)half >> 16)};
#endif
  }
  static Half to_fp16(V x) {
#if defined(__AVX2__)
    return halves_of(first(x), second(x));
#else
    return alternate(to_fp16(x.a), to_fp16(x.b) << 16);
#endif
  }
  static Half load_e4m3(const unsigned char* from) {
    return Half(widened(from) << 8 >> 1) & (unsigned short)0xBFFF;
  }

  static V join(Half high, Half low) {
    const Words above = Words(high + Half((Shorts)low >> 15));  // one less where the low word is negative
    return {(Floats)alternate((Words)low, above << 16), (Floats)alternate((Words)low >> 16, above)};
  }
  static void split(V x, Half& high, Half& low) {
    high = high_words(quiet<true>(x.a, (Words)x.a + 0x8000u), quiet<true>(x.b, (Words)x.b + 0x8000u));
    low = alternate(x.a == x.a ? (Words)x.a : Words{}, x.b == x.b ? (Words)x.b << 16 : Words{});
  }

  struct U {
    Words a, b;
    static U splat(unsigned value) { return {Words{} + value, Words{} + value}; }
    static U count() {
      Words a;
      for (unsigned i = 0; i < lanes<Words>; ++i) a[i] = 2 * i;
      return {a, a + 1u};
    }
    static U load(const unsigned* from) { return {read<Words>(from), read<Words>(from + lanes<Words>)}; }
    static void store(unsigned* to, U x) {
      write(to, x.a);
      write(to + lanes<Words>, x.b);
    }
    static U load_signed_bytes(const unsigned char* from) {
      const Ints words = (Ints)widened(from);
      return {Words(words << 16 >> 16), Words(words >> 16)};
    }
    static void store_bytes(unsigned char* to, U x) { penstock::store_bytes(to, alternate(x.a, x.b << 16)); }
    static U bits(V x) { return {(Words)x.a, (Words)x.b}; }
    static V float_of(U x) { return {(Floats)x.a, (Floats)x.b}; }
    static V to_floats(U x) {
      return {__builtin_convertvector((Ints)x.a, Floats), __builtin_convertvector((Ints)x.b, Floats)};
    }
    static U truncate(V x) {
      return {(Words)__builtin_convertvector(x.a, Ints), (Words)__builtin_convertvector(x.b, Ints)};
    }
    static U larger(U x, U y) { return {larger_of(x.a, y.a), larger_of(x.b, y.b)}; }
    static U smaller(U x, U y) { return {x.a < y.a ? x.a : y.a, x.b < y.b ? x.b : y.b}; }
    static unsigned largest(U x) { return halved<sizeof(unsigned)>(larger_of(x.a, x.b))[0]; }
    static U shifted_signed(U x, int by) { return {Words((Ints)x.a >> by), Words((Ints)x.b >> by)}; }
    // By element: x + y, or `otherwise` where the first two are the same.
    static U sum_unless(U what, U unless, U x, U y, U otherwise) {
      return {what.a == unless.a ? otherwise.a : x.a + y.a, what.b == unless.b ? otherwise.b : x.b + y.b};
    }
    friend U operator+(U x, U y) { return {x.a + y.a, x.b + y.b}; }
    friend U operator*(U x, U y) { return {x.a * y.a, x.b * y.b}; }
    friend U operator&(U x, U y) { return {x.a & y.a, x.b & y.b}; }
    friend U operator|(U x, U y) { return {x.a | y.a, x.b | y.b}; }
    friend U operator^(U x, U y) { return {x.a ^ y.a, x.b ^ y.b}; }
    friend U operator<<(U x, int by) { return {x.a << by, x.b << by}; }
    friend U operator>>(U x, int by) { return {x.a >> by, x.b >> by}; }
  };
  // Bytes, signed or not, and 1/2. A float of 2^23 and more has ones in its lowest bits: with that exponent around it, a byte
  // becomes a number by one difference. Odd bytes stay where they are and are counted in 256ths. Signed ones lose their sign
  // by their top bit.
  template <bool is_signed>
  static V load_middles(const unsigned char* from) {
    constexpr unsigned flip = is_signed ? 0x80 : 0;
    const Words pairs = pairs_of(from);
    const Floats even = Floats((pairs & 0xFFu) ^ (0x4B000000u | flip));
    const Floats odd = Floats((pairs & 0xFF00u) ^ (0x4B000000u | flip << 8));
    return {is_signed ? even - (0x1p23f + flip) + 0.5f : even - (0x1p23f - 0.5f),
            add_product(odd, splat(0x1p-8f).a, splat(0.5f - flip - 0x1p15f).a)};
  }
  // Of m, the whole part of a vector times a number: signed, m or -1 - m by the sign of another vector; else m, and at least 1
  // where that is not 0.
  template <bool is_signed>
  static void store_codes(unsigned char* to, V x, float unit, V of) {
#if defined(__AVX512BW__)
    // A sum that is rounded down has the whole part in bits of its own: from the lowest of one register, from the ninth of
    // the other. Every magnitude is made larger by less than any lacks to a whole number: so -m, too, goes down to -1 - m.
    if constexpr (is_signed) {
      x = {with_sign(x.a, of.a), with_sign(x.b, of.b)};
    } else {
      const Words one = (Words)splat(1 / unit).a;
      x = {Floats((Words)of.a != 0u ? larger_of((Words)x.a, one) : (Words)x.a),
           Floats((Words)of.b != 0u ? larger_of((Words)x.b, one) : (Words)x.b)};
    }
    const Floats factor = splat(is_signed ? unit + unit * 0x1p-22f : unit).a;
    const Words low = fused_down(x.a, factor, splat(0x1.8p23f).a);
    store_halves(to, with_second_bytes(low, fused_down(x.b, factor, splat(0x1.8p15f).a)));
#else
    const U whole = U::truncate(is_signed ? x : x * splat(unit));
    U::store_bytes(to, is_signed ? whole ^ U::shifted_signed(U::bits(of), 31)
                                 : U::larger(whole, U::smaller(U::bits(of), U::splat(1))));
#endif
  }
  // Rounds to e4m3, to nearest even. Of a value from 2^e to 2^(e+1), or below 2^-6 with e = -6, a sum with 2^(e+20) has
  // 2^(e-3) for its last place, as e4m3 has: in its low bits are the eighths, `base` of them there before. With 8 for each
  // of the exponent's steps they make the code, up to multiples of 2^16.
  static void store_e4m3(unsigned char* to, V x, V y) {
    const Half high_x = high_words((Words)x.a, (Words)x.b), high_y = high_words((Words)y.a, (Words)y.b);
    const Bytes signs = packed_signs(high_x, high_y) & (unsigned char)0x80;
    const Bytes codes = packed(e4m3(x, high_x), e4m3(y, high_y)) | signs;
    write(to, pick<Longs>([](size_t i) { return i % half_of<Longs> * 2 + i / half_of<Longs>; }, (Longs)codes, (Longs)codes));
  }
  static V larger(V x, V y) { return {larger(x.a, y.a), larger(x.b, y.b)}; }
  static V sign(V x) { return {sign(x.a), sign(x.b)}; }
  template <bool is_quiet>
  static Half to_bf16_up(V x, U added) {
    return high_words(quiet<is_quiet>(x.a, (Words)x.a + added.a), quiet<is_quiet>(x.b, (Words)x.b + added.b));
  }

  struct Wide {
    Doubles parts[4];
    static Wide add_squares(Wide sum, V x) {
      return {square(sum.parts[0], doubles(x.a, false)), square(sum.parts[1], doubles(x.a, true)),
              square(sum.parts[2], doubles(x.b, false)), square(sum.parts[3], doubles(x.b, true))};
    }
    static Wide add(Wide sum, V x) {
      return {sum.parts[0] + doubles(x.a, false), sum.parts[1] + doubles(x.a, true),
              sum.parts[2] + doubles(x.b, false), sum.parts[3] + doubles(x.b, true)};
    }
    static void store(double* to, Wide wide) {
      for (size_t i = 0; i < width; ++i) to[i] = wide.parts[i % 2 * 2 + i / lanes<Floats>][i / 2 % lanes<Doubles>];
    }

   private:
    static Doubles square(Doubles sum, Doubles x) { return add_product(x, x, sum); }
  };

  static constexpr bool has_tables = register_bytes > 16;  // else looking up is no instruction of all processors
#if defined(__AVX2__)
  // The bf16 of codes of e4m3 times a factor. The low four bits of a code choose from a table, a byte at a time; what is
  // above is two steps of the exponent each, 1 of the high byte. Codes below 16 have tables of their own.
  class Bf16OfE4m3 {
   public:
    static constexpr size_t width = register_bytes;
    explicit Bf16OfE4m3(V factor) {
      alignas(64) unsigned char codes[32];
      for (unsigned char i = 0; i < 32; ++i) codes[i] = i;
      const Bytes words = words_of(codes, factor), more = words_of(codes + 32 - V::width, factor);
      low_below_ = pick<Bytes>([](size_t i) { return 2 * (i % 16); }, words, more);
      high_below_ = pick<Bytes>([](size_t i) { return 2 * (i % 16) + 1; }, words, more);
      low_ = pick<Bytes>([](size_t i) { return 32 + 2 * (i % 16); }, words, more);
      high_ = pick<Bytes>([](size_t i) { return 32 + 2 * (i % 16) + 1; }, words, more) - (unsigned char)1;
    }
    void put(unsigned short* to, const unsigned char* from) const {
      const Longs loaded = read<Longs>(from);  // unpacking is by 16 bytes
      const Bytes codes = (Bytes)pick<Longs>([](size_t i) { return i / 2 + i % 2 * half_of<Longs>; }, loaded, loaded);
      const Bytes choice = codes & (unsigned char)15;
      const Bytes steps = Bytes((Halves)codes >> 4) & (unsigned char)7;
      const auto is_below = steps == 0;
      const Bytes magnitude = is_below ? looked_up(high_below_, choice) : looked_up(high_, choice) + steps;
      const Bytes high = magnitude | (codes & (unsigned char)0x80);
      const Bytes low = is_below ? looked_up(low_below_, choice) : looked_up(low_, choice);
      write(to, pick<Bytes>([](size_t i) { return i / 16 * 16 + i % 16 / 2 + i % 2 * width; }, low, high));
      write(to + V::width, pick<Bytes>([](size_t i) { return i / 16 * 16 + 8 + i % 16 / 2 + i % 2 * width; }, low, high));
    }

   private:
    static Bytes words_of(const unsigned char* codes, V factor) {
      return (Bytes)to_bf16(from_fp16(load_e4m3(codes)) * factor);
    }

    Bytes low_, high_, low_below_, high_below_;
  };
#endif

 private:
  // Codes of e4m3 without their signs; `high` are the high words.
  static Half e4m3(V x, Half high) {
    constexpr unsigned base = 0x10000u - 8 * (127 - 6);  // even: it changes no tie
    constexpr unsigned power = (20u << 23) + base;
    const Half exponents = (Half)larger_of<Shorts>((Shorts)high & (short)0x7F80, Shorts{} + short(121 << 7));
    const auto sum = [](Floats value, Words exponent) {
      return Words(Floats((Words)value & 0x7FFFFFFFu) + Floats(exponent + power));
    };
    const Words a = sum(x.a, (Words)exponents << 16), b = sum(x.b, (Words)exponents & 0xFFFF0000u);
    return alternate(a, b << 16) + (exponents >> 4);
  }
  // A NaN of either wins.
  static Floats larger(Floats x, Floats y) { return ((x > y) | (x != x)) ? x : y; }
  static Floats sign(Floats x) {
    const Floats one = 1.0f - Floats{};
    return (x > 0.0f ? one : Floats{}) - (x < 0.0f ? one : Floats{});
  }
#if !defined(__AVX2__)
  static Floats from_fp16(Words half) {
    const Words magnitude = half & 0x7FFFu;
    // Normal numbers and specials move their bits up; the factor moves the exponent's bias, denormals included.
    const Words number = Words(Floats(magnitude << 13) * 0x1p112f);
    const Words special = (magnitude << 13) | 0x7F800000u | ((Ints)magnitude > 0x7C00 ? Words{} + 0x400000u : Words{});
    return Floats(((Ints)magnitude < 0x7C00 ? number : special) | (half & 0x8000u) << 16);
  }
  static Words to_fp16(Floats x) {
    const Words magnitude = (Words)x & 0x7FFFFFFFu;
    // Below 2^-14 the result is denormal: adding 1/2 makes the adder round at its last bit, 2^-24.
    Words half = Words((Floats)magnitude + 0.5f) - 0x3F000000u;
    const Words number = (magnitude + 0xFFFu + (magnitude >> 13 & 1u) - 0x38000000u) >> 13;
    half = (Ints)magnitude >= 0x38800000 ? number : half;
    half = (Ints)magnitude >= 0x477FF000 ? Words{} + 0x7C00u : half;  // 65520 and above round to infinity
    const Words nan = ((magnitude >> 13) & 0x3FFu) | 0x7E00u;  // a NaN stays one, with the high bits of its payload
    half = (Ints)magnitude > 0x7F800000 ? nan : half;
    return half | ((Words)x >> 16 & 0x8000u);
  }
#endif
  static Words to_even(Floats x) { return (Words)x + 0x7FFFu + ((Words)x >> 16 & 1u); }
  // `rounded`, or the bits of a quiet NaN where the value is one: rounding could carry a NaN into -0.
  template <bool is_quiet>
  static Words quiet(Floats x, Words rounded) {
    return x == x ? rounded : is_quiet ? (Words)x : (Words)x | 0x400000u;
  }
  // The low words of one with the high words of the other.
  static Half alternate(Words low, Words high) {
    if constexpr (register_bytes == 16) {
      return Half((low & 0xFFFFu) | (high & 0xFFFF0000u));
    } else {
      return pick<Half>([](size_t i) { return i + i % 2 * width; }, (Half)low, (Half)high);
    }
  }
  static Half high_words(Words even, Words odd) { return alternate(even >> 16, odd); }
  // Between V and floats in two parts.
  static constexpr size_t odd_or_even(size_t i, bool odd) {
    return i / grain * grain + i % grain * 2 % grain + odd + i % grain / (grain / 2) * lanes<Floats>;
  }
  static constexpr size_t interleaved(size_t i, bool second) {
    return i / grain * grain + i % grain / 2 + i % 2 * lanes<Floats> + second * grain / 2;
  }
  static V apart(Floats x, Floats y) {
    return {pick<Floats>([](size_t i) { return odd_or_even(i, false); }, x, y),
            pick<Floats>([](size_t i) { return odd_or_even(i, true); }, x, y)};
  }
  static Floats first(V x) { return pick<Floats>([](size_t i) { return interleaved(i, false); }, x.a, x.b); }
  static Floats second(V x) { return pick<Floats>([](size_t i) { return interleaved(i, true); }, x.a, x.b); }
};

#include "kernels_impl.h"

}  // namespace

extern const Kernels PENSTOCK_KERNELS = make_kernels(isa);

}  // namespace penstock
