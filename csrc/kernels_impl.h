// The kernels, written over V of kernels.cpp, which includes this inside an unnamed namespace: nothing compiled for one
// instruction set can be linked into the code of another. For the same reason nothing here calls the standard library.

// Asks for memory before it is needed. The processor's own prefetching stops at the end of a page, and behind this much
// arithmetic it does not look far enough ahead.
constexpr size_t ahead_bytes = 2048;
template <size_t by = ahead_bytes, class... Words>
void look_ahead(size_t i, const Words*... arrays) {
  (__builtin_prefetch(reinterpret_cast<const char*>(arrays + i) + by), ...);
}

// How one dtype is read and written. `put` returns the value that was stored, rounding included.
template <class D>
struct InMemory {
  template <class Word>
  static V get(const Word* from) {
    return D::decode(D::load(from));
  }
  template <class Word>
  static V put(Word* to, V value) {
    const auto stored = D::encode(value);
    D::store(to, stored);
    return D::decode(stored);
  }
};
struct Fp32 : InMemory<Fp32> {
  using Word = float;
  static V load(const Word* from) { return V::load(from); }
  static void store(Word* to, V stored) { V::store(to, stored); }
  static void stream(Word* to, V stored) { V::stream(to, stored); }
  static V encode(V value) { return value; }
  static V encode_param(V value) { return value; }
  static V decode(V stored) { return stored; }
};
struct OfHalves {
  using Word = unsigned short;
  using Stored = typename V::Half;
  static Stored load(const Word* from) { return V::load_half(from); }
  static void store(Word* to, Stored stored) { V::store_half(to, stored); }
  static void stream(Word* to, Stored stored) { V::stream_half(to, stored); }
};
struct Bf16 : OfHalves, InMemory<Bf16> {
  static Stored encode(V value) { return V::to_bf16(value); }
  // A parameter's ties go away from zero, whatever its master is: the remainder form knows no other way.
  static Stored encode_param(V value) {
    Stored high, low;
    V::split(value, high, low);
    return high;
  }
  static V decode(Stored stored) { return V::from_bf16(stored); }
};
struct Fp16 : OfHalves, InMemory<Fp16> {
  static Stored encode(V value) { return V::to_fp16(value); }
  static Stored encode_param(V value) { return encode(value); }
  static V decode(Stored stored) { return V::from_fp16(stored); }
};

// How the fp32 values behind parameters i, i + 1, ... are read and written back, by dtype and kind of master.
template <class Param>
struct MasterNone {
  using ParamWord = typename Param::Word;
  using MasterWord = char;
  static constexpr bool has_master = false;
  static V get(const ParamWord* param, const MasterWord*, size_t i) { return Param::get(param + i); }
  static void put(ParamWord* param, MasterWord*, size_t i, V value) {
    Param::store(param + i, Param::encode_param(value));
  }
};
struct MasterRemainder {
  using ParamWord = unsigned short;
  using MasterWord = unsigned short;
  static constexpr bool has_master = true;
  static V get(const ParamWord* param, const MasterWord* rest, size_t i) {
    return V::join(V::load_half(param + i), V::load_half(rest + i));
  }
  static void put(ParamWord* param, MasterWord* rest, size_t i, V value) {
    typename V::Half high, low;
    V::split(value, high, low);
    V::store_half(param + i, high);
    V::store_half(rest + i, low);
  }
};
template <class Param>
struct MasterFp32 {
  using ParamWord = typename Param::Word;
  using MasterWord = float;
  static constexpr bool has_master = true;
  static V get(const ParamWord*, const MasterWord* master, size_t i) { return V::load(master + i); }
  static void put(ParamWord* param, MasterWord* master, size_t i, V value) {
    V::store(master + i, value);
    Param::store(param + i, Param::encode_param(value));
  }
};

// The last elements of a range, padded with zeros to a whole vector: every element goes through the same operations.
template <class Word>
struct Tail {
  Word words[V::width] = {};
  Tail() = default;
  Tail(const Word* from, size_t count) {
    for (size_t i = 0; i < count; ++i) words[i] = from[i];
  }
  void put(Word* to, size_t count) const {
    for (size_t i = 0; i < count; ++i) to[i] = words[i];
  }
};

