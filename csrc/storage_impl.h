// States and parameters in bf16, one block of 256 elements at a time. Included by kernels_impl.h.
//
// The reference is src/penstock/rules/formats.py, operation by operation.
using U = typename V::U;

// A 32-bit hash of the element's number in the block, under the block's 64-bit key.
inline U random_words(size_t i, std::uint64_t key) {
  U x = U::count() * U::splat(0x9E3779B9u) + U::splat(unsigned(i) * 0x9E3779B9u + unsigned(key));
  x = (x ^ (x >> 16)) * U::splat(0x7FEB352Du) ^ U::splat(unsigned(key >> 32));
  x = (x ^ (x >> 15)) * U::splat(0x846CA68Bu);
  return x ^ (x >> 16);
}
void random_block(unsigned* to, std::uint64_t key) noexcept {
  for (size_t i = 0; i < block_numel; i += V::width) U::store(to + i, random_words(i, key));
}
template <bool high>
U random_half(U word) {
  return high ? word >> 16 : word & U::splat(0xFFFFu);
}

void decode_bf16(float* to, const void* from, float) noexcept {
  const auto* const words = static_cast<const unsigned short*>(from);
  for (size_t i = 0; i < block_numel; i += V::width) V::store(to + i, Bf16::get(words + i));
}
float encode_bf16(void* to, const float* from, const unsigned*) noexcept {
  auto* const words = static_cast<unsigned short*>(to);
  for (size_t i = 0; i < block_numel; i += V::width) Bf16::store(words + i, V::to_bf16(V::load(from + i)));
  return 0;
}
template <bool high>
float encode_bf16_random(void* to, const float* from, const unsigned* random) noexcept {
  auto* const words = static_cast<unsigned short*>(to);
  for (size_t i = 0; i < block_numel; i += V::width)
    Bf16::store(words + i, V::to_bf16_up<false>(V::load(from + i), random_half<high>(U::load(random + i))));
  return 0;
}

// One fused pass with bf16 states over whole blocks, in registers from end to end.
template <class R, class Store, class Grad, bool random>
void update_bf16(const Arrays& arrays, const float* scalars, size_t begin, size_t end) noexcept {
  using Word = unsigned short;
  constexpr bool has_remainder = Store::kind == Master::remainder;
  constexpr int count = state_count[int(R::id)];
  constexpr bool second_draw = random && (count > 2 || !has_remainder);
  Word* const param = static_cast<Word*>(arrays.param);
  auto* const master = static_cast<typename Store::MasterWord*>(arrays.master);
  const auto* const grad = static_cast<const typename Grad::Word*>(arrays.grad);
  Word* states[count];
  for (int k = 0; k < count; ++k) states[k] = static_cast<Word*>(arrays.states[k]);
  const R rule(scalars);
  for (; begin < end; begin += block_numel) {
    const std::uint64_t block = arrays.first_block + begin / block_numel;
    const std::uint64_t keys[2] = {block_key(arrays.random_key, block, 0), block_key(arrays.random_key, block, 1)};
    for (size_t i = begin; i < begin + block_numel; i += V::width) {
      V values[count];
      look_ahead(i, param, grad);
      if constexpr (has_remainder) look_ahead(i, master);
      for (int k = 0; k < count; ++k) look_ahead(i, states[k]);
      for (int k = 0; k < count; ++k) values[k] = Bf16::get(states[k] + i);
      const V p = step(rule, Store::get(param, master, i), Grad::get(grad + i), values);
      if constexpr (random) {
        const U words = random_words(i - begin, keys[0]);
        const U more = second_draw ? random_words(i - begin, keys[1]) : words;
        V::store_half(states[0] + i, V::to_bf16_up<true>(values[0], random_half<false>(words)));
        if constexpr (count > 1) V::store_half(states[1] + i, V::to_bf16_up<true>(values[1], random_half<true>(words)));
        if constexpr (count > 2) V::store_half(states[2] + i, V::to_bf16_up<false>(values[2], random_half<false>(more)));
        if constexpr (!has_remainder) V::store_half(param + i, V::to_bf16_up<true>(p, random_half<true>(more)));
        if constexpr (has_remainder) Store::put(param, master, i, p);
      } else {
        for (int k = 0; k < count; ++k) V::store_half(states[k] + i, V::to_bf16(values[k]));
        Store::put(param, master, i, p);
      }
    }
  }
}
