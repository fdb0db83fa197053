// CRC-32C of arrays whose pieces are changed by several threads, of the bytes before and after: taken while a piece is in
// the cache, where it costs a third of what it does in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace penstock {

struct Sums {
  std::uint32_t before, after;
};

// An array of which every `grain` elements have a value of `value_bytes`.
struct SummedArray {
  const void* data;
  std::size_t value_bytes;
  std::size_t grain;
  bool changes;  // else its sum is taken once

  std::size_t offset(std::size_t element) const noexcept { return (element + grain - 1) / grain * value_bytes; }
};

// The sums of the pieces of some arrays. Every piece but the last has `piece` elements, a multiple of each grain.
class PieceSums {
 public:
  PieceSums(std::vector<SummedArray> arrays, std::size_t numel, std::size_t piece);

  // For the piece that begins at an element, before it is changed and after it was. Of other pieces at the same time.
  void before(std::size_t begin) noexcept;
  void after(std::size_t begin) noexcept;
  // Of each array as a whole, once all pieces are done.
  std::vector<Sums> join() const;

 private:
  std::size_t end_of(std::size_t begin) const noexcept;
  std::uint32_t sum(const SummedArray& array, std::size_t begin) const noexcept;

  std::vector<SummedArray> arrays_;
  std::size_t numel_, piece_;
  std::vector<Sums> sums_;  // those of the first piece's arrays, those of the second's, ...
};

}  // namespace penstock