// Sums of squares in fp64, where the square of any fp32 value is exact, or of sums of them.
class SquareSum {
 public:
  static constexpr size_t vectors = norm_lanes / V::width;
  void add(size_t vector, V value) { sums_[vector] = V::Wide::add_squares(sums_[vector], value); }
  void add_sum(size_t vector, V squares) { sums_[vector] = V::Wide::add(sums_[vector], squares); }
  double total() const {
    double lanes[norm_lanes];
    for (size_t vector = 0; vector < vectors; ++vector) V::Wide::store(lanes + vector * V::width, sums_[vector]);
    for (size_t half = norm_lanes / 2; half > 0; half /= 2)
      for (size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    return lanes[0];
  }

 private:
  typename V::Wide sums_[vectors] = {};
};

// The sum of squares of value_at(i), the elements [i, i + width), and, for the last of them, tail_at(i, count), padded
// with zeros. `quick` adds up 4 squares of a lane in fp32 first.
template <bool quick, class ValueAt, class TailAt>
double sum_squares(size_t begin, size_t end, ValueAt&& value_at, TailAt&& tail_at) {
  SquareSum sum;
  size_t i = begin;
  if constexpr (quick) {
    for (; i + 4 * norm_lanes <= end; i += 4 * norm_lanes) {
      V squares[SquareSum::vectors];
      for (size_t vector = 0; vector < SquareSum::vectors; ++vector) {
        const V value = value_at(i + vector * V::width);
        squares[vector] = value * value;
      }
      for (size_t group = 1; group < 4; ++group) {
        for (size_t vector = 0; vector < SquareSum::vectors; ++vector) {
          const V value = value_at(i + group * norm_lanes + vector * V::width);
          squares[vector] = V::fma(value, value, squares[vector]);
        }
      }
      for (size_t vector = 0; vector < SquareSum::vectors; ++vector) sum.add_sum(vector, squares[vector]);
    }
  }
  for (; i + norm_lanes <= end; i += norm_lanes)
    for (size_t vector = 0; vector < SquareSum::vectors; ++vector) sum.add(vector, value_at(i + vector * V::width));
  for (size_t vector = 0; i < end; ++vector, i += V::width) {
    if (i + V::width <= end) {
      sum.add(vector, value_at(i));
    } else {
      sum.add(vector, tail_at(i, end - i));
    }
  }
  return sum.total();
}

// Squares of bf16 values are exact in fp32 unless they are out of its range. A quick sum that is finite had no square
// above it, and beside one of at least 2^-100 what was lost below it is nothing; otherwise the sum is made again, in fp64.
template <class Stored>
constexpr bool is_quick = std::is_same_v<Stored, Bf16>;
inline bool holds(double quick_sum) { return quick_sum >= 0x1p-100 && quick_sum <= 0x1p127; }

template <class Src, bool quick>
double squares_of(const typename Src::Word* src, size_t begin, size_t end) {
  return sum_squares<quick>(
      begin, end,
      [=](size_t i) {
        look_ahead<512>(i, src);  // with so little arithmetic, asking further ahead gets in the way of the processor's own
        return Src::get(src + i);
      },
      [=](size_t i, size_t count) { return Src::get(Tail<typename Src::Word>(src + i, count).words); });
}

template <class Src>
double squared_norm(const void* src_address, size_t begin, size_t end) noexcept {
  const auto* src = static_cast<const typename Src::Word*>(src_address);
  if constexpr (is_quick<Src>) {
    const double sum = squares_of<Src, true>(src, begin, end);
    if (holds(sum)) return sum;
  }
  return squares_of<Src, false>(src, begin, end);
}

template <class Dst, class Src, Write write>
double deposit(void* dst_address, const void* src_address, size_t begin, size_t end) noexcept {
  using DstWord = typename Dst::Word;
  using SrcWord = typename Src::Word;
  constexpr bool streams = write == Write::past_cache;
  DstWord* dst = static_cast<DstWord*>(dst_address);
  const SrcWord* src = static_cast<const SrcWord*>(src_address);
  const auto stored = [](const DstWord* to, const SrcWord* from) {
    if constexpr (write == Write::add) {
      return Dst::encode(Dst::get(to) + Src::get(from));
    } else if constexpr (std::is_same_v<Dst, Src>) {
      return Src::load(from);  // as it is, also where it is a NaN
    } else {
      return Dst::encode(Src::get(from));
    }
  };
  const double sum = sum_squares<is_quick<Dst>>(
      begin, end,
      [=](size_t i) {
        look_ahead(i, src);
        if constexpr (!streams) look_ahead(i, dst);
        const auto value = stored(dst + i, src + i);
        if constexpr (streams) {
          Dst::stream(dst + i, value);
        } else {
          Dst::store(dst + i, value);
        }
        return Dst::decode(value);
      },
      [=](size_t i, size_t count) {
        Tail<DstWord> to(dst + i, count);
        const auto value = stored(to.words, Tail<SrcWord>(src + i, count).words);
        Dst::store(to.words, value);
        to.put(dst + i, count);
        return Dst::decode(value);
      });
  if constexpr (streams) V::end_stream();
  return !is_quick<Dst> || holds(sum) ? sum : squares_of<Dst, false>(dst, begin, end);
}

// An update of one vector. A rule begins it, which changes the states, and ends it from `parts` vectors that it left.
template <class R>
inline __attribute__((always_inline)) V step(const R& rule, V param, V grad, V* states) {
  V begun[R::parts];
  rule.begin(param, grad, states, begun);
  return rule.end(begun);
}

// One fused pass: reads parameter, gradient and states, and writes back all but the gradient.
template <class R, class Store, class Grad>
void update(const Arrays& arrays, const float* scalars, size_t begin, size_t end) noexcept {
  using ParamWord = typename Store::ParamWord;
  using MasterWord = typename Store::MasterWord;
  using GradWord = typename Grad::Word;
  constexpr int count = state_count[int(R::id)];
  ParamWord* param = static_cast<ParamWord*>(arrays.param);
  MasterWord* master = static_cast<MasterWord*>(arrays.master);
  const GradWord* grad = static_cast<const GradWord*>(arrays.grad);
  float* states[count + 1];
  for (int k = 0; k < count; ++k) states[k] = static_cast<float*>(arrays.states[k]);
  const R rule(scalars);

  size_t i = begin;
  for (; i + V::width <= end; i += V::width) {
    V values[count + 1];
    for (int k = 0; k < count; ++k) {
      look_ahead(i, states[k]);
      look_ahead(i + V::width / 2, states[k]);  // a vector of fp32 is two lines of the cache
    }
    look_ahead(i, param, grad);
    if constexpr (Store::has_master) look_ahead(i, master);
    for (int k = 0; k < count; ++k) values[k] = V::load(states[k] + i);
    const V p = step(rule, Store::get(param, master, i), Grad::get(grad + i), values);
    for (int k = 0; k < count; ++k) V::store(states[k] + i, values[k]);
    Store::put(param, master, i, p);
  }
  if (i == end) return;

  const size_t rest = end - i;
  Tail<ParamWord> p(param + i, rest);
  Tail<MasterWord> m;
  if constexpr (Store::has_master) m = Tail<MasterWord>(master + i, rest);
  const Tail<GradWord> g(grad + i, rest);
  V values[count + 1];
  for (int k = 0; k < count; ++k) values[k] = V::load(Tail<float>(states[k] + i, rest).words);
  Store::put(p.words, m.words, 0, step(rule, Store::get(p.words, m.words, 0), Grad::get(g.words), values));
  for (int k = 0; k < count; ++k) {
    Tail<float> s;
    V::store(s.words, values[k]);
    s.put(states[k] + i, rest);
  }
  p.put(param + i, rest);
  if constexpr (Store::has_master) m.put(master + i, rest);
}

// Of a scalar that is 0 or 1, as an integer: a loop tests it again for every vector.
inline bool flag(float scalar) {
  unsigned bits;
  __builtin_memcpy(&bits, &scalar, sizeof bits);
  return bits != 0;
}

#include "adam_impl.h"
#include "adagrad_impl.h"
#include "lion_impl.h"
#include "sgd_impl.h"
#include "storage_impl.h"
#include "int8_impl.h"
#include "wire_impl.h"

template <class R, class Store, class Row>
constexpr void add_grads(Row& row) {
  row[int(DType::fp32)] = update<R, Store, Fp32>;
  row[int(DType::bf16)] = update<R, Store, Bf16>;
  row[int(DType::fp16)] = update<R, Store, Fp16>;
}

template <class R, bool random>
constexpr void add_bf16(Kernels& k) {
  constexpr int fp32 = int(DType::fp32), bf16 = int(DType::bf16);
  auto& rows = k.update_bf16[random][int(R::id)];
  rows[0][fp32] = update_bf16<R, false, Fp32, random>;
  rows[0][bf16] = update_bf16<R, false, Bf16, random>;
  rows[1][fp32] = update_bf16<R, true, Fp32, random>;
  rows[1][bf16] = update_bf16<R, true, Bf16, random>;
}

template <class R>
constexpr void add_rule(Kernels& k) {
  if constexpr (state_count[int(R::id)] > 0) {
    add_bf16<R, false>(k);
    add_bf16<R, true>(k);
    k.update_int8[int(R::id)][int(DType::fp32)] = update_int8<R, Fp32>;
    k.update_int8[int(R::id)][int(DType::bf16)] = update_int8<R, Bf16>;
  }
  constexpr int fp32 = int(DType::fp32), bf16 = int(DType::bf16), fp16 = int(DType::fp16);
  auto& rows = k.update[int(R::id)];
  add_grads<R, MasterNone<Fp32>>(rows[fp32][int(Master::none)]);
  add_grads<R, MasterNone<Bf16>>(rows[bf16][int(Master::none)]);
  add_grads<R, MasterRemainder>(rows[bf16][int(Master::remainder)]);
  add_grads<R, MasterFp32<Bf16>>(rows[bf16][int(Master::fp32)]);
  add_grads<R, MasterFp32<Fp16>>(rows[fp16][int(Master::fp32)]);
}

template <class Format>
constexpr void add_wire(Kernels& k) {
  auto& pack_row = k.pack[int(Format::id)];
  pack_row[int(DType::fp32)] = pack<Format, Fp32>;
  pack_row[int(DType::bf16)] = pack<Format, Bf16>;
  pack_row[int(DType::fp16)] = pack<Format, Fp16>;
  auto& unpack_row = k.unpack[int(Format::id)];
  unpack_row[int(DType::fp32)][0] = unpack<Format, Fp32, false>;
  unpack_row[int(DType::fp32)][1] = unpack<Format, Fp32, true>;
  unpack_row[int(DType::bf16)][0] = unpack<Format, Bf16, false>;
  unpack_row[int(DType::fp16)][0] = unpack<Format, Fp16, false>;
}

constexpr Kernels make_kernels(const char* isa) {
  Kernels k{};
  k.isa = isa;
  constexpr int fp32 = int(DType::fp32), bf16 = int(DType::bf16), fp16 = int(DType::fp16);

  add_rule<Adam<false>>(k);
  add_rule<Adam<true>>(k);
  add_rule<Sgd>(k);
  add_rule<SgdMomentum>(k);
  add_rule<Adagrad>(k);
  add_rule<Lion>(k);

  const auto add_deposit = [&]<class Dst, class Src>(Dst, Src, int dst, int src) {
    k.deposit[dst][src][int(Write::over)] = deposit<Dst, Src, Write::over>;
    k.deposit[dst][src][int(Write::add)] = deposit<Dst, Src, Write::add>;
    k.deposit[dst][src][int(Write::past_cache)] = deposit<Dst, Src, Write::past_cache>;
  };
  add_deposit(Fp32{}, Fp32{}, fp32, fp32);
  add_deposit(Fp32{}, Bf16{}, fp32, bf16);
  add_deposit(Fp32{}, Fp16{}, fp32, fp16);
  add_deposit(Bf16{}, Fp32{}, bf16, fp32);
  add_deposit(Bf16{}, Bf16{}, bf16, bf16);
  add_deposit(Bf16{}, Fp16{}, bf16, fp16);
  add_deposit(Fp16{}, Fp32{}, fp16, fp32);
  add_deposit(Fp16{}, Bf16{}, fp16, bf16);
  add_deposit(Fp16{}, Fp16{}, fp16, fp16);

  k.squared_norm[fp32] = squared_norm<Fp32>;
  k.squared_norm[bf16] = squared_norm<Bf16>;
  k.squared_norm[fp16] = squared_norm<Fp16>;

  k.random = random_block;
  k.decode_bf16 = decode_bf16;
  k.encode_bf16 = encode_bf16;
  k.encode_bf16_random[0] = encode_bf16_random<false>;
  k.encode_bf16_random[1] = encode_bf16_random<true>;
  k.decode_int8[0] = decode_int8<false>;
  k.decode_int8[1] = decode_int8<true>;
  k.encode_int8[0] = encode_int8<false>;
  k.encode_int8[1] = encode_int8<true>;

  add_wire<WireInt8>(k);
  add_wire<WireFp8>(k);
  add_wire<WireInt4>(k);
  return k;
}
